"""Writes the tokenizer, chat template and generation defaults of a GGUF model as Hugging Face has
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nibble.checkpoint.gguf.file import GgufFile
from nibble.checkpoint.gguf.vocabulary import (
    CONTROL,
    SPACE,
    UNKNOWN,
    Vocabulary,
)
from nibble.errors import ExitCode, NibbleError

TEMPLATE_KEY = "tokenizer.chat_template"
TEMPLATE_FILE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"  # transformers 5: a folder of NAME.jinja
# llama.cpp ends an answer at these too (src/llama-vocab.cpp, special_eog_ids): many files name only
# one of a model's end tokens.
END_OF_ANSWER = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)
_ROLES = ("bos", "eos", "unknown", "padding")
HF_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def write_tokenizer(dest: Path, file: GgufFile, vocabulary: Vocabulary, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

    Raises MODEL for a special token's id that is not in the vocabulary.
    """
    roles = special_ids(file, vocabulary)
    content = tokenizer_json(vocabulary)
    (dest / "tokenizer.json").write_text(
        json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.bos is not None,
        "add_eos_token": vocabulary.eos is not None,
    }
    config |= {HF_ROLES[role]: vocabulary.tokens[number] for role, number in roles.items()}
    _write(dest / "tokenizer_config.json", config)
    for name, template in templates(file).items():
        path = dest / (f"{OTHER_TEMPLATES}/{name}.jinja" if name else TEMPLATE_FILE)
        path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")
    _write(dest / "generation_config.json", generation_config(file, vocabulary, roles))


def special_ids(file: GgufFile, vocabulary: Vocabulary) -> dict[str, int]:
    """The ids of BOS, EOS, unknown and padding that the file states."""
    found = {}
    for role in _ROLES:
        number = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(vocabulary.tokens):
            raise NibbleError(
                ExitCode.MODEL,
                what=f"{file.path}: tokenizer.ggml.{role}_token_id is {number}",
                expected=f"an id below {len(vocabulary.tokens)}",
                action="convert another GGUF file of this model",
            )
        found[role] = number
    return found


def templates(file: GgufFile) -> dict[str, str]:
    """Chat templates by name, the default one under an empty name."""
    found = {}
    for key, value in file.metadata.items():
        name = key.removeprefix(TEMPLATE_KEY).removeprefix(".")
        if not isinstance(value, str) or not (
            key == TEMPLATE_KEY or f"{TEMPLATE_KEY}.{name}" == key
        ):
            continue
        if name and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):  # it becomes a file's name
            continue
        found[name] = value
    return found


def generation_config(
    file: GgufFile, vocabulary: Vocabulary, roles: Mapping[str, int]
) -> dict[str, Any]:
    """Where answers end: every end token of the file, and those that llama.cpp knows by text."""
    stated = [roles.get("eos")]
    stated += [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    by_text = [
        vocabulary.ids[text]
        for text in END_OF_ANSWER
        if text in vocabulary.ids and vocabulary.types[vocabulary.ids[text]] == CONTROL
    ]
    ends = list(dict.fromkeys(one for one in [*stated, *by_text] if isinstance(one, int)))
    found: dict[str, Any] = {"eos_token_id": ends if len(ends) != 1 else ends[0]}
    for role, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if role in roles:
            found[key] = roles[role]
    return found


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json, in the format of the library tokenizers 0.23."""
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.types[number] in (CONTROL, UNKNOWN),
        }
        for token, number in sorted(vocabulary.whole.items(), key=lambda item: item[1])
    ]
    scored = vocabulary.splitting is None
    parts = _sentencepiece(vocabulary) if scored else _byte_level(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "post_processor": _post_processor(vocabulary, None if scored else _BYTE_LEVEL),
    }


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    splitting = vocabulary.splitting
    assert splitting is not None
    cuts = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in splitting.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if splitting.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, _BYTE_LEVEL]},
        "decoder": _BYTE_LEVEL,
        "model": _bpe(vocabulary, vocabulary.merges, ignore_merges=splitting.whole_words),
    }


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = replace
    if vocabulary.space_prefix:
        prepend = {"type": "Prepend", "prepend": SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = [
        vocabulary.tokens[number] for number, kind in enumerate(vocabulary.types) if kind == UNKNOWN
    ]
    model = _bpe(vocabulary, _scored_merges(vocabulary), byte_fallback=True, fuse_unk=True)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model | {"unk_token": unknown[0] if unknown else None},
    }


def _bpe(vocabulary: Vocabulary, merges: Any, **options: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocabulary.ids),
        "merges": [list(pair) for pair in merges],
        **options,
    }


def _scored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that scores imply: every way to make a token of two, best-scored tokens first."""
    ids, found = vocabulary.ids, []
    for token, number in ids.items():
        if vocabulary.types[number] in (CONTROL, UNKNOWN) or len(token) < 2:
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in ids and right in ids:
                found.append((-vocabulary.scores[number], ids[left], ids[right]))
    found.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, left, right in found]


def _post_processor(vocabulary: Vocabulary, otherwise: Any) -> Any:
    """A text begins with BOS, and ends with EOS, where the file says so."""
    if vocabulary.bos is None and vocabulary.eos is None:
        return otherwise

    def special(number: int | None) -> list[dict[str, Any]]:
        if number is None:
            return []
        return [{"SpecialToken": {"id": vocabulary.tokens[number], "type_id": 0}}]

    def sequence(name: str) -> list[dict[str, Any]]:
        inner = {"Sequence": {"id": name, "type_id": 0}}
        return [*special(vocabulary.bos), inner, *special(vocabulary.eos)]

    used = [number for number in (vocabulary.bos, vocabulary.eos) if number is not None]
    return {
        "type": "TemplateProcessing",
        "single": sequence("A"),
        "pair": [*sequence("A"), *sequence("B")],
        "special_tokens": {
            vocabulary.tokens[number]: {
                "id": vocabulary.tokens[number],
                "ids": [number],
                "tokens": [vocabulary.tokens[number]],
            }
            for number in used
        },
    }


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

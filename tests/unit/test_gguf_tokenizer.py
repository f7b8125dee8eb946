"""Tokenizers from GGUF: llama.cpp's ids, the written files against the file's vocabulary, and what
is refused.

tests/unit/data/gguf/llama_cpp_ids.json holds what llama.cpp gives for the 200 texts and these
vocabularies (llama-cpp-python 0.3.36, `tokenize(text, add_bos=False, special=True)`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from nibble.checkpoint.gguf.check import check_tokenizer, render
from nibble.checkpoint.gguf.file import GgufFile, open_gguf
from nibble.checkpoint.gguf.strings import CONVERSATIONS, COUNT, strings
from nibble.checkpoint.gguf.tokenizer import write_tokenizer
from nibble.checkpoint.gguf.vocabulary import SPLITTINGS, Vocabulary, read_vocabulary
from nibble.errors import ExitCode, NibbleError
from tests.support.models.gguf_models import DATA, SPECIAL, TEMPLATE, write_gguf

TRUTH: dict[str, Any] = json.loads((DATA / "llama_cpp_ids.json").read_text(encoding="utf-8"))
# llama.cpp has no class for combining marks in its pattern for "tekken", and does not compose them
# for "qwen2". The models' own tokenizers do.
MARKS = ("e\u0301", "e\u0301e\u0301 n\u0303 a\u0308", "a\u0300\u0301\u0302b")
MANY_MARKS = "Z\u0335\u0321\u0322a\u0338l\u0337g\u0336o\u0335"


def file_of(tmp_path: Path, pre: str | None, template: str | None = TEMPLATE) -> GgufFile:
    return open_gguf(write_gguf(tmp_path / "v.gguf", "llama", {}, {}, pre=pre, template=template))


def written(folder: Path, file: GgufFile) -> tuple[Path, Vocabulary]:
    folder.mkdir()
    vocabulary = read_vocabulary(file)
    write_tokenizer(folder, file, vocabulary, 1024)
    return folder, vocabulary


@pytest.mark.parametrize("name", TRUTH)
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, None if name == "sentencepiece" else name)
    folder, vocabulary = written(tmp_path / "out", file)
    unframed = dataclasses.replace(vocabulary, bos=None, eos=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts, ids = TRUTH[name]["texts"], TRUTH[name]["ids"]
    assert len(texts) == COUNT == len(ids)
    assert texts == strings(vocabulary.whole)
    differ = [text for text, one in zip(texts, ids, strict=True) if unframed.encode(text) != one]
    own = {"tekken": {*MARKS, MANY_MARKS}, "qwen2": set(MARKS)}.get(name, set())
    assert set(differ) == own
    for text in texts:
        found = tokenizer(text, add_special_tokens=False).input_ids
        assert found == unframed.encode(text), text
        assert tokenizer.decode(found) == text or text in own or name == "sentencepiece"


def test_each_way_to_split_differs() -> None:
    """Vocabularies on which two ways to split agree would test nothing."""
    found = {json.dumps(TRUTH[name]["ids"]) for name in TRUTH}
    assert len(found) == len(TRUTH) == 6


@pytest.mark.parametrize("pre", [*SPLITTINGS, None])
def test_a_good_file_passes(pre: str | None, tmp_path: Path) -> None:
    file = file_of(tmp_path, pre)
    folder, vocabulary = written(tmp_path / "out", file)
    assert check_tokenizer(folder, file, vocabulary) == COUNT
    begins = pre is None or SPLITTINGS[pre].begins
    assert (AutoTokenizer.from_pretrained(folder)("x").input_ids[0] == 1) == begins


def test_the_end_of_answers(tmp_path: Path) -> None:
    folder, _ = written(tmp_path / "out", file_of(tmp_path, "smollm"))
    found = json.loads((folder / "generation_config.json").read_text())
    assert found == {"eos_token_id": [2, 0], "bos_token_id": 1, "pad_token_id": 0}


def test_chat_template_is_carried_over(tmp_path: Path) -> None:
    folder, _ = written(tmp_path / "out", file_of(tmp_path, "qwen2"))
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.apply_chat_template(
        CONVERSATIONS[1], tokenize=False, add_generation_prompt=True
    )
    assert found == (
        "<|im_start|><|im_start|>system\nAnswer in one word.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found == render(
        TEMPLATE, messages=CONVERSATIONS[1], add_generation_prompt=True, bos_token=SPECIAL[1]
    )


def test_a_template_with_every_extension(tmp_path: Path) -> None:
    """transformers adds to Jinja: tojson, loop controls, generation blocks, refusals, dates."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}"
        "{% generation %}{{ m | tojson(indent=2, sort_keys=True) }} {{ pad_token }}"
        "{% endgeneration %}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    file = file_of(tmp_path, "smollm", template)
    folder, vocabulary = written(tmp_path / "out", file)
    assert check_tokenizer(folder, file, vocabulary) == COUNT


def test_other_templates(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "v.gguf",
        "llama",
        {},
        {},
        general={
            "tokenizer.chat_template.tool_use": "TOOLS {{ messages[0]['content'] }}",
            "tokenizer.chat_template.../../evil": "no",
        },
    )
    folder, vocabulary = written(tmp_path / "out", open_gguf(path))
    assert [one.name for one in (folder / "additional_chat_templates").iterdir()] == [
        "tool_use.jinja"
    ]
    check_tokenizer(folder, open_gguf(path), vocabulary)


def refused(folder: Path, file: GgufFile, vocabulary: Vocabulary) -> str:
    with pytest.raises(NibbleError) as caught:
        check_tokenizer(folder, file, vocabulary)
    assert caught.value.code == ExitCode.MODEL
    return caught.value.line()


def test_a_tokenizer_that_disagrees(tmp_path: Path) -> None:
    """As transformers' own converter writes it: GPT-2's words, without single digits."""
    file = file_of(tmp_path, "smollm")
    folder, vocabulary = written(tmp_path / "out", file)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["pre_tokenizer"]["pretokenizers"][0]
    path.write_text(json.dumps(content), encoding="utf-8")
    line = refused(folder, file, vocabulary)
    assert "the converted tokenizer reads '" in line and "the file's vocabulary gives [" in line


def test_special_tokens_that_are_not(tmp_path: Path) -> None:
    file = file_of(tmp_path, "smollm")
    folder, vocabulary = written(tmp_path / "out", file)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"] = content["added_tokens"][:1]
    path.write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "<|im_start|>" in refused(folder, file, vocabulary)


def test_a_template_that_disagrees(tmp_path: Path) -> None:
    file = file_of(tmp_path, "smollm")
    folder, vocabulary = written(tmp_path / "out", file)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("assistant", "Assistant"))
    assert "the converted chat template gives" in refused(folder, file, vocabulary)


def test_a_way_to_split_that_nibble_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(NibbleError) as caught:
        read_vocabulary(file_of(tmp_path, "kimi-k2"))
    assert caught.value.code == ExitCode.CONFIG
    assert "tokenizer.ggml.pre = 'kimi-k2'" in caught.value.line()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind 'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no complete tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": []}, "no complete tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "no complete tokenizer.ggml.merges (it has 'ab')"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens (its values are of another type)"),
        ({"tokenizer.ggml.merges": "a b"}, "no complete tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": "llama"}, "no complete tokenizer.ggml.scores"),
        ({"tokenizer.ggml.token_type": [1]}, "no complete tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.eos_token_id": 9**9}, "tokenizer.ggml.eos_token_id is 387420489"),
    ],
)
def test_an_incomplete_vocabulary(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = file_of(tmp_path, "smollm")
    broken = dataclasses.replace(file, metadata={**file.metadata, **change})
    with pytest.raises(NibbleError) as caught:
        written(tmp_path / "out", broken)
    assert says in caught.value.line()


def test_the_texts_are_of_many_kinds() -> None:
    found = strings(["<a>", "<b>"])
    assert len(found) == len(set(found)) == COUNT == 200

"""Compares the tokenizer that nibble wrote with the GGUF file it came from.

The file's own vocabulary, read plainly (vocabulary.py), gives the ids that llama.cpp gives. A
server loads the written files with transformers, which may pick other rules by a model's type. So
the written files are loaded as a server loads them, and every id must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nibble.checkpoint.gguf.file import GgufFile
from nibble.checkpoint.gguf.strings import CONVERSATIONS, strings
from nibble.checkpoint.gguf.tokenizer import HF_ROLES, special_ids, templates
from nibble.checkpoint.gguf.vocabulary import Vocabulary
from nibble.errors import ExitCode, NibbleError


def check_tokenizer(folder: Path, file: GgufFile, vocabulary: Vocabulary) -> int:
    """Load the tokenizer in `folder` and compare it with `file`; returns the number of texts.

    Raises MODEL with the first text whose ids, or the first conversation whose prompt, differ.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library tokenizers raises Exception itself
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{file.path} has a vocabulary that transformers cannot load ({error})",
            expected="merges of tokens that are in it",
            action="download the file again",
        ) from None
    texts = strings(vocabulary.whole)
    for text in texts:
        written = list(tokenizer(text).input_ids)
        stated = vocabulary.encode(text)
        if written != stated:
            raise NibbleError(
                ExitCode.MODEL,
                what=f"{file.path}: the converted tokenizer reads {text!r} as {_short(written)},"
                f" the file's vocabulary gives {_short(stated)}",
                expected="equal token ids",
                action="convert the model from its Hugging Face format",
            )
    for name, template in templates(file).items():
        _check_template(file, tokenizer, name, template, vocabulary)
    return len(texts)


def _short(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 24 else f"{ids[:24]}… ({len(ids)} ids)"


def _check_template(
    file: GgufFile, tokenizer: Any, name: str, template: str, vocabulary: Vocabulary
) -> None:
    special = {
        HF_ROLES[role]: vocabulary.tokens[number]
        for role, number in special_ids(file, vocabulary).items()
    }
    for messages in CONVERSATIONS:
        for ask in (True, False):
            written = _or_error(
                lambda messages=messages, ask=ask: tokenizer.apply_chat_template(
                    messages,
                    chat_template=name or None,
                    tokenize=False,
                    add_generation_prompt=ask,
                )
            )
            stated = _or_error(
                lambda messages=messages, ask=ask: render(
                    template, messages=messages, add_generation_prompt=ask, **special
                )
            )
            if written != stated:
                raise NibbleError(
                    ExitCode.MODEL,
                    what=f"{file.path}: the converted chat template gives {written!r},"
                    f" the file's gives {stated!r}",
                    expected="equal prompts",
                    action="convert the model from its Hugging Face format",
                )


def _or_error(make: Callable[[], str]) -> str:
    """What `make` returns, or how it refuses: many templates refuse roles they do not know."""
    from jinja2 import TemplateError

    try:
        return make()
    except TemplateError as error:
        return f"{type(error).__name__}: {error}"


def render(template: str, **values: Any) -> str:
    """A chat template's text, by the rules that chat templates are written for
    (transformers utils/chat_template_utils.py, _compile_jinja_template).
    """
    import datetime
    import json

    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant says, for training; it changes no text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **words: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **words)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template).render(tools=None, documents=None, **values)

"""Parses scripted answers with vLLM's tool parsers, whole and as streams, in one process.

Run as `python -m nibble.engine.parse_answers`. stdin is JSON: `tokens`, `tools`, and `cases`, each
with `parser` and `text`. The answer on stdout is a list with, for each case, `whole` and the
streams `1` and `5` (tokens in a piece): calls and content, or `error`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

PIECES = (1, 5)
# Models that frame every message: only their reasoning parser takes the frame off.
FRAMED = ("muse_glimmer",)


def main() -> None:
    """Answer one job."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    tokenizer = make_tokenizer(job["tokens"])
    found = [_case(tokenizer, job["tools"], case["parser"], case["text"]) for case in job["cases"]]
    answers.write(json.dumps(found))
    answers.close()


def make_tokenizer(tokens: Sequence[str]) -> Any:
    """A tokenizer of single bytes and `tokens`: enough for parsers that look for ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=found)


def _case(tokenizer: Any, tools: Any, parser: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("whole", *map(str, PIECES)):
        try:
            request, parse = _parser(tokenizer, tools, parser)
            if name == "whole":
                found[name] = _whole(parse, request, text, tokenizer)
            else:
                found[name] = _streamed(parse, request, list(_pieces(tokenizer, text, int(name))))
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def _parser(tokenizer: Any, tools: Any, name: str) -> tuple[Any, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    request = ChatCompletionRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "?"}],
            "tools": tools,
            "tool_choice": "auto",
        }
    )
    reasoning = name if name in FRAMED else None
    made = ParserManager.get_parser(name, reasoning, enable_auto_tools=True)
    assert made is not None
    known: Any = request.tools
    # Thinking off, as its end would be part of the answer
    kwargs = {"enable_thinking": False, "thinking": False}
    return request, made(tokenizer, known, chat_template_kwargs=kwargs)


def _whole(parser: Any, request: Any, text: str, tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer.encode(text)
    _, content, calls = parser.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=ids
    )
    return {
        "calls": [[call.name, call.arguments] for call in calls or ()],
        "content": content or "",
    }


def _pieces(tokenizer: Any, text: str, size: int) -> Iterator[tuple[str, list[int]]]:
    """(new text, ids) of each `size` tokens; an unfinished character waits, as in vLLM."""
    ids, before = tokenizer.encode(text), ""
    held: list[int] = []
    for begin in range(0, len(ids), size):
        held += ids[begin : begin + size]
        now = tokenizer.decode(ids[: begin + size])
        if now.endswith("�") and begin + size < len(ids):
            continue
        yield now[len(before) :], held
        before, held = now, []


def _streamed(parser: Any, request: Any, pieces: Sequence[tuple[str, list[int]]]) -> dict[str, Any]:
    calls: dict[int, list[str]] = {}
    content = ""
    for place, (text, ids) in enumerate(pieces):
        delta = parser.parse_delta(
            text, ids, request, prompt_token_ids=[], finished=place == len(pieces) - 1
        )
        if delta is None:
            continue
        content += delta.content or ""
        for call in delta.tool_calls or ():
            _join(calls.setdefault(call.index, ["", ""]), call.function)
    return {"calls": [calls[at] for at in sorted(calls)], "content": content}


def _join(known: list[str], delta: Any) -> None:
    known[0] += delta.name or ""
    known[1] += delta.arguments or ""


if __name__ == "__main__":
    main()

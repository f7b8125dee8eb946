"""Runs vLLM's `vllm bench serve` several times in one process, whose imports take 8 s.

Run as `python -m nibble.engine.bench_serve`. Each line of stdin is a JSON object: `words`, those
after `vllm bench serve`, and `key`, the server's. The answer is one line on stdout: `result`, what
`--save-result --save-detailed` would write, or `error`. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import IO, Any

_USAGE = re.compile(r'"usage":\s*\{')
KEY_VARIABLE = "OPENAI_API_KEY"  # vllm 0.32 benchmarks/lib/endpoint_request_func.py:148


def main() -> None:
    """Answer every line until the end of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    from vllm.benchmarks.lib import endpoint_request_func
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    endpoint_request_func.StreamedResponseHandler = with_usage_apart(  # type: ignore[misc]
        endpoint_request_func.StreamedResponseHandler
    )
    parser = FlexibleArgumentParser()
    add_cli_args(parser)

    def measure(words: Sequence[str]) -> dict[str, Any]:
        arguments = parser.parse_args([*words, "--save-detailed"])
        assert arguments is not None
        return asyncio.run(main_async(arguments))

    _tell(answers, {"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.pop(KEY_VARIABLE, None)
        if job["key"]:
            os.environ[KEY_VARIABLE] = job["key"]
        try:
            _tell(answers, {"result": measure(job["words"])})
        except (Exception, SystemExit) as error:  # argparse exits
            _tell(answers, {"error": f"{type(error).__name__}: {error}"})


def with_usage_apart(base: type[Any]) -> type[Any]:
    """vLLM's reader of streams, for servers whose last piece has both a choice and the usage, such
    as llama-server: vLLM reads the usage of a piece without a choice only, and else counts the
    tokens of the text again, which can give another number.
    """

    class Handler(base):
        def add_chunk(self, chunk_bytes: bytes) -> list[str]:
            return [
                part for message in super().add_chunk(chunk_bytes) for part in usage_apart(message)
            ]

    return Handler


def usage_apart(message: str) -> list[str]:
    """The message, in two parts where it has both."""
    if not _USAGE.search(message) or not message.startswith("data: "):
        return [message]
    piece = json.loads(message.removeprefix("data: "))
    if not piece.get("choices"):
        return [message]
    usage = {"choices": [], "usage": piece.pop("usage")}
    # A choice without text is the end, and no token
    parts = [piece] if any(one.get("text") for one in piece["choices"]) else []
    return [f"data: {json.dumps(part)}" for part in (*parts, usage)]


def _tell(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer, default=float) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()

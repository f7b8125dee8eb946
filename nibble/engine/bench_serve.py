"""Runs vLLM's `vllm bench serve` several times in one process, whose imports take 8 s.

Run as `python -m nibble.engine.bench_serve`. Each line of stdin is a JSON object: `words`, those
after `vllm bench serve`, and `key`, the server's. The answer is one line on stdout: `result`, what
`--save-result --save-detailed` would write, or `error`. What vLLM prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import IO, Any

KEY_VARIABLE = "OPENAI_API_KEY"  # vllm 0.32 benchmarks/lib/endpoint_request_func.py:148


def main() -> None:
    """Answer every line until the end of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

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


def _tell(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer, default=float) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()

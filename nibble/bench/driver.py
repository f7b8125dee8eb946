"""The process that runs vLLM's benchmark, and the watch over the server meanwhile."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nibble.bench.about import clean_environ
from nibble.bench.sweep import Cell
from nibble.errors import ExitCode, NibbleError
from nibble.serve.endpoint import Endpoint

_LOOK_S, _LOOKS_WITHOUT_ANSWER = 10.0, 3  # a server may be silent for half a minute
_END_S = 5.0


class Driver:
    """One process for all rounds. What vLLM's benchmark prints goes to `log`."""

    def __init__(self, log: Path, environ: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "nibble.engine.bench_serve"],
                env={**clean_environ(environ), "VLLM_LOGGING_LEVEL": "WARNING"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for nibble, which ends it
                text=True,
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._answer(lambda: True)  # ready

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait(_END_S)

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._answers.put(line)
        self._answers.put("")

    def measure(
        self, endpoint: Endpoint, words: list[str], is_alive: Callable[[], bool]
    ) -> Mapping[str, Any]:
        """vLLM's result. Raises ConnectionError where the server stops answering for 30 s, CONFIG
        where the benchmark itself fails.
        """
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer then says that it ended
            self._child.stdin.write(json.dumps({"words": words, "key": endpoint.key}) + "\n")
            self._child.stdin.flush()
        answer = self._answer(is_alive)
        if "error" in answer:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"vLLM's benchmark failed: {answer['error'][:300]}",
                action="name the folder of the model's tokenizer with --tokenizer",
            )
        return answer["result"]

    def _answer(self, is_alive: Callable[[], bool]) -> Mapping[str, Any]:
        silent = 0
        while True:
            with contextlib.suppress(queue.Empty):
                line = self._answers.get(timeout=_LOOK_S)
                if not line:
                    raise self._ended()
                return json.loads(line)
            silent = 0 if is_alive() else silent + 1
            if silent >= _LOOKS_WITHOUT_ANSWER:
                raise ConnectionError(f"no answer for {silent * _LOOK_S:.0f} s")

    def _ended(self) -> NibbleError:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return NibbleError(
            ExitCode.INTERNAL,
            what=f"vLLM's benchmark ended: {lines[-1] if lines else 'it printed nothing'}",
            action="check the installation with `nibble doctor`",
        )


def words_for(
    endpoint: Endpoint, name: str, tokenizer: Sequence[str], cell: Cell, requests: int, seed: int
) -> list[str]:
    """The words after `vllm bench serve` for one round. Greedy; every answer has all tokens.

    `tokenizer`: flags that name it.

    A prompt depends on `seed` alone: two servers get the same ones, two rounds different ones, so
    that no prefix cache answers.
    """
    return [
        *("--base-url", endpoint.url, "--model", name, *tokenizer),
        *("--dataset-name", "random", "--temperature", "0", "--seed", str(seed)),
        *("--random-input-len", str(cell.prompt_tokens)),
        *("--random-output-len", str(cell.output_tokens)),
        *("--num-prompts", str(requests), "--max-concurrency", str(cell.concurrency)),
        "--disable-tqdm",
    ]

"""Writes and checks config and tokenizer of a GGUF model, in a second process while the weights are
converted: importing transformers and the check take as long as some GB of weights.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nibble.checkpoint.gguf.families import Config
from nibble.checkpoint.gguf.file import GgufFile
from nibble.checkpoint.gguf.vocabulary import Vocabulary
from nibble.errors import NibbleError

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Others:
    """What the files beside the weights are made of."""

    path: Path
    metadata: Mapping[str, Any]
    vocabulary: Vocabulary
    config: Config


def write_others(dest: Path, given: Others) -> None:
    """Write the files to `dest` and check them. Raises what `check_tokenizer` raises."""
    from nibble.checkpoint.gguf.check import check_tokenizer
    from nibble.checkpoint.gguf.tokenizer import write_tokenizer

    file = GgufFile(given.path, given.metadata, {}, {})
    text = json.dumps(given.config, indent=2) + "\n"
    (dest / CONFIG_FILE).write_text(text, encoding="utf-8")
    write_tokenizer(dest, file, given.vocabulary, given.config["max_position_embeddings"])
    check_tokenizer(dest, file, given.vocabulary)


class SecondProcess:
    """Does `write_others` while the caller does something else. It begins to import before it is
    told what to write, and ends with this object. Where transformers is loaded already, there is no
    process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if "transformers" not in sys.modules:
            command = [sys.executable, "-m", "nibble.checkpoint.gguf.others"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            weakref.finalize(self, _end, self._process)

    @contextmanager
    def writing(self, dest: Path, given: Others) -> Iterator[None]:
        """`write_others`; its error is raised at the end. It ends before this does."""
        if self._process is None:
            write_others(dest, given)
            yield
            return
        with self._process as process:
            try:
                assert process.stdin and process.stdout
                try:
                    pickle.dump((dest.resolve(), given), process.stdin)
                    process.stdin.close()
                except BrokenPipeError:
                    pass  # it ended early: its status says so below
                yield
                result = process.stdout.read()
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise RuntimeError(f"the check of the tokenizer ended with {process.returncode}")
        problem = pickle.loads(result)
        if isinstance(problem, dict):
            raise NibbleError(**problem)
        if problem:
            raise problem


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


def main() -> int:
    """The second process. Its own config.json is for the check: the caller writes the model's."""
    gc.disable()  # a vocabulary is a million objects that stay
    # Tokenizers do without torch, which takes longer to import than all else here.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # transformers says that it lacks torch
    from transformers import AutoTokenizer  # noqa: F401

    try:
        dest, given = pickle.load(sys.stdin.buffer)
    except EOFError:  # the conversion ended before
        return 0
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    problem: Any = None
    try:
        with TemporaryDirectory(prefix=".others.", dir=dest) as folder:
            write_others(Path(folder), given)
            for path in Path(folder).iterdir():
                if path.name != CONFIG_FILE:
                    path.rename(dest / path.name)
    except NibbleError as error:
        problem = vars(error)
    except OSError as error:
        problem = error
    pickle.dump(problem, out)
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""GPTQ for `nibble convert --method gptq`: llm-compressor computes, nibble takes the result over.

llm-compressor pins another release of compressed-tensors than vLLM, so it runs in a separate
virtual environment. Codes and block scales stay bit for bit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.convert import llm_compressor
from nibble.checkpoint.convert.files import Read
from nibble.checkpoint.convert.layouts import reciprocal
from nibble.checkpoint.convert.quantize import Encode, Part
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.scale_values import TensorFiles
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import cache_dir

PACKAGE, VERSION = "llmcompressor", "0.14.0.1"
ROW_TOKENS = 512
ROWS = 32  # 16,384 tokens: ten for each input feature of the widest layer of a 135M model
LEAST_ROWS = 8


def check_modules(parts: Mapping[str, tuple[Part, ...]], option: str = "--method gptq") -> None:
    """Raise CONFIG for experts, which transformers stacks, so that `option` does not find them by
    name.
    """
    for part in (part for group in parts.values() for part in group):
        if ".experts." in part.module:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{option} does not work with experts ({part.module})",
                expected="a dense model",
                action=f"drop {option}, or leave them in BF16: --exclude '*.experts.*'",
            )


def environment(environ: Mapping[str, str]) -> Path:
    """The Python that has llm-compressor. Raises CONFIG with the commands that make it."""
    folder = cache_dir(environ) / "llm-compressor"
    python = folder / "bin" / "python"
    found = _version(python)
    if found == VERSION:
        return python
    had = f"has {PACKAGE} {found}" if found else f"has no {PACKAGE}"
    raise NibbleError(
        ExitCode.CONFIG,
        what=f"--method gptq needs {PACKAGE} {VERSION}, and {folder} {had}",
        expected="a separate virtual environment, because its compressed-tensors is not vLLM's",
        action=f"run `python3 -m venv {folder} && {folder}/bin/pip install {PACKAGE}=={VERSION}`",
    )


def _version(python: Path) -> str:
    """Of the package in that environment; empty without it."""
    code = f"import importlib.metadata as m; print(m.version({PACKAGE!r}))"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def default_texts() -> tuple[str, ...]:
    """The topics of Python's manual (PSF licence), which every Python has: 110,000 tokens of
    technical English.
    """
    from pydoc_data.topics import topics

    return tuple(topics[name] for name in sorted(topics))


def calibration_rows(folder: Path, texts: Iterable[str]) -> list[list[int]]:
    """Up to ROWS rows of ROW_TOKENS token ids, spread over the texts. Raises USAGE for too few."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    # `verbose` would warn that the whole text is longer than the model's context
    found = tokenizer("\n".join(texts), add_special_tokens=False, verbose=False)
    ids: list[int] = found.input_ids
    rows = [ids[at : at + ROW_TOKENS] for at in range(0, len(ids) - ROW_TOKENS + 1, ROW_TOKENS)]
    if len(rows) < LEAST_ROWS:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"the text of --calibrate has {len(ids)} tokens",
            expected=f"at least {LEAST_ROWS * ROW_TOKENS} for --method gptq",
            action="give more text, or omit --calibrate: nibble then takes Python's manual",
        )
    return rows[:: max(1, len(rows) // ROWS)][:ROWS]


@contextmanager
def quantized(
    python: Path, folder: Path, beside: Path, modules: Sequence[str], rows: list[list[int]]
) -> Iterator[Encode]:
    """The weights of the BF16 model in `folder` by GPTQ, within the context. Raises CONFIG."""
    with TemporaryDirectory(prefix=".gptq.", dir=beside) as work:
        job = {"source": str(folder), "dest": f"{work}/out", "modules": modules, "rows": rows}
        file = Path(work, "job.json")
        file.write_text(json.dumps(job), encoding="utf-8")
        words = [str(python), "-I", llm_compressor.__file__, str(file)]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=work
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{PACKAGE} ended with {done.returncode}: {lines[-1] if lines else 'no text'}",
                expected="an architecture that its release quantizes, and memory for the model",
                action="use --method round",
            )
        with TensorFiles(Path(work, "out")) as files:
            yield _stored(files, modules)


def _stored(files: TensorFiles, modules: Iterable[str]) -> Encode:
    """Takes over the tensors of a compressed-tensors folder. Raises CONFIG for a lacking layer."""
    weights = {weight.module: weight for weight in read_checkpoint(str(files.folder)).nvfp4}
    for module in modules:
        if module not in weights:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{PACKAGE} {VERSION} wrote no NVFP4 weight for {module}",
                action="use --method round, or exclude it with --exclude",
            )

    def encode(part: Part, _dtype: str, _read: Read) -> tuple[Any, Any, Any]:
        weight = weights[part.module]
        assert (weight.rows, weight.columns) == (part.rows, part.columns), part
        assert weight.scale is not None and weight.global_scale is not None, part

        def whole(tensor: TensorInfo) -> bytes:
            return files.read(tensor, 0, tensor.nbytes)

        return whole(weight.weight), whole(weight.scale), reciprocal(whole(weight.global_scale))

    return encode

"""`nibble convert`: changes the layout of NVFP4 checkpoints exactly, and quantizes BF16 ones.

Few tensors are in memory at a time. The new folder is written beside its place and renamed
when it is complete.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.cloverlm import is_cloverlm
from nibble.checkpoint.convert import gptq, one_pass, quantize
from nibble.checkpoint.convert.cloverlm import Packing
from nibble.checkpoint.convert.config import (
    HF_QUANT_FILE,
    Layout,
    ignore_list,
    no_kv,
    write_configs,
)
from nibble.checkpoint.convert.files import one_by_one, rewrite
from nibble.checkpoint.convert.layouts import Relabel, check
from nibble.checkpoint.convert.measured import measured
from nibble.checkpoint.convert.original import Original, original
from nibble.checkpoint.convert.quantize import (
    Encode,
    Part,
    Quantization,
)
from nibble.checkpoint.convert.wishes import PLAIN_WISHES, Wishes, check_wishes
from nibble.checkpoint.exclusions import PLAIN
from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import Nvfp4Weight
from nibble.checkpoint.source import FolderSource, read_json
from nibble.checkpoint.verify import check_scales
from nibble.checkpoint.weights import kind_of
from nibble.errors import ExitCode, NibbleError
from nibble.hub.progress import OnProgress

_SOURCE_LAYOUTS: Mapping[str, Layout] = {
    "modelopt": "modelopt",
    "compressed-tensors": "compressed-tensors",
    "quartet2": "quartet-packed",
}


@dataclass(frozen=True)
class Done:
    """The result: the number of NVFP4 weights, bytes of tensors that were written and read, the
    time, and the layers that were kept in BF16 because they are sensitive.
    """

    dest: Path
    weights: int
    nbytes: int
    read_nbytes: int
    seconds: float
    kept: tuple[str, ...] = ()

    @property
    def rate(self) -> str:
        """What was read and written, and how fast."""
        read, written = self.read_nbytes / 1e6, self.nbytes / 1e6
        return (
            f"read {read:,.0f} MB, wrote {written:,.0f} MB in {self.seconds:.1f} s"
            f" ({(read + written) / self.seconds:,.0f} MB/s)"
        )


def convert(
    source: str,
    dest: Path,
    to: str,
    wishes: Wishes = PLAIN_WISHES,
    on_progress: OnProgress = lambda _: None,
) -> Done:
    """Write `source` (a folder, a pulled model's id or a GGUF file) to the new folder `dest` as
    `to`, one of TARGETS.

    Raises MODEL for an absent or corrupt source, CONFIG for an unsuitable one, USAGE for
    contradictory words.
    """
    began = time.monotonic()
    check_wishes(to, wishes)
    if dest.exists():
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{dest} exists",
            expected="a new folder",
            action="remove it or name another",
        )
    _need_kernels()
    model = original(source, to)
    with _beside(dest) as unfinished, model.others(unfinished):
        from_bf16 = _pack if is_cloverlm(model.found) else _quantize
        make = from_bf16 if to == "nvfp4" else _relabel
        count, kept = make(model, unfinished, to, wishes, on_progress)
    nbytes = sum(path.stat().st_size for path in dest.rglob("*.safetensors"))
    return Done(dest, count, nbytes, model.nbytes, time.monotonic() - began, kept)


def _need_kernels() -> None:
    for module in ("torch", "nibble_kernels"):
        if importlib.util.find_spec(module) is None:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"`nibble convert` needs {module}",
                action="run `make setup`, then .venv/bin/nibble",
            )


@contextmanager
def _beside(dest: Path) -> Iterator[Path]:
    """A new folder beside `dest` that becomes `dest` at the end, or disappears."""
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    except OSError as error:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"cannot write to {dest.parent} ({error.strerror})",
            action="name another folder",
        ) from None
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp makes 0700; a server may run as another user
        unfinished.rename(dest)
    except OSError as error:
        what = f"writing {dest} failed ({error.strerror or error})"
        raise NibbleError(
            ExitCode.NO_FIT, what=what, action="free space on its disk, or name another folder"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# --- one layout to another ------------------------------------------------------------------------


# The number of NVFP4 weights, and the layers that --keep-sensitive left in BF16.
Made = tuple[int, tuple[str, ...]]


def _relabel(model: Original, dest: Path, to: Any, wishes: Wishes, on_progress: OnProgress) -> Made:
    found, folder = model.found, model.found.path
    assert folder is not None
    weights = _nvfp4_weights(found)
    source: Layout = _SOURCE_LAYOUTS[next(iter(weights.values())).layout]
    has_inputs = _has_input_scales(weights)
    keep = has_inputs and wishes.activations != "bf16"
    if keep and to == "quartet-packed":
        what = f"{folder} has activation scales, which quartet-packed cannot hold"
        raise NibbleError(ExitCode.CONFIG, what=what, action="drop them with --activations bf16")
    check(weights, to, keep)
    no_kv(found.scheme.kv_cache, to)
    conversion = Relabel(weights, source, to, keep)
    hf_quant = read_json(FolderSource(found.id, "local", folder, None), HF_QUANT_FILE)
    ignore = ignore_list(
        to, found.config, hf_quant, weights, _plain_modules(found.tensors, weights)
    )
    write_configs(dest, found.config, to, "fp4" if keep else "bf16", ignore, found.scheme.kv_cache)
    values = model.counted("quantize", found.tensors.values(), on_progress)
    make = one_by_one(values, conversion.data)
    rewrite(dest, found.tensors, conversion.outputs, make, model.indexes)
    return len(weights), ()


def _nvfp4_weights(found: Checkpoint) -> dict[str, Nvfp4Weight]:
    """The weights of a valid, purely NVFP4 checkpoint. Raises CONFIG or MODEL with the tensor's
    name.
    """
    if not found.nvfp4:
        what = f"{found.id} is {found.scheme.name}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="an NVFP4 checkpoint",
            action="quantize BF16 weights with --to nvfp4",
        )
    for problem in found.problems:
        raise problem.error(found.where)
    check_scales(found, with_draft=True)
    weights = {weight.module: weight for weight in found.nvfp4}
    for info in found.tensors.values():
        module, _, leaf = info.name.rpartition(".")
        if (
            leaf in ("weight", "weight_packed")
            and info.dtype not in PLAIN
            and module not in weights
        ):
            what, expected = (
                f"{info.name} is {info.dtype}, not NVFP4",
                "NVFP4 and unquantized weights",
            )
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                expected=expected,
                action="choose another checkpoint: `nibble convert` does not convert mixed ones",
            )
    return weights


def _has_input_scales(weights: Mapping[str, Nvfp4Weight]) -> bool:
    """Whether it is W4A4. Raises MODEL if only some weights have activation scales."""
    without = [weight for weight in weights.values() if weight.input_scale is None]
    if without and len(without) < len(weights):
        what = f"{without[0].module} has no activation scale, but other weights have one"
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="activation scales for all weights or for none",
            action="drop them with --activations bf16",
        )
    return not without


def _plain_modules(tensors: Mapping[str, TensorInfo], quantized: Iterable[str]) -> list[str]:
    """Linear modules that stay unquantized: 2-D weights except embeddings."""
    packed = set(quantized)
    names = [
        info.name.removesuffix(".weight")
        for info in tensors.values()
        if info.name.endswith(".weight")
        and len(info.shape) == 2
        and kind_of(info.name) != "embedding"
    ]
    return [name for name in names if name not in packed]


# --- BF16 to NVFP4 --------------------------------------------------------------------------------


def _quantize(
    model: Original, dest: Path, _to: str, wishes: Wishes, on_progress: OnProgress
) -> Made:
    found, tensors = model.found, model.found.tensors
    if found.scheme.vllm_quantization is not None or found.scheme.unsupported_reason:
        raise _not_bf16(found, "modelopt")
    parts = quantize.select(tensors, found.hidden_size, wishes.exclude)
    if not parts:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{found.id} has no linear layer to quantize",
            action="check the patterns of --exclude",
        )
    known = measured(model, dest, parts, wishes)
    parts, scales, caches = known.parts, known.input_scales, known.cache_scales
    modules = [part.module for group in parts.values() for part in group]
    ignore = ignore_list("modelopt", found.config, None, modules, _unquantized(tensors, parts))
    cache = "fp8" if caches else None
    write_configs(dest, found.config, "modelopt", "fp4" if scales else "bf16", ignore, cache)
    if wishes.method == "round" and one_pass.fits(tensors, parts):
        once = one_pass.OnePass(parts, model, on_progress, wishes, scales, caches)
        rewrite(dest, tensors, once.outputs, once.of_file, model.indexes)
        return len(modules), known.kept
    with _encoder(model, dest, parts, modules, wishes, on_progress) as encode:
        conversion = Quantization(parts, encode, scales, caches)
        values = model.counted("quantize", tensors.values(), on_progress)
        make = one_by_one(values, conversion.data)
        rewrite(dest, tensors, conversion.outputs, make, model.indexes)
    return len(modules), known.kept


@contextmanager
def _encoder(
    model: Original,
    dest: Path,
    parts: Mapping[str, tuple[Part, ...]],
    modules: list[str],
    wishes: Wishes,
    on_progress: OnProgress,
) -> Iterator[Encode]:
    """What quantizes a layer, by the method that is wished. GPTQ computes all of them here."""
    if wishes.method == "round":
        found = model.found
        values = model.counted("measure", [found.tensors[name] for name in parts], on_progress)
        amax = quantize.weight_amax(values, found.where, found.tensors, parts)
        yield quantize.rounding(wishes.share_scales(amax), wishes.four_over_six)
        return
    gptq.check_modules(parts)
    python = gptq.environment(os.environ)
    with model.bf16_folder(dest) as folder:
        rows = gptq.calibration_rows(folder, wishes.texts or gptq.default_texts())
        with gptq.quantized(python, folder, dest, modules, rows) as encode:
            yield encode


def _pack(model: Original, dest: Path, _to: str, wishes: Wishes, on_progress: OnProgress) -> Made:
    """CloverLM, whose quantization and layout are Quartet II's."""
    found, tensors = model.found, model.found.tensors
    if found.scheme.name != "quartet2-bf16":
        raise _not_bf16(found, "quartet-packed")
    measures = wishes.texts or wishes.fp8_cache or wishes.keep_percent
    if wishes.method != "round" or wishes.exclude or measures:
        what = (
            "--method, --exclude, --calibrate, --kv-cache and --keep-sensitive do not work with"
            " CloverLM"
        )
        action = "drop them: a server quantizes all its weights, and activations at run time"
        raise NibbleError(ExitCode.USAGE, what=what, action=action)
    parts = quantize.select(tensors, found.hidden_size, ())
    values = model.counted("measure", [tensors[name] for name in parts], on_progress)
    conversion = Packing(
        {name: part for name, (part,) in parts.items()},
        quantize.weight_amax(values, found.where, tensors, parts),
    )
    modules = [name.removesuffix(".weight") for name in parts]
    ignore = ignore_list(
        "quartet-packed", found.config, None, modules, _plain_modules(tensors, modules)
    )
    write_configs(dest, found.config, "quartet-packed", "bf16", ignore, None)
    values = model.counted("quantize", tensors.values(), on_progress)
    make = one_by_one(values, conversion.data)
    rewrite(dest, tensors, conversion.outputs, make, model.indexes)
    return len(parts), ()


def _not_bf16(found: Checkpoint, layout: Layout) -> NibbleError:
    what = f"{found.id} is {found.scheme.name}"
    action = f"change its layout with --to {layout}"
    return NibbleError(
        ExitCode.CONFIG, what=what, expected="BF16, F16 or F32 weights", action=action
    )


def _unquantized(tensors: Mapping[str, TensorInfo], parts: Iterable[str]) -> list[str]:
    """Linear modules that stay in BF16; also a tied lm_head, as ModelOpt lists it."""
    names = _plain_modules(tensors, [name.removesuffix(".weight") for name in parts])
    return sorted({*names, "lm_head"})

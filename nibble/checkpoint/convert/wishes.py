"""What `nibble convert` is asked for: reads the words, and refuses those that contradict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from nibble.checkpoint.convert.config import Activations
from nibble.checkpoint.convert.quantize import ShareScales, share_scales
from nibble.errors import ExitCode, NibbleError

LAYOUTS = ("modelopt", "compressed-tensors", "quartet-packed")
TARGETS = (*LAYOUTS, "nvfp4")
Method = Literal["round", "gptq"]
METHODS: tuple[Method, ...] = get_args(Method)
MOST_PERCENT = 300  # BF16 takes 3.6 times the bytes of NVFP4


@dataclass(frozen=True)
class Wishes:
    """The request of `nibble convert`.

    `activations`: None keeps the source's (BF16 sources: "bf16"); "bf16" drops the activation
    scales of a W4A4 source. The rest is for BF16 sources: how to quantize, `exclude` patterns of
    module names, `texts` to calibrate with, which layers share a global scale, scales of an FP8
    cache, and by how many percent the checkpoint may grow for layers that stay in BF16.
    """

    activations: Activations | None = None
    method: Method = "round"
    four_over_six: bool = False
    exclude: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    share_scales: ShareScales = share_scales
    fp8_cache: bool = False
    keep_percent: float = 0.0


PLAIN_WISHES = Wishes()


def read_wishes(
    activations: str | None,
    calibrate: Path | None,
    four_over_six: bool,
    exclude: Iterable[str],
    method: str = "round",
    kv_cache: str | None = None,
    keep_percent: float = 0.0,
) -> Wishes:
    """The request of the command line; `calibrate` is a file with one text a line. Raises USAGE."""
    if activations not in (None, "bf16", "fp4"):
        raise NibbleError(
            ExitCode.USAGE, what=f"--activations {activations}", expected="bf16 or fp4"
        )
    if kv_cache not in (None, "fp8"):
        raise NibbleError(ExitCode.USAGE, what=f"--kv-cache {kv_cache}", expected="fp8")
    if not 0 <= keep_percent <= MOST_PERCENT:
        expected = f"a number from 0 to {MOST_PERCENT}, the percentage by which the model may grow"
        raise NibbleError(
            ExitCode.USAGE, what=f"--keep-sensitive {keep_percent}", expected=expected
        )
    if method not in METHODS:
        raise NibbleError(ExitCode.USAGE, what=f"--method {method}", expected=" or ".join(METHODS))
    texts: tuple[str, ...] = ()
    if calibrate is not None:
        try:
            texts = tuple(
                line for line in calibrate.read_text(encoding="utf-8").splitlines() if line.strip()
            )
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            what = f"--calibrate {calibrate} cannot be read ({why})"
            raise NibbleError(
                ExitCode.USAGE, what=what, expected="a file with one text a line"
            ) from None
        if not texts:
            raise NibbleError(
                ExitCode.USAGE, what=f"--calibrate {calibrate} is empty", expected="one text a line"
            )
    return Wishes(
        activations,
        method,
        four_over_six,
        tuple(exclude),
        texts,
        fp8_cache=kv_cache == "fp8",
        keep_percent=keep_percent,
    )


def check_wishes(to: str, wishes: Wishes) -> None:
    """Raise USAGE for words that contradict each other or the target `to`."""
    if to not in TARGETS:
        raise NibbleError(
            ExitCode.USAGE, what=f"--to {to}", expected=f"one of {', '.join(TARGETS)}"
        )
    is_gptq = wishes.method == "gptq"
    measures = wishes.fp8_cache or wishes.keep_percent > 0
    chooses = is_gptq or wishes.four_over_six or wishes.exclude or wishes.texts
    if to != "nvfp4" and (chooses or measures):
        what = (
            "--method, --four-over-six, --exclude, --calibrate, --kv-cache and --keep-sensitive"
            " work only with --to nvfp4"
        )
        raise NibbleError(
            ExitCode.USAGE, what=what, action="drop them: a change of layout keeps every number"
        )
    if is_gptq and wishes.four_over_six:
        raise NibbleError(
            ExitCode.USAGE,
            what="--four-over-six works only with --method round",
            action="drop it: --method gptq chooses the scales",
        )
    has_fp4 = wishes.activations == "fp4"
    if to == "nvfp4" and has_fp4 and not wishes.texts:
        raise NibbleError(
            ExitCode.USAGE,
            what="--activations fp4 needs --calibrate",
            expected="a file with one text a line for the activation scales",
        )
    if to == "nvfp4" and wishes.texts and not (has_fp4 or is_gptq or measures):
        raise NibbleError(
            ExitCode.USAGE,
            what="--calibrate needs something to measure",
            expected="--activations fp4, --method gptq, --kv-cache fp8 or --keep-sensitive",
        )
    if to != "nvfp4" and wishes.activations == "fp4":
        what = "--activations fp4 works only with --to nvfp4"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            action="drop it: a change of layout keeps the activation scales; --activations bf16"
            " drops them",
        )

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


@dataclass(frozen=True)
class Wishes:
    """The request of `nibble convert`.

    `activations`: None keeps the source's (BF16 sources: "bf16"); "bf16" drops the activation
    scales of a W4A4 source. The rest is for BF16 sources: how to quantize, `exclude` patterns of
    module names, `texts` to calibrate with, and which layers share a global scale.
    """

    activations: Activations | None = None
    method: Method = "round"
    four_over_six: bool = False
    exclude: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    share_scales: ShareScales = share_scales


PLAIN_WISHES = Wishes()


def read_wishes(
    activations: str | None,
    calibrate: Path | None,
    four_over_six: bool,
    exclude: Iterable[str],
    method: str = "round",
) -> Wishes:
    """The request of the command line; `calibrate` is a file with one text a line. Raises USAGE."""
    if activations not in (None, "bf16", "fp4"):
        raise NibbleError(
            ExitCode.USAGE, what=f"--activations {activations}", expected="bf16 or fp4"
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
    return Wishes(activations, method, four_over_six, tuple(exclude), texts)


def check_wishes(to: str, wishes: Wishes) -> None:
    """Raise USAGE for words that contradict each other or the target `to`."""
    if to not in TARGETS:
        raise NibbleError(
            ExitCode.USAGE, what=f"--to {to}", expected=f"one of {', '.join(TARGETS)}"
        )
    is_gptq = wishes.method == "gptq"
    if to != "nvfp4" and (is_gptq or wishes.four_over_six or wishes.exclude or wishes.texts):
        what = "--method, --four-over-six, --exclude and --calibrate work only with --to nvfp4"
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
    if to == "nvfp4" and has_fp4 != bool(wishes.texts) and (has_fp4 or not is_gptq):
        what = "--activations fp4 and --calibrate need each other"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            expected="a file with one text a line for the activation scales",
        )
    if to != "nvfp4" and wishes.activations == "fp4":
        what = "--activations fp4 works only with --to nvfp4"
        raise NibbleError(
            ExitCode.USAGE,
            what=what,
            action="drop it: a change of layout keeps the activation scales; --activations bf16"
            " drops them",
        )

"""What the plugin reports of a worker: its kernels, checks and comparison with a reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

# --- files of REPORT_FOLDER -----------------------------------------------------------------------

WORKER_REPORTS = "worker-*.json"


def worker_report(pid: int) -> str:
    """The name of one worker's report."""
    return WORKER_REPORTS.replace("*", str(pid))


def reporting_pid(file: Path) -> str:
    """The process id in the name of a report."""
    return file.stem.removeprefix(WORKER_REPORTS.partition("*")[0])


# --- reports --------------------------------------------------------------------------------------

Part = Literal["linear", "moe", "routing", "attention", "weights"]
WEIGHTED_PARTS: tuple[Part, ...] = (
    "linear",
    "moe",
)  # parts whose layer checks report `activations`


class KernelsUsed(TypedDict):
    """The kernels that a worker runs, read from its modules after the warm-up.

    `linear`, `moe` and `attention` count layers for each kernel, such as
    {"nvfp4: MarlinNvFp4LinearKernel": 64}. `operators` maps a device to "compiled", or to the
    reason why nibble's operators run as plain torch code there.
    """

    linear: dict[str, int]
    moe: dict[str, int]
    attention: dict[str, int]
    kv_cache_dtype: list[str]
    model_dtype: str
    stage: int
    architecture: str
    quantization: str | None
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    cudagraph_mode: str
    cudagraphs_captured: int
    compilation_mode: str
    sampler: str
    operators: dict[str, str]
    device: str


class LayerCheck(TypedDict):
    """Layers of one part and kind, compared with reference.py: their number, how many were
    compared, and how many are wrong.

    `activations` lists the forms that agree, such as "fp4, one scale" (see `formats_of`).
    `worst_error` is "inf" if a value is not finite. `wrong_layers` and `not_compared` describe the
    first few.
    """

    part: str
    kind: str
    layers: int
    compared: int
    activations: list[str]
    worst_error: float | str | None
    wrong: int
    wrong_layers: list[str]
    not_compared: list[str]


class Halves(TypedDict, total=False):
    """Median relative errors of the first and the second half of the tokens."""

    early: float
    late: float


class PointComparison(Halves):
    """The input of the product `at`. `noise` is the reference's rounding error there."""

    at: str
    noise: float


class LayerDifference(Halves):
    """A layer's contribution to the residual stream: its error, the `factor` by which it is too
    large, and the norm of the output.
    """

    factor: float
    norm: float


class LayerComparison(LayerDifference):
    """A layer's difference. `noise` is the reference's rounding error, `inside` compares the inputs
    of the layer's products.
    """

    noise: float
    inside: list[PointComparison]


class NormsComparison(TypedDict):
    compared: int
    wrong: list[str]


class LogitsComparison(TypedDict):
    error: float
    factor: float
    token: int
    off: float
    spread: float


class Comparison(TypedDict):
    """A worker's model compared with a computed reference. `cache` is the format of the KV cache,
    bf16 or fp8.
    """

    tokens: int
    embedding: float
    layers: list[LayerComparison]
    cache: str
    norms: NormsComparison
    logits: LogitsComparison | None


class NotCompared(TypedDict):
    not_compared: str  # the reason


class WorkerReport(TypedDict):
    """The content of `worker-PID.json`. `problem` says why parts are missing; empty if complete."""

    rank: int
    ran: KernelsUsed | None
    checks: list[LayerCheck]
    definition: Comparison | NotCompared | None
    problem: str
    seconds: float
    node: NotRequired[str]  # added by the supervisor; empty for the supervisor's machine


def formats_of(checks: Iterable[Mapping[str, Any]]) -> set[str]:
    """Formats of activations in which the layers agree with the reference: "fp4", "bf16", or
    "plain" for unquantized layers.
    """
    return {
        form.partition(",")[0]
        for check in checks
        if check["part"] in WEIGHTED_PARTS
        for form in check["activations"]
    }

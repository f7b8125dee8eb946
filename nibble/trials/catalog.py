"""The trials of a target: nibble's kernels, and those of vLLM that a plan could choose. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nibble.machine.targets import Target
from nibble.trials.trial import Outcome, Shape, Trial

# As nibble_kernels.nvfp4_linear.LEVELS, worst first.
CPU_LEVELS = ("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
# Rows that are a multiple of 8 and columns that are one of 16 are the least that kernels of
# nibble's take; the last shape fills no tile.
CPU_SHAPES: tuple[Shape, ...] = ((512, 1024), (1536, 512), (1032, 1552))
GPU_SHAPES: tuple[Shape, ...] = ((4096, 4096), (1536, 2048), (1032, 1552))
VLLM_SHAPES: tuple[Shape, ...] = ((4096, 4096), (1536, 2048), (6144, 4096))
CPU_ROWS = (1, 3, 16, 65)
ROWS = (1, 4, 8, 16, 17, 33, 64, 65, 200, 1024)
# Humming compiles for each shape and number of rows, which takes most of a first self-test.
VLLM_ROWS = VLLM_TIMED_ROWS = (1, 64)
TIMED_ROWS = (1, 16, 64)
# W4A4 takes columns in 32s; on GPUs before SM12x its products are emulated.
W4A4_SHAPES: tuple[Shape, ...] = ((4096, 4096), (1536, 2048), (1032, 1568))
W4A4_ROWS = (1, 17, 33, 65, 200, 512)
# The kernels take 32 and 16 rows at a time; above 64 rows a sparse weight is dequantized.
FP8_ROWS = (1, 8, 9, 17, 33, 64)
SPARSE_ROWS = (1, 8, 9, 17, 64, 65)
# Few rows of BF16 activations; with more, vLLM's kernel multiplies.
E4M3_ROWS, E4M3_TIMED_ROWS = (1, 2, 4, 5, 8), (1, 8)
EXPERT_SHAPES: tuple[Shape, ...] = ((8, 2, 1024, 768, 2), (8, 2, 512, 256, 2))
EXPERT_ROWS = (1, 16, 60, 160)
# The last shape has no gate, and fills no tile.
W4A4_EXPERT_SHAPES: tuple[Shape, ...] = (*EXPERT_SHAPES, (6, 3, 528, 272, 1))
HEAD_SHAPES: tuple[Shape, ...] = ((4000, 1024),)
HEAD_ROWS = (1, 3, 8, 9)

OURS, THEIRS, OUR_EXPERTS = "nibble", "vllm:auto:bf16", "experts"
OUR_PARTS = ("decode", "warpgroup", "dequantized")
# The same with FP4 activations, on GPUs with FP4 products.
OURS_FP4, OUR_FP4_EXPERTS = "nibble:fp4", "w4a4-experts"
OUR_FP4_PARTS = ("w4a4", "quantize")
# Of FP8 linear layers with few rows.
OUR_E4M3, THEIR_E4M3 = "e4m3", "vllm:e4m3"
# Class of vLLM's in targets/*.toml -> kernels of a trial: --linear-backend and the activations.
BACKENDS: Mapping[str, tuple[str, ...]] = {
    "HummingNvFp4LinearKernel": ("vllm:humming:bf16",),
    "MarlinNvFp4LinearKernel": ("vllm:marlin:bf16",),
    "FlashInferCutlass": ("vllm:flashinfer_cutlass:fp4",),
    "FlashInferCuteDsl": ("vllm:flashinfer_cutedsl:fp4", "vllm:flashinfer_cutedsl:bf16"),
}


def selftest_trials(target: Target, gpus: int, with_vllm: bool = True) -> tuple[Trial, ...]:
    """Every trial of `nibble selftest`. Several GPUs are compared with each other too."""
    if target.device == "cpu":
        return tuple(_cpu())
    return tuple(_gpu(target, gpus, with_vllm))


def _cpu() -> Iterable[Trial]:
    yield Trial("conversions", "conversions", "conversions")
    yield Trial("quantize", "quantize", "quantize", "cpu", CPU_SHAPES, CPU_ROWS)
    for level in CPU_LEVELS:
        for form in ("bf16", "fp4"):
            kernel = f"cpu:{level}:{form}"
            yield Trial(kernel, "linear", kernel, "cpu", CPU_SHAPES, CPU_ROWS)
        kernel = f"experts:{level}"
        yield Trial(kernel, "experts", kernel, "cpu", EXPERT_SHAPES[1:], CPU_ROWS)
    yield Trial("head", "head", "head", "cpu", HEAD_SHAPES, HEAD_ROWS)
    yield Trial("bandwidth", "bandwidth", "bandwidth")


def _gpu(target: Target, gpus: int, with_vllm: bool) -> Iterable[Trial]:
    yield Trial("conversions", "conversions", "conversions", "cuda")
    for kernel in OUR_PARTS:
        yield Trial(kernel, "linear", kernel, "cuda", GPU_SHAPES, ROWS, TIMED_ROWS)
    yield Trial("w4a4", "linear", "w4a4:fp4", "cuda", W4A4_SHAPES, W4A4_ROWS, TIMED_ROWS[2:])
    yield Trial("fp8", "fp8", "fp8", "cuda", GPU_SHAPES, FP8_ROWS, TIMED_ROWS[:2])
    rows, timed = E4M3_ROWS, E4M3_TIMED_ROWS
    yield Trial(OUR_E4M3, "e4m3", OUR_E4M3, "cuda", GPU_SHAPES, rows, timed)
    yield Trial("sparse", "linear", "sparse", "cuda", GPU_SHAPES, SPARSE_ROWS, TIMED_ROWS[:2])
    yield Trial(OUR_EXPERTS, "experts", OUR_EXPERTS, "cuda", EXPERT_SHAPES, EXPERT_ROWS)
    kernel = OUR_FP4_EXPERTS
    yield Trial(kernel, "experts", kernel, "cuda", W4A4_EXPERT_SHAPES, EXPERT_ROWS)
    yield Trial("quantize", "quantize", "quantize", "cuda", CPU_SHAPES, CPU_ROWS)
    for kernel in vllm_kernels(target) if with_vllm else ():
        yield Trial(kernel, "linear", kernel, "cuda", VLLM_SHAPES, VLLM_ROWS, VLLM_TIMED_ROWS)
    yield Trial("bandwidth", "bandwidth", "bandwidth", "cuda")
    if gpus > 1:
        yield Trial("links", "links", "links", "cuda")


def vllm_kernels(target: Target) -> tuple[str, ...]:
    """vLLM's choice for weight-only and for W4A4 layers, and the kernels in the target's file."""
    named = [
        kernel for name in target.expected.get("linear", ()) for kernel in BACKENDS.get(name, ())
    ]
    return (THEIRS, "vllm:auto:fp4", *named)


def used_by_plans(target: Target, names: Iterable[str], ran: Mapping[str, str]) -> frozenset[str]:
    """The trials whose kernel a plan on this target uses without a setting. `ran`: trial -> what
    computed, empty for a trial that was refused.
    """
    if target.device == "cpu":
        best = next((level for level in reversed(CPU_LEVELS) if ran.get(f"cpu:{level}:bf16")), "")
        used = {"conversions", "head", "quantize"}
        used |= {f"cpu:{best}:bf16", f"cpu:{best}:fp4", f"experts:{best}"}
    else:
        used = {THEIRS, "vllm:auto:fp4"}
        if target.name in OURS_BY_DEFAULT:
            used |= {"conversions", *OUR_PARTS, OUR_E4M3}
    return frozenset(used & set(names))


# Targets on which nibble's linear kernels have run, so that plans take them without a trial.
OURS_BY_DEFAULT = ("hopper",)


def wrong_in_a_plan(target: Target, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The faults of kernels that a plan would choose."""
    ran = {
        outcome.name: outcome.ran or outcome.name
        for outcome in outcomes
        if outcome.verdict != "refused"
    }
    used = used_by_plans(target, ran, ran)
    return tuple(outcome for outcome in outcomes if outcome.is_fault and outcome.name in used)

"""Compares the kernels that ran with those that the plan expects. Pure: reports in, deviations out.

An expectation comes from a flag (set by the user or by a rule), else from the recipe, else from the
target's table `[expected]`. A part without an expectation may use any kernel except a slow
fallback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nibble.engine.contract import (
    ATTENTION,
    GPU_E4M3_EXPERTS,
    GPU_EXPERTS,
    GPU_LINEAR,
    GPU_W4A4_EXPERTS,
    GPU_W4A4_LINEAR,
    OUR_CLASSES,
)
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import values_of
from nibble.plan.fp4_products import serves_in_fp4
from nibble.plan.nvfp4_options import asked as plugin_options
from nibble.plan.one_order import ADDS_IN_ONE_ORDER, INVARIANT, is_batch_invariant
from nibble.recipes.rules import in_effect

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

# Flag that selects a kernel -> part of a worker's report.
BACKEND_FLAGS: Mapping[str, str] = {
    "--linear-backend": "linear",
    "--moe-backend": "moe",
    "--attention-backend": "attention",
}
# Parts of the names of vLLM 0.32's fallbacks: EmulationNvFp4LinearKernel,
# NvFp4MoeBackend.EMULATION, FLEX_ATTENTION (written in torch, compiled by Triton), TORCH_SDPA.
SLOW = ("emulation", "naive", "flexattention", "torchsdpa", "torchnvfp4")
OUR_KERNELS = {
    "linear": (GPU_LINEAR,),
    "moe": (*GPU_EXPERTS, *GPU_E4M3_EXPERTS),
    "attention": (ATTENTION,),
}
# Where nibble's kernels multiply FP4 activations: beside those for BF16, as of the output head.
OUR_FP4_KERNELS = {"linear": (GPU_W4A4_LINEAR,), "moe": GPU_W4A4_EXPERTS}
SAMPLER_SWITCH = "VLLM_USE_FLASHINFER_SAMPLER"
STRICT_ACTION = "set NIBBLE_KERNEL_ASSERTION=warn to serve anyway"


@dataclass(frozen=True)
class Expectation:
    """The kernels that are allowed for a part of a worker's report (contract.report.KernelsUsed).

    allowed: prefixes of names, without regard to case and punctuation: `marlin` allows
    MarlinNvFp4LinearKernel. Empty: any kernel except a slow fallback. source: where it comes from.
    """

    part: str
    allowed: tuple[str, ...] = ()
    source: str = ""

    def line(self) -> str:
        """For `nibble plan`."""
        if not self.allowed:
            return f"{self.part}: any kernel except a slow fallback"
        return f"{self.part}: {' or '.join(self.allowed)}" + (
            f" ({self.source})" if self.source else ""
        )


@dataclass(frozen=True)
class Deviation:
    """A part that ran another kernel than expected."""

    part: str
    found: str
    expected: str

    def line(self) -> str:
        """For /status."""
        return f"{self.part}: {self.found} ran, expected {self.expected}"

    def error(self, action: str = "") -> NibbleError:
        """The error that ends the start; `action` comes before the general advice."""
        what = f"the kernels differ from the plan: {self.part}: {self.found}"
        advice = f"{action}; " if action else ""
        return NibbleError(
            ExitCode.CANARY, what=what, expected=self.expected, action=f"{advice}{STRICT_ACTION}"
        )


def expectations(plan: Plan, environ: Mapping[str, str]) -> tuple[Expectation, ...]:
    """One expectation per part, in the order in which deviations are reported.

    `environ`: the user's environment, which vLLM sees too.
    """
    flags = values_of(plan.args)
    variables = {name: str(choice.value) for name, choice in plan.env.items()} | dict(environ)
    backends = [
        _backend(part, flag, plan, flags, variables) for flag, part in BACKEND_FLAGS.items()
    ]
    sampler = plan.target.expected.get("sampler", ())
    if SAMPLER_SWITCH in variables or "--logprobs-mode" in flags:
        sampler = ()  # vLLM 0.32 v1/sample/ops/topk_topp_sampler.py:95, :224
    return (
        *backends,
        _kv_cache(plan, flags),
        _graphs(plan, flags),
        _compilation(plan, flags),
        Expectation("sampler", tuple(sampler), f"target {plan.target.name}"),
    )


def _backend(
    part: str, flag: str, plan: Plan, flags: Mapping[str, Any], variables: Mapping[str, str]
) -> Expectation:
    chosen = plugin_options(flags)
    if part in OUR_KERNELS and chosen.get(f"{part}_kernel") == "nibble":
        # Layers of some shapes may keep vLLM's kernel.
        may_mix = part != "attention" and chosen.get("vllm_shapes")
        others = plan.target.expected.get(part, ()) if may_mix else ()
        is_in_fp4 = serves_in_fp4(plan.checkpoint, plan.target)
        in_fp4 = OUR_FP4_KERNELS.get(part, ()) if is_in_fp4 else ()
        allowed = tuple(dict.fromkeys((*in_fp4, *OUR_KERNELS[part], *others)))
        return Expectation(part, allowed, f"{part}_kernel of --additional-config")
    expected = _vllms(part, flag, plan, flags, variables)
    if part == "attention" and chosen.get("attention_kernel") == "few" and expected.allowed:
        # vLLM's backend computes most batches, and all of a layer that nibble's does not know.
        return replace(expected, allowed=(ATTENTION, *expected.allowed))
    return expected


def _vllms(
    part: str, flag: str, plan: Plan, flags: Mapping[str, Any], variables: Mapping[str, str]
) -> Expectation:
    value = in_effect(flag, flags)
    if value not in ("", "auto"):
        choice = plan.args.get(flag)
        return Expectation(part, (value,), f"{flag} ({choice.source})" if choice else flag)
    if part == "linear" and plan.target.device == "cuda" and is_batch_invariant(variables):
        return Expectation(part, ADDS_IN_ONE_ORDER, INVARIANT)
    if plan.recipe is not None and part in plan.recipe.expected:
        return Expectation(part, (plan.recipe.expected[part],), f"recipe {plan.recipe.id}")
    return Expectation(
        part, tuple(plan.target.expected.get(part, ())), f"target {plan.target.name}"
    )


def _kv_cache(plan: Plan, flags: Mapping[str, Any]) -> Expectation:
    value = str(flags.get("--kv-cache-dtype", "auto"))
    if value != "auto":
        return Expectation(
            "kv_cache_dtype", (value,), f"--kv-cache-dtype ({plan.args['--kv-cache-dtype'].source})"
        )
    declared = plan.checkpoint.scheme.kv_cache if plan.checkpoint else None
    return Expectation(
        "kv_cache_dtype", (declared,) if declared else ("model_dtype",), "the checkpoint"
    )


def _is_eager(plan: Plan, flags: Mapping[str, Any]) -> bool:
    return flags.get("--enforce-eager") is True or plan.settings.debug


def _compilation_config(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    config = flags.get("--compilation-config")
    return config if isinstance(config, Mapping) else {}


def _graphs(plan: Plan, flags: Mapping[str, Any]) -> Expectation:
    if plan.target.device == "cpu":
        return Expectation("cudagraph_mode", ("NONE",), "the CPU has no CUDA graphs")
    if _is_eager(plan, flags):
        return Expectation("cudagraph_mode", ("NONE",), "eager mode is set")
    mode = _compilation_config(flags).get("cudagraph_mode")
    if not mode and _optimization_level(flags) == "0":  # vllm 0.32 config/vllm.py:261
        return Expectation("cudagraph_mode", ("NONE",), "--optimization-level 0")
    return Expectation(
        "cudagraph_mode", (str(mode),) if mode else (), "--compilation-config" if mode else ""
    )


def _compilation(plan: Plan, flags: Mapping[str, Any]) -> Expectation:
    if _is_eager(plan, flags):
        return Expectation("compilation_mode", ("NONE",), "eager mode is set")
    if "mode" in _compilation_config(flags):
        return Expectation("compilation_mode", ("any",), "--compilation-config")
    if _optimization_level(flags) == "0":
        return Expectation("compilation_mode", ("NONE",), "--optimization-level 0")
    return Expectation("compilation_mode")


def _optimization_level(flags: Mapping[str, Any]) -> str:
    return str(flags.get("--optimization-level", ""))


def deviations(
    expected: Sequence[Expectation], reports: Iterable[Mapping[str, Any]]
) -> tuple[Deviation, ...]:
    """The deviations of all workers without duplicates. `reports`: each worker's `ran`."""
    differing = [each for ran in reports for want in expected for each in _compare(want, ran)]
    differing += [each for ran in reports if ran["device"] != "cpu" for each in _plain_torch(ran)]
    return tuple(dict.fromkeys(differing))


def plain_torch_on_the_cpu(reports: Iterable[Mapping[str, Any]]) -> str:
    """The warning that nibble's kernels are not compiled on the CPU, or "".

    Not an error: the results are correct, and compiled kernels need a compiler on the machine.
    """
    slow = [each for ran in reports if ran["device"] == "cpu" for each in _plain_torch(ran)]
    if not slow:
        return ""
    return f"{slow[0].part} are {slow[0].found}, much slower than {slow[0].expected}"


def _compare(want: Expectation, ran: Mapping[str, Any]) -> Iterator[Deviation]:
    if want.part in ("linear", "moe"):
        for reported in ran[want.part]:
            yield from _kernel(want, reported)
    elif want.part == "attention":
        yield from _attention(want, list(ran["attention"]))
    elif want.part == "kv_cache_dtype":
        yield from _cache_format(want, ran)
    elif want.part == "sampler":
        if want.allowed and not _fits(ran["sampler"], want.allowed):
            yield Deviation("sampler", ran["sampler"], _allowed(want))
    else:
        yield from _mode(want, ran)


def _kernel(want: Expectation, reported: str) -> Iterator[Deviation]:
    """`reported`: such as "nvfp4: HUMMING HummingExperts", a scheme and the kernel's names.

    One of the names has to be allowed.
    """
    scheme, _, names = reported.partition(": ")
    fits = any(_fits(name, want.allowed) for name in names.split())
    is_slow = any(word in _plain(names) for word in SLOW)
    if is_slow and not fits:
        yield Deviation(
            f"{scheme} {want.part} layers",
            names,
            _allowed(want) if want.allowed else "no slow fallback",
        )
    elif scheme == "nvfp4" and want.allowed and not fits:
        yield Deviation(f"{scheme} {want.part} layers", names, _allowed(want))


def _attention(want: Expectation, backends: list[str]) -> Iterator[Deviation]:
    """One of the backends has to be allowed: hybrid models use several."""
    if want.allowed and backends and not any(_fits(name, want.allowed) for name in backends):
        yield Deviation("attention", ", ".join(backends), _allowed(want))
    for name in backends:
        if any(word in _plain(name) for word in SLOW) and not _fits(name, want.allowed):
            yield Deviation("attention", name, "no slow fallback")


def _cache_format(want: Expectation, ran: Mapping[str, Any]) -> Iterator[Deviation]:
    """At least one layer has to use the expected format.

    The others may keep the model's dtype, as skipped layers and draft models do.
    """
    model, formats = ran["model_dtype"], ran["kv_cache_dtype"]
    allowed = tuple(model if name in ("model_dtype", "auto") else name for name in want.allowed)
    others = [name for name in formats if not _fits(name, allowed) and name != model]
    if others or (formats and not any(_fits(name, allowed) for name in formats)):
        yield Deviation(
            "KV cache", ", ".join(others or formats), f"{' or '.join(allowed)} ({want.source})"
        )


def _mode(want: Expectation, ran: Mapping[str, Any]) -> Iterator[Deviation]:
    part = want.part.replace("_", " ").replace("cudagraph", "CUDA graph")
    mode = str(ran[want.part])
    if want.allowed == ("any",):
        return
    if want.allowed and not _fits(mode, want.allowed):
        yield Deviation(part, mode, _allowed(want))
    elif not want.allowed and mode == "NONE":
        yield Deviation(part, "NONE (eager)", "graphs, because eager mode is not set")
    elif want.part == "cudagraph_mode" and mode != "NONE" and not ran["cudagraphs_captured"]:
        yield Deviation("CUDA graphs", f"none captured in mode {mode}", "at least one")


def _plain_torch(ran: Mapping[str, Any]) -> Iterator[Deviation]:
    """nibble's kernels without a compiled library: the slow torch code computes."""
    state = ran["operators"].get(ran["device"], "compiled")
    names = [name for part in ("linear", "moe") for layers in ran[part] for name in layers.split()]
    if state != "compiled" and any(name in OUR_CLASSES for name in names):
        yield Deviation(
            "nibble's kernels",
            f"plain torch code ({state})",
            "compiled ones; run `make setup` or use the image",
        )


def _fits(name: str, allowed: Sequence[str]) -> bool:
    """Whether `name` begins with an allowed prefix. Names of vLLM's kernels may begin with
    `VLLM_`.
    """
    plain = _plain(name)
    return any(
        plain.startswith(_plain(prefix)) or plain.removeprefix("vllm").startswith(_plain(prefix))
        for prefix in allowed
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _allowed(want: Expectation) -> str:
    return f"{' or '.join(want.allowed)} ({want.source})"

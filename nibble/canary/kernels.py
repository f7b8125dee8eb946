"""Compares the kernels that ran with those that the plan expects. Pure: reports to deviations.

An expectation comes from the user or a rule, else from the recipe, else from the target's table
`[expected]`. A part without an expectation may use any kernel except a slow fallback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nibble.engine.contract import GPU_EXPERTS, GPU_LINEAR, OUR_CLASSES
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import values_of
from nibble.plan.nvfp4_options import asked as plugin_options
from nibble.plan.one_order import ADDS_IN_ONE_ORDER, INVARIANT, is_batch_invariant
from nibble.recipes.rules import in_effect

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

# Flag that asks for a kernel -> part of a worker's report.
BACKEND_FLAGS: Mapping[str, str] = {
    "--linear-backend": "linear",
    "--moe-backend": "moe",
    "--attention-backend": "attention",
}
# In the names vLLM 0.32 gives its fallbacks: EmulationNvFp4LinearKernel, NvFp4MoeBackend.EMULATION,
# FLEX_ATTENTION (written in torch, compiled by Triton), TORCH_SDPA.
SLOW = ("emulation", "naive", "flexattention", "torchsdpa", "torchnvfp4")
OUR_KERNELS = {"linear": (GPU_LINEAR,), "moe": GPU_EXPERTS}
SAMPLER_SWITCH = "VLLM_USE_FLASHINFER_SAMPLER"
STRICT_ACTION = "set NIBBLE_KERNEL_ASSERTION=warn to serve anyway"


@dataclass(frozen=True)
class Expectation:
    """What may run for a part of a worker's report (KernelsUsed), and who says so.

    Names are compared without case and punctuation and may be the beginning of what is found, so
    that `marlin` is MarlinNvFp4LinearKernel. Nothing allowed: anything that is not slow.
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
    """What ran in place of what was expected."""

    part: str
    found: str
    expected: str

    def line(self) -> str:
        return f"{self.part}: {self.found} ran, expected {self.expected}"

    def error(self, action: str = "") -> NibbleError:
        """The end of a start."""
        what = f"the kernels differ from the plan: {self.part}: {self.found}"
        advice = f"{action}; " if action else ""
        return NibbleError(
            ExitCode.CANARY, what=what, expected=self.expected, action=f"{advice}{STRICT_ACTION}"
        )


def expectations(plan: Plan, environ: Mapping[str, str]) -> tuple[Expectation, ...]:
    """For every part, in the order in which deviations are told. `environ` is the user's, which
    vLLM sees too.
    """
    asked = values_of(plan.args)
    variables = {name: str(choice.value) for name, choice in plan.env.items()} | dict(environ)
    found = {
        part: _backend(part, flag, plan, asked, variables) for flag, part in BACKEND_FLAGS.items()
    }
    sampler = plan.target.expected.get("sampler", ())
    if SAMPLER_SWITCH in variables or "--logprobs-mode" in asked:
        sampler = ()  # vLLM 0.32 v1/sample/ops/topk_topp_sampler.py:95, :224
    return (
        *found.values(),
        _kv_cache(plan, asked),
        _graphs(plan, asked),
        _compilation(plan, asked),
        Expectation("sampler", tuple(sampler), f"target {plan.target.name}"),
    )


def _backend(
    part: str, flag: str, plan: Plan, asked: Mapping[str, Any], variables: Mapping[str, str]
) -> Expectation:
    if part in OUR_KERNELS and plugin_options(asked).get(f"{part}_kernel") == "nibble":
        return Expectation(part, OUR_KERNELS[part], f"{part}_kernel of --additional-config")
    value = in_effect(flag, asked)
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


def _kv_cache(plan: Plan, asked: Mapping[str, Any]) -> Expectation:
    value = str(asked.get("--kv-cache-dtype", "auto"))
    if value != "auto":
        return Expectation(
            "kv_cache_dtype", (value,), f"--kv-cache-dtype ({plan.args['--kv-cache-dtype'].source})"
        )
    declared = plan.checkpoint.scheme.kv_cache if plan.checkpoint else None
    return Expectation(
        "kv_cache_dtype", (declared,) if declared else ("model_dtype",), "the checkpoint"
    )


def _is_eager(plan: Plan, asked: Mapping[str, Any]) -> bool:
    return asked.get("--enforce-eager") is True or plan.settings.debug


def _compilation_config(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    config = asked.get("--compilation-config")
    return config if isinstance(config, Mapping) else {}


def _graphs(plan: Plan, asked: Mapping[str, Any]) -> Expectation:
    if plan.target.device == "cpu":
        return Expectation("cudagraph_mode", ("NONE",), "the CPU has no CUDA graphs")
    if _is_eager(plan, asked):
        return Expectation("cudagraph_mode", ("NONE",), "eager mode is set")
    mode = _compilation_config(asked).get("cudagraph_mode")
    if not mode and _level(asked) == "0":  # vllm 0.32 config/vllm.py:261
        return Expectation("cudagraph_mode", ("NONE",), "--optimization-level 0")
    return Expectation(
        "cudagraph_mode", (str(mode),) if mode else (), "--compilation-config" if mode else ""
    )


def _compilation(plan: Plan, asked: Mapping[str, Any]) -> Expectation:
    if _is_eager(plan, asked):
        return Expectation("compilation_mode", ("NONE",), "eager mode is set")
    if "mode" in _compilation_config(asked):
        return Expectation("compilation_mode", ("any",), "--compilation-config")
    if _level(asked) == "0":
        return Expectation("compilation_mode", ("NONE",), "--optimization-level 0")
    return Expectation("compilation_mode")


def _level(asked: Mapping[str, Any]) -> str:
    return str(asked.get("--optimization-level", ""))


def deviations(
    expected: Sequence[Expectation], reports: Iterable[Mapping[str, Any]]
) -> tuple[Deviation, ...]:
    """What is not as expected on any worker, each told once. `reports` are their `ran`."""
    found = [one for ran in reports for want in expected for one in _compare(want, ran)]
    found += [one for ran in reports if ran["device"] != "cpu" for one in _plain_torch(ran)]
    return tuple(dict.fromkeys(found))


def plain_torch_on_the_cpu(reports: Iterable[Mapping[str, Any]]) -> str:
    """The warning that nothing is compiled, on the CPU: numbers are right, and no more is to be
    had without a compiler.
    """
    found = [one for ran in reports if ran["device"] == "cpu" for one in _plain_torch(ran)]
    return (
        f"{found[0].part} are {found[0].found}, much slower than {found[0].expected}"
        if found
        else ""
    )


def _compare(want: Expectation, ran: Mapping[str, Any]) -> Iterator[Deviation]:
    if want.part in ("linear", "moe"):
        yield from (d for found in ran[want.part] for d in _kernel(want, found))
    elif want.part == "attention":
        yield from _attention(want, list(ran["attention"]))
    elif want.part == "kv_cache_dtype":
        yield from _cache_format(want, ran)
    elif want.part == "sampler":
        if want.allowed and not _fits(ran["sampler"], want.allowed):
            yield Deviation("sampler", ran["sampler"], _told(want))
    else:
        yield from _mode(want, ran)


def _kernel(want: Expectation, found: str) -> Iterator[Deviation]:
    """`found` is "nvfp4: HUMMING HummingExperts": a scheme, and names of which one has to fit."""
    scheme, _, names = found.partition(": ")
    fits = any(_fits(name, want.allowed) for name in names.split())
    is_slow = any(word in _plain(names) for word in SLOW)
    if is_slow and not fits:
        yield Deviation(
            f"{scheme} {want.part} layers",
            names,
            _told(want) if want.allowed else "no slow fallback",
        )
    elif scheme == "nvfp4" and want.allowed and not fits:
        yield Deviation(f"{scheme} {want.part} layers", names, _told(want))


def _attention(want: Expectation, found: list[str]) -> Iterator[Deviation]:
    """Hybrid models have other backends beside the expected one."""
    if want.allowed and found and not any(_fits(name, want.allowed) for name in found):
        yield Deviation("attention", ", ".join(found), _told(want))
    for name in found:
        if any(word in _plain(name) for word in SLOW) and not _fits(name, want.allowed):
            yield Deviation("attention", name, "no slow fallback")


def _cache_format(want: Expectation, ran: Mapping[str, Any]) -> Iterator[Deviation]:
    """Some layers may keep the model's type (skipped layers, a draft); one has to have what was
    asked for.
    """
    model, found = ran["model_dtype"], ran["kv_cache_dtype"]
    allowed = tuple(model if name in ("model_dtype", "auto") else name for name in want.allowed)
    others = [name for name in found if not _fits(name, allowed) and name != model]
    if others or (found and not any(_fits(name, allowed) for name in found)):
        yield Deviation(
            "KV cache", ", ".join(others or found), f"{' or '.join(allowed)} ({want.source})"
        )


def _mode(want: Expectation, ran: Mapping[str, Any]) -> Iterator[Deviation]:
    part, found = (
        want.part.replace("_", " ").replace("cudagraph", "CUDA graph"),
        str(ran[want.part]),
    )
    if want.allowed == ("any",):
        return
    if want.allowed and not _fits(found, want.allowed):
        yield Deviation(part, found, _told(want))
    elif not want.allowed and found == "NONE":
        yield Deviation(part, "NONE (eager)", "graphs, because eager mode is not set")
    elif want.part == "cudagraph_mode" and found != "NONE" and not ran["cudagraphs_captured"]:
        yield Deviation("CUDA graphs", f"none captured in mode {found}", "at least one")


def _plain_torch(ran: Mapping[str, Any]) -> Iterator[Deviation]:
    """nibble's kernels where nothing compiled is installed: the plain torch code computes, and
    is slow.
    """
    state = ran["operators"].get(ran["device"], "compiled")
    names = [name for part in ("linear", "moe") for found in ran[part] for name in found.split()]
    if state != "compiled" and any(name in OUR_CLASSES for name in names):
        yield Deviation(
            "nibble's kernels",
            f"plain torch code ({state})",
            "compiled ones; run `make setup` or use the image",
        )


def _fits(found: str, allowed: Sequence[str]) -> bool:
    """Whether a name begins with one that is allowed; vLLM's own kernels may have `VLLM_` in
    front.
    """
    plain = _plain(found)
    return any(
        plain.startswith(_plain(name)) or plain.removeprefix("vllm").startswith(_plain(name))
        for name in allowed
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _told(want: Expectation) -> str:
    return f"{' or '.join(want.allowed)} ({want.source})"

"""What would make an NVFP4 checkpoint compute wrongly, found before it is loaded: damaged scales, a missing plugin."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.plain_values import check_plain_values
from nibble.checkpoint.scale_layout import check_layout
from nibble.checkpoint.scale_values import check_values
from nibble.checkpoint.weights import kind_of
from nibble.cloverlm import check_vocabulary, is_cloverlm
from nibble.disk import gib
from nibble.errors import ExitCode, NibbleError
from nibble.nvfp4_options import asked
from nibble.plan import Plan
from nibble.rules import drafts_from_itself

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "nibble"


def check_nvfp4(plan: Plan, child: Mapping[str, str]) -> list[str]:
    """Lines to print for a start of `plan` with the environment `child`; reads every scale of the checkpoint.

    Raises MODEL for damaged scales and for the vocabulary of another model, CONFIG for scales in another layout than the
    config says and for a plugin that is not there and cannot be done without.
    """
    checkpoint = plan.checkpoint
    values = {name: choice.value for name, choice in plan.args.items()}
    if checkpoint is None or not (checkpoint.scheme.is_nvfp4 or asked(values) or is_cloverlm(checkpoint)):
        return []
    check_vocabulary(checkpoint, plan.args)
    lines = check_scales(checkpoint, drafts_from_itself(values.get("--speculative-config")))
    return lines + check_plugin(plan, child)


def check_scales(checkpoint: Checkpoint, with_draft: bool) -> list[str]:
    """How much was read and how long it took: scales, and what is small and not quantized.

    Raises MODEL or CONFIG, naming the first tensor that is wrong.
    """
    weights = [weight for weight in checkpoint.nvfp4 if with_draft or not weight.is_draft]
    if checkpoint.path is None or not weights:
        return []
    start = time.monotonic()
    values = check_values(checkpoint.path, weights)
    count = checkpoint.num_layers
    read = [one for one in checkpoint.tensors.values() if with_draft or kind_of(one.name, count) != "draft"]
    for problem in (*values.problems, *check_plain_values(checkpoint.path, read, count)):
        raise problem.error(checkpoint.where)
    if problem := check_layout(checkpoint.path, weights, is_cloverlm(checkpoint)).problem:
        raise problem.error(checkpoint.where)
    seconds = time.monotonic() - start
    return [f"checked {values.tensors} NVFP4 scale tensors ({gib(values.nbytes)}) in {seconds:.1f} s"]


def check_plugin(plan: Plan, child: Mapping[str, str]) -> list[str]:
    """A warning where vLLM will not load nibble's plugin; raises CONFIG where the plan needs it."""
    missing = missing_plugin(child)
    if missing is None:
        return []
    what, action = missing
    options = asked({name: choice.value for name, choice in plan.args.items()})
    reasons = [*options, *(["CloverLM"] if is_cloverlm(plan.checkpoint) else [])]
    if reasons or plan.target.device == "cpu":
        needed = f"for {', '.join(reasons)}" if reasons else "for NVFP4 on the CPU"
        raise NibbleError(ExitCode.CONFIG, f"{what}, and it is needed {needed}", "", action)
    return [f"warning: {what}: fused projections whose parts have different scales compute wrongly; {action}"]


def missing_gpu_kernels(child: Mapping[str, str]) -> str:
    """Why vLLM, with the environment `child`, has no compiled GPU kernel of nibble's; or nothing. Imports no torch."""
    if missing := missing_plugin(child):
        return missing[0]
    package = find_spec("nibble_kernels")
    folders = package.submodule_search_locations if package else None
    compiled = [file for folder in folders or () for file in Path(folder).glob("_cuda.*so")]
    return "" if compiled else "nibble-kernels was installed without its CUDA kernels"


def missing_plugin(child: Mapping[str, str]) -> tuple[str, str] | None:
    """Why vLLM will not load nibble's plugin, and what to do."""
    allowed = child.get("VLLM_PLUGINS")  # vllm 0.32 plugins/__init__.py: a list of those to load
    if allowed is not None and PLUGIN not in allowed.split(","):
        return "VLLM_PLUGINS leaves nibble's plugin out", f"add {PLUGIN} to VLLM_PLUGINS or unset it"
    if not entry_points(group=PLUGIN_GROUP, name=PLUGIN):
        return "nibble-kernels, which has nibble's vLLM plugin, is not installed", "run `make setup`"
    return None

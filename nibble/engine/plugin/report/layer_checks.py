"""Compares the layers of a warm worker with reference code: linear layers, experts, routing and
attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from nibble.engine.contract.report import LayerCheck
from nibble.engine.plugin.report.attention import attention_results, pass_of_this_worker
from nibble.engine.plugin.report.chained import KIND as CHAINED
from nibble.engine.plugin.report.chained import chained_layers, chained_results
from nibble.engine.plugin.report.compare import Result, compare, group
from nibble.engine.plugin.report.kernels_used import models_of
from nibble.engine.plugin.report.linear_attention import KIND, rule_results, rules_of
from nibble.engine.plugin.report.probes import PROBES, Probe, Unknown
from nibble.engine.plugin.report.routing import routing_results
from nibble.engine.plugin.report.shared_expert import KIND as SHARED
from nibble.engine.plugin.report.shared_expert import shared_results
from nibble.engine.plugin.shared_expert import joined


@torch.inference_mode()
def run_checks(worker: Any) -> list[LayerCheck]:
    """One entry per kind of layer; see compare.group."""
    config, results = worker.vllm_config, []
    with set_current_vllm_config(config), pass_of_this_worker(config, 1):
        for probe in PROBES.found:
            results += _guarded(
                Result(probe.part, probe.kind, probe.name), _weights(probe, worker.device)
            )
        for name, runner in _runners(worker):
            kind, checked = type(runner.router).__name__, f"routing of {name}"
            results += _guarded(
                Result("routing", kind, checked), routing_results(checked, runner, worker.device)
            )
            if (expert := joined(runner)) is not None:
                checked = f"shared expert of {name}"
                found = shared_results(checked, runner, expert, worker.device)
                results += _guarded(Result("moe", SHARED, checked), found)
        for model in models_of(worker.model_runner):
            for name, layer, rule in rules_of(model):
                found = rule_results(name, layer, rule, worker.device)
                results += _guarded(Result("attention", KIND, name), found)
            for name, chained in chained_layers(model):
                found = chained_results(name, chained, worker.device)
                results += _guarded(Result("linear", CHAINED, name), found)
    with set_current_vllm_config(config):
        for blank, found in attention_results(worker):
            results += _guarded(blank, found)
    unknown = [Result("weights", kind, kind, problem="no reference") for kind in PROBES.unknown]
    return group([*results, *unknown])


def _guarded(blank: Result, results: Iterable[Result]) -> list[Result]:
    """The results of an iterator. An exception becomes a result with its reason."""
    try:
        return list(results)
    except Exception as error:
        why = str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
        return [Result(blank.part, blank.kind, blank.name, problem=" ".join(why.split())[:200])]


def _weights(probe: Probe, device: torch.device) -> Iterator[Result]:
    """Compare a layer for one row and then for all rows, because vLLM may use different kernels."""
    if (module := probe.module()) is None:
        return  # the model no longer has it
    for rows in sorted({1, len(probe.x)}):
        x, method = probe.x[:rows].to(device), module.quant_method
        if probe.routing is None:
            y = method.apply(module, x, None)
        elif method.is_monolithic:
            raise Unknown("the kernel routes by itself")
        else:
            weights, ids = (value[:rows].to(device) for value in probe.routing)
            y = module.forward_modular(x=x.clone(), topk_weights=weights, topk_ids=ids)
        if not isinstance(y, Tensor):
            raise Unknown("the kernel leaves the sum over experts to a later one")
        if probe.outputs is not None and y.isfinite().all():
            y = y[:, probe.outputs.to(y.device)]
        yield compare(
            probe.part,
            probe.kind,
            probe.name,
            y,
            {form: right[:rows] for form, right in probe.expected.items()},
        )


def _runners(worker: Any) -> Iterator[tuple[str, Any]]:
    for model in models_of(worker.model_runner):
        yield from (
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, MoERunner)
        )

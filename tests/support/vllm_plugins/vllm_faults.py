"""A vLLM plugin for tests: faults in a running engine, one at a time, as a file asks for them. No
part of nibble.

FAULTS_FOLDER names a folder. `wanted` in it holds "SERIAL NAME"; before its next step the worker
undoes the last fault, does this one, writes the report that nibble's own plugin makes to
`report.json`, and SERIAL to `done`. The API server looks at `wanted` at each request for the faults
that are its own. FAULT_AT_START names a fault that is there before the first report.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Undo = Callable[[], Any]
TEMPLATE = (
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}### assistant:\n"
)
NONE = "none"


def folder() -> Path:
    return Path(os.environ["FAULTS_FOLDER"])


def wanted() -> tuple[str, str]:
    """Serial and name."""
    try:
        serial, _, name = (folder() / "wanted").read_text().partition(" ")
    except OSError:
        return "", NONE
    return serial, name


@functools.cache
def register() -> None:
    if "FAULTS_FOLDER" not in os.environ:
        return
    from vllm.renderers import base, hf
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from nibble.engine.plugin import report
    from nibble.engine.plugin.report.probes import Probes

    Probes.forget = lambda self: None  # reports are made again and again
    write, execute = report.write_report, WorkerWrapperBase.execute_model
    template, build = hf.safe_apply_chat_template, base.BaseRenderer._build_tokens_prompt

    def write_with_fault(worker: Any, to: Path) -> None:
        if name := os.environ.get("FAULT_AT_START"):
            fault_named(name)(worker)
        write(worker, to)

    def execute_with_fault(wrapper: Any, scheduled: Any) -> Any:
        follow(wrapper.worker)
        return execute(wrapper, scheduled)

    def other_template(*args: Any, **kwargs: Any) -> Any:
        if wanted()[1] == "wrong chat template":
            kwargs["chat_template"] = TEMPLATE
        return template(*args, **kwargs)

    def other_ids(token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted()[1] == "tokenizer mismatch":
            token_ids = [token + 1 if 260 < token < 1000 else token for token in token_ids]
        return build(token_ids, *args, **kwargs)

    report.write_report = write_with_fault
    setattr(WorkerWrapperBase, "execute_model", execute_with_fault)  # noqa: B010
    hf.safe_apply_chat_template = other_template
    base.BaseRenderer._build_tokens_prompt = staticmethod(other_ids)


class State:
    def __init__(self) -> None:
        self.serial = ""
        self.undo: Undo = lambda: None


STATE = State()


def follow(worker: Any) -> None:
    """Do what `wanted` says, once."""
    serial, name = wanted()
    if serial == STATE.serial:
        return
    from nibble.engine.plugin.report import make_report

    STATE.undo()
    STATE.serial, STATE.undo, problem = serial, no_fault(worker), ""
    try:
        STATE.undo = fault_named(name)(worker)
    except (
        AttributeError,
        KeyError,
        StopIteration,
        TypeError,
    ) as error:  # kernels may keep other tensors than the CPU's
        problem = f"{type(error).__name__}: {error}"
    (folder() / "report.json").write_text(
        json.dumps(make_report(worker) | {"not_injected": problem})
    )
    (folder() / "done").write_text(serial)


def fault_named(name: str) -> Callable[[Any], Undo]:
    """Of this file, or one of a model's structure where that file was installed beside this one."""
    if name in FAULTS or name == NONE or name in API_FAULTS:
        return FAULTS.get(name, no_fault)
    from tests.support.vllm_plugins import model_faults

    return model_faults.FAULTS[name]


def no_fault(worker: Any) -> Undo:
    return lambda: None


def linear(worker: Any) -> Any:
    """The quantized q, k and v of the second layer."""
    model = worker.model_runner.get_model()
    return dict(model.named_modules())["model.layers.1.self_attn.qkv_proj"]


def in_place(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Undo:
    """Where CUDA graphs and kernels hold the address."""
    with torch.inference_mode():
        data = tensor.data
        before = data.clone()
        data.copy_(change(data.clone()))
        return lambda: data.copy_(before)


def replaced(owner: Any, name: str, value: Any) -> Undo:
    """An attribute of one object, until undone."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    return lambda: (
        object.__setattr__(owner, name, before) if had else object.__delattr__(owner, name)
    )


def scale_permuted(worker: Any) -> Undo:
    scales = linear(worker).weight_scale
    return in_place(scales.data.view(torch.uint8), lambda old: old.roll(1, -1))


def global_scale_doubled(worker: Any) -> Undo:
    layer = linear(worker)
    # Humming has another name for it (vllm 0.32 quantization/utils/humming/linear.py:185).
    scale = (
        layer.weight_global_scale if hasattr(layer, "weight_global_scale") else layer.weight_scale_2
    )
    return in_place(scale, lambda old: old * 2)


def nibbles_swapped(worker: Any) -> Undo:
    return in_place(
        linear(worker).weight.data.view(torch.uint8), lambda old: (old << 4) | (old >> 4)
    )


def attention(worker: Any, layer: int) -> Any:
    layers = worker.vllm_config.compilation_config.static_forward_context
    return next(
        module
        for name, module in layers.items()
        if f".{layer}." in name and hasattr(module, "impl")
    )


def head_zeroed(worker: Any) -> Undo:
    impl = attention(worker, 2).impl
    forward = impl.forward

    def without_first_head(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        written = kwargs["output"] if "output" in kwargs else args[6]
        written[:, 0] = 0
        return out

    return replaced(impl, "forward", without_first_head)


def cache_scale_doubled(worker: Any) -> Undo:
    """Keys and values come back from the cache twice as large as they went in."""
    impl = attention(worker, 0).impl
    update = impl.do_kv_cache_update
    return replaced(
        impl, "do_kv_cache_update", lambda layer, k, v, *rest: update(layer, k * 2, v * 2, *rest)
    )


def routing_wrong(worker: Any) -> Undo:
    model = worker.model_runner.get_model()
    routers = [
        module.router
        for module in model.modules()
        if hasattr(module, "router") and hasattr(module, "routed_experts")
    ]
    if not routers:
        raise KeyError("no layer has a router")
    undo = []
    for router in routers:

        def next_expert(
            *args: Any, compute: Any = router._compute_routing, router: Any = router, **kwargs: Any
        ) -> Any:
            weights, ids = compute(*args, **kwargs)
            return weights, (ids + 1) % router.global_num_experts

        undo.append(replaced(router, "_compute_routing", next_expert))
    return lambda: [one() for one in undo]


def greedy_takes_the_second(worker: Any) -> Undo:
    sampler = worker.model_runner.sampler
    if not hasattr(sampler, "greedy_sample"):  # the V2 runner's
        return replaced(
            sampler, "sample", lambda logits, *_, **__: (logits.topk(2, -1).indices[:, 1], logits)
        )
    return replaced(
        worker.model_runner.sampler,
        "greedy_sample",
        lambda logits: logits.topk(2, -1).indices[:, 1],
    )


def top_k_ignored(worker: Any) -> Undo:
    sampler = worker.model_runner.sampler
    if not hasattr(sampler, "topk_topp_sampler"):
        draw = sampler._sample_random

        def without_top_k(logits: Any, mapping: Any, rows: Any, pos: Any, *_: Any) -> Any:
            return draw(logits * 0.05, mapping, rows, pos, None, None, False)

        return replaced(sampler, "_sample_random", without_top_k)
    sampler = sampler.topk_topp_sampler
    forward = sampler.forward
    return replaced(
        sampler,
        "forward",
        lambda logits, generators, k, p: forward(logits * 0.05, generators, None, None),
    )


FAULTS: dict[str, Callable[[Any], Undo]] = {
    "scale tensor permuted": scale_permuted,
    "global scale doubled": global_scale_doubled,
    "nibbles swapped": nibbles_swapped,
    "attention head zeroed": head_zeroed,
    "KV scale wrong by 2": cache_scale_doubled,
    "MoE routing wrong": routing_wrong,
    "sampler: second best instead of best": greedy_takes_the_second,
    "sampler: top_k ignored": top_k_ignored,
}
API_FAULTS = ("wrong chat template", "tokenizer mismatch")

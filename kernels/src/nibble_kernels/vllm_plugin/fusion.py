"""Norms and sums of the residual stream as parts of our products, in the graph that vLLM compiles.

RMSNorm goes into the products that read it, and the sum before it into the product that made one of its summands: of a decoder
layer's small kernels two are left out, and one product follows directly on the other.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from nibble_kernels.nvfp4_linear.gpu import LINEAR

# Arguments of nvfp4_weight_linear by their places.
X, RESIDUAL, NORM_WEIGHT, NORM_EPSILON = 0, 8, 9, 10


class FuseNorms(InductorPass):
    """See above. Sums round as vLLM's own fused kernel does: once, before the norm reads them."""

    def uuid(self) -> str:
        """What compiled code depends on: all of this file."""
        return self.hash_source(Path(__file__).read_text())

    def __call__(self, graph: fx.Graph) -> None:
        norms = torch.ops.vllm_ir
        for node in graph.find_nodes(op="call_function", target=norms.fused_add_rms_norm.default):
            fuse_sum_and_norm(graph, node)
        for node in graph.find_nodes(op="call_function", target=norms.rms_norm.default):
            arguments: list[Any] = list(node.args)
            fuse_norm(node, *arguments)


def ask_for_fusion() -> None:
    """Have vLLM run the pass on the model that is being made (vllm 0.32 compilation/backends.py:964)."""
    config = get_current_vllm_config_or_none()
    if config is not None:
        config.compilation_config.inductor_compile_config.setdefault(current_platform.pass_key, FuseNorms())


def fuse_norm(output: fx.Node, x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
    """Let the products that read `output`, the norm of x, make it themselves, and remove it, where nothing else reads it."""
    readers = list(output.users)
    if weight is None or variance_size is not None or not readers:
        return False
    if any(not is_product(one) or one.args[X] is not output or one.args[NORM_WEIGHT] for one in readers):
        return False
    for reader in readers:
        reader.update_arg(X, x)
        reader.update_arg(NORM_WEIGHT, weight)
        reader.update_arg(NORM_EPSILON, epsilon)
    output.graph.erase_node(output)
    return True


def fuse_sum_and_norm(graph: fx.Graph, node: fx.Node) -> None:
    """(norm(x + residual), x + residual): the sum becomes a part of the product that x is, the norm of those that read it."""
    arguments: list[Any] = list(node.args)
    x, residual, *rest = arguments
    outputs: dict[Any, fx.Node] = {one.args[1]: one for one in node.users if one.target is operator.getitem}
    if 0 not in outputs or len(outputs) != len(node.users) or not isinstance(x, fx.Node):
        return
    normed, old_sum = outputs[0], outputs.get(1)
    with graph.inserting_before(node):
        if is_product(x) and list(x.users) == [node] and x.args[RESIDUAL] is None:
            with_sum = (*x.args[:RESIDUAL], residual, *x.args[RESIDUAL + 1 :])
            new_sum = graph.call_function(LINEAR, with_sum, dict(x.kwargs))
        else:
            new_sum = graph.call_function(torch.ops.aten.add.Tensor, (x, residual))
    new_sum.meta.update(x.meta)
    if not fuse_norm(normed, new_sum, *rest):
        graph.erase_node(new_sum)
        return
    if old_sum is not None:
        old_sum.replace_all_uses_with(new_sum)
        graph.erase_node(old_sum)
    graph.erase_node(node)
    if not x.users:
        graph.erase_node(x)


def is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is LINEAR

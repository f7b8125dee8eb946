"""Finds parameters, and parts of fused ones, that vLLM does not write while it loads a model.

vLLM 0.32 compares only names, counts a fused parameter (q/k/v, gate/up, experts) as loaded if one
part is, and checks only unquantized models (default_loader.py:507). A parameter that no tensor
writes keeps arbitrary values.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from nibble.engine.plugin.require import required_of_instances

# A part of a storage: offset, sizes and strides in elements.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]

# Tensors that formats may omit, or that vLLM computes. layers.py checks the scales of NVFP4.
_MAY_BE_ABSENT = re.compile(r"scale|zero|g_idx|_shape|_ub$|_bias_vl")
# Parts of fused layers, for models whose packed_modules_mapping does not name them.
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def require_layers() -> None:
    """Check the attributes of vLLM's layers that this module uses. Raises VllmMismatch."""
    required_of_instances(QuantizeMethodBase, "uses_meta_device")
    required_of_instances(Attention, "kv_sharing_target_layer_name")
    required_of_instances(ColumnParallelLinear, "output_partition_sizes")
    required_of_instances(RoutedExperts, "moe_config")
    required_of_instances(FusedMoEConfig, "is_act_and_mul")


# In-place methods that change the view or attributes of a tensor, but not its values.
_NO_VALUES = frozenset(
    "apply_ as_strided_ detach_ rename_ requires_grad_ resize_ resize_as_ retain_grad_ set_"
    " share_memory_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
)
_IN_PLACE_OPERATOR = re.compile(
    r"__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


@functools.cache
def _writes(function: Any) -> bool:
    """Whether a torch function writes values into its first argument, by torch's naming
    convention.
    """
    name = str(getattr(function, "__name__", ""))
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_VALUES
    return is_in_place or name == "__setitem__" or _IN_PLACE_OPERATOR.fullmatch(name) is not None


class WrittenRegions(TorchFunctionMode):
    """Records the regions of `model`'s parameters that are written. A context manager for the
    thread of the load.

    It intercepts torch's Python functions. Intercepting operators (TorchDispatchMode) would cost
    0.3 ms per tensor of the checkpoint.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._pointers: dict[str, int] = {}
        self._regions: dict[int, set[Region]] = {}
        for name, parameter in model.named_parameters():
            if _has_memory(parameter):
                self._pointers[name] = pointer = parameter.untyped_storage().data_ptr()
                self._regions[pointer] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and _writes(func):
            self._record(args[0] if func is not Tensor.__setitem__ else _indexed(args[0], args[1]))
        if not kwargs:
            return func(*args)
        if (out := kwargs.get("out")) is not None:
            for target in out if isinstance(out, tuple | list) else (out,):
                self._record(target)
        return func(*args, **kwargs)

    def _record(self, target: Any) -> None:
        if isinstance(target, Tensor) and target.device.type != "meta":
            regions = self._regions.get(target.untyped_storage().data_ptr())
            if regions is not None:
                regions.add((int(target.storage_offset()), tuple(target.shape), target.stride()))

    def of(self, name: str, parameter: Parameter) -> set[Region] | None:
        """The written regions of a parameter; None if the load created or moved it."""
        if not _has_memory(parameter):
            return None
        pointer = parameter.untyped_storage().data_ptr()
        return self._regions[pointer] if self._pointers.get(name) == pointer else None

    @property
    def sees_loading(self) -> bool:
        """Whether any write was recorded: some loaders do not use torch's functions."""
        return any(self._regions.values())


def _indexed(tensor: Tensor, key: Any) -> Tensor:
    """The view that `tensor[key] = …` writes to; the whole tensor if the key is one or a list."""
    keys = key if isinstance(key, tuple) else (key,)
    if all(each is None or each is Ellipsis or isinstance(each, int | slice) for each in keys):
        return tensor[key]
    return tensor


def _has_memory(parameter: Parameter) -> bool:
    if is_lazy(parameter) or parameter.device.type == "meta":
        return False
    return parameter.numel() > 0 and parameter.untyped_storage().data_ptr() != 0


def unwritten(model: nn.Module, written: WrittenRegions, returned: set[str] | None) -> list[str]:
    """The names of parameters, and parts of fused ones, that no tensor wrote. Sorted.

    returned: the result of the model's load_weights. A name in it counts as written if no write to
    it was recorded.
    """
    missing: list[str] = []
    shared = {name for name, module in model.named_modules() if _shares_keys(module)}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if _may_be_absent(module, leaf) or (regions := written.of(name, parameter)) is None:
                continue
            if regions:
                if prefix.rpartition(".")[0] not in shared:
                    missing += _unwritten_parts(model, module, prefix, leaf, parameter, regions)
            elif name not in (returned or ()) and (returned is not None or written.sees_loading):
                missing.append(name)
    return sorted(missing)


def _may_be_absent(module: Any, leaf: str) -> bool:
    method = getattr(module, "quant_method", None)
    if isinstance(method, BaseKVCacheMethod) or getattr(method, "uses_meta_device", False):
        return True
    is_plain = method is None or isinstance(
        method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
    )
    return not is_plain and bool(_MAY_BE_ABSENT.search(leaf))


def _shares_keys(module: Any) -> bool:
    """Whether a child is attention that reads another layer's cache. The checkpoint may lack its k
    and v (vllm 0.32 gemma3n.py:355).
    """
    children = module.children()
    return any(
        getattr(child, "kv_sharing_target_layer_name", None) is not None for child in children
    )


def _unwritten_parts(
    model: Any, module: Any, prefix: str, leaf: str, parameter: Any, regions: set[Region]
) -> Iterator[str]:
    if (
        isinstance(module, RoutedExperts)
        and leaf.startswith(("w13_", "w2_"))
        and parameter.ndim > 1
    ):
        is_pair = leaf.startswith("w13_") and module.moe_config.is_act_and_mul
        experts = _incomplete_experts(parameter, regions, is_pair)
        yield from (f"{prefix}.{expert}.{leaf}" for expert in experts)
        return
    widths = getattr(module, "output_partition_sizes", ())
    dim = getattr(parameter, "output_dim", None)
    if not isinstance(module, LinearBase) or dim is None or len(widths) < 2:
        return
    size, end = parameter.shape[dim], 0
    for number, width in enumerate(widths):
        start, end = end, end + width
        low, high = start * size // sum(widths), end * size // sum(widths)
        if not any(_touches(region, parameter, dim, low, high) for region in regions):
            yield f"{_part(model, prefix, number)}.{leaf}"


def _touches(region: Region, parameter: Any, dim: int, low: int, high: int) -> bool:
    """Whether a region has elements at [low, high) along `dim` of a parameter."""
    offset, sizes, strides = region
    step = parameter.stride(dim)
    first = (offset - parameter.storage_offset()) // step % parameter.shape[dim]
    count = next((s for s, stride in zip(sizes, strides, strict=True) if stride == step), 1)
    return first < high and first + count > low


def _incomplete_experts(parameter: Any, regions: set[Region], is_pair: bool) -> list[int]:
    """Experts with missing rows, or without gate or up.

    is_pair: gate and up are the halves of one dimension. vLLM may pad each half at its end, and
    accepts weights that are too small (vllm 0.32 fused_moe/routed_experts.py:523). So an expert is
    incomplete if it has fewer written elements than most experts.
    """
    dim = 2 if getattr(parameter, "is_transposed", False) and parameter.ndim > 2 else 1
    size = parameter.shape[dim]
    parts = [(0, size // 2), (size // 2, size)] if is_pair else [(0, size)]
    touched = [
        {expert for region in regions for expert in _experts_in(region, parameter, dim, low, high)}
        for low, high in parts
    ]
    experts, elements = range(parameter.shape[0]), _elements(parameter, regions)
    usual = Counter(elements[expert] for expert in experts).most_common(1)[0][0]
    return [e for e in experts if elements[e] < usual or not all(e in part for part in touched)]


def _elements(parameter: Any, regions: set[Region]) -> Counter[int]:
    """Expert -> number of its written elements. A region without a dimension of experts counts for
    the first expert in it.
    """
    step, written = parameter.stride(0), Counter[int]()
    for offset, sizes, strides in regions:
        count = next(
            (size for size, stride in zip(sizes, strides, strict=True) if stride == step), 1
        )
        first = (offset - parameter.storage_offset()) // step
        for number in range(count):
            written[first + number] += math.prod(sizes) // count
    return written


def _experts_in(region: Region, parameter: Any, dim: int, low: int, high: int) -> Iterator[int]:
    """Experts of which a region has elements at [low, high) along `dim`."""
    offset, sizes, strides = region
    step = parameter.stride(0)
    start = offset - parameter.storage_offset()
    inner = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if stride != step]
    count = next((size for size, stride in zip(sizes, strides, strict=True) if stride == step), 1)
    extent = sum((size - 1) * stride for size, stride in inner)
    is_outermost = parameter.stride(dim) == max(parameter.stride()[1:])
    for begin in range(start, start + count * step, step):
        for expert in range(begin // step, (begin + extent) // step + 1):
            first = max(begin - expert * step, 0)
            last = min(begin + extent - expert * step, step - 1)
            if is_outermost:
                # By addresses, since a region may be a view with other dimensions.
                is_in = first < high * parameter.stride(dim) and last >= low * parameter.stride(dim)
            else:
                is_in = _touches(region, parameter, dim, low, high)
            if is_in:
                yield expert


def _part(model: Any, prefix: str, number: int) -> str:
    """The checkpoint's name of part `number` of a fused layer, such as q_proj; else qkv_proj[0]."""
    parent, _, last = prefix.rpartition(".")
    mapping = getattr(model, "packed_modules_mapping", None) or {}
    parts = mapping.get(last) or _PARTS.get(last) or ()
    part = parts[number] if number < len(parts) else f"{last}[{number}]"
    return f"{parent}.{part}" if parent else part

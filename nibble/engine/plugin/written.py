"""Which parameters, and which parts of fused ones, are written while vLLM loads a model's weights.

vLLM 0.32 compares names alone, takes a fused parameter (q/k/v, gate/up, experts) for loaded where
one part is, and does even that only for unquantized models (default_loader.py:507). What no tensor
writes keeps the values that memory had.
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

Region = tuple[
    int, tuple[int, ...], tuple[int, ...]
]  # offset in its storage, sizes and strides, in elements

# Tensors that formats may leave out, or that vLLM fills itself; layers.py checks NVFP4's own
# scales.
_MAY_BE_ABSENT = re.compile(r"scale|zero|g_idx|_shape|_ub$|_bias_vl")
# Where a model's packed_modules_mapping does not name the parts of a fused layer.
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def require_layers() -> None:
    """What is read below of vLLM's layers, where an object may lack it. Raises VllmMismatch."""
    required_of_instances(QuantizeMethodBase, "uses_meta_device")
    required_of_instances(Attention, "kv_sharing_target_layer_name")
    required_of_instances(ColumnParallelLinear, "output_partition_sizes")
    required_of_instances(RoutedExperts, "moe_config")
    required_of_instances(FusedMoEConfig, "is_act_and_mul")


# In-place methods that change what a tensor looks at, and no value.
_NO_VALUES = frozenset(
    (
        "apply_",
        "as_strided_",
        "detach_",
        "rename_",
        "requires_grad_",
        "resize_",
        "resize_as_",
        "retain_grad_",
        "set_",
        "share_memory_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    )
)
_IN_PLACE_OPERATOR = re.compile(
    r"__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


@functools.cache
def _writes(function: Any) -> bool:
    """Whether a torch function writes values into its first argument, by torch's own convention
    of names.
    """
    name = str(getattr(function, "__name__", ""))
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_VALUES
    return is_in_place or name == "__setitem__" or _IN_PLACE_OPERATOR.fullmatch(name) is not None


class WrittenRegions(TorchFunctionMode):
    """Notes what is written into the parameters of `model`; a context manager around the load, in
    its thread.

    By torch's Python functions and not by its operators (TorchDispatchMode), which cost 0.3 ms a
    tensor of the checkpoint.
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
            self._note(args[0] if func is not Tensor.__setitem__ else _indexed(args[0], args[1]))
        if not kwargs:
            return func(*args)
        if (out := kwargs.get("out")) is not None:
            for target in out if isinstance(out, tuple | list) else (out,):
                self._note(target)
        return func(*args, **kwargs)

    def _note(self, target: Any) -> None:
        if isinstance(target, Tensor) and target.device.type != "meta":
            found = self._regions.get(target.untyped_storage().data_ptr())
            if found is not None:
                found.add((int(target.storage_offset()), tuple(target.shape), target.stride()))

    def of(self, name: str, parameter: Parameter) -> set[Region] | None:
        """What was written of a parameter; None where that is not known: it was made or moved
        while the model was loaded.
        """
        if not _has_memory(parameter):
            return None
        pointer = parameter.untyped_storage().data_ptr()
        return self._regions[pointer] if self._pointers.get(name) == pointer else None

    @property
    def sees_loading(self) -> bool:
        """Whether this model's loader writes through torch's functions at all."""
        return any(self._regions.values())


def _indexed(tensor: Tensor, key: Any) -> Tensor:
    """What `tensor[key] = …` writes to: a view; all of it where the key is a tensor or a list."""
    keys = key if isinstance(key, tuple) else (key,)
    if all(one is None or one is Ellipsis or isinstance(one, int | slice) for one in keys):
        return tensor[key]
    return tensor


def _has_memory(parameter: Parameter) -> bool:
    if is_lazy(parameter) or parameter.device.type == "meta":
        return False
    return parameter.numel() > 0 and parameter.untyped_storage().data_ptr() != 0


def unwritten(model: nn.Module, written: WrittenRegions, returned: set[str] | None) -> list[str]:
    """Names, as near to the checkpoint's as vLLM's are, of what no tensor filled.

    `returned` are the names that the model's own loader says it loaded: those count where nothing
    was seen of them.
    """
    found: list[str] = []
    shared = {name for name, module in model.named_modules() if _shares_keys(module)}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if _may_be_absent(module, leaf) or (regions := written.of(name, parameter)) is None:
                continue
            if regions:
                if prefix.rpartition(".")[0] not in shared:
                    found += _unwritten_parts(model, module, prefix, leaf, parameter, regions)
            elif name not in (returned or ()) and (returned is not None or written.sees_loading):
                found.append(name)
    return sorted(found)


def _may_be_absent(module: Any, leaf: str) -> bool:
    method = getattr(module, "quant_method", None)
    if isinstance(method, BaseKVCacheMethod) or getattr(method, "uses_meta_device", False):
        return True
    is_plain = method is None or isinstance(
        method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
    )
    return not is_plain and bool(_MAY_BE_ABSENT.search(leaf))


def _shares_keys(module: Any) -> bool:
    """Whether a child is attention that reads another layer's cache: its own k and v may be in
    no file (gemma3n.py:355).
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
        yield from (
            f"{prefix}.{expert}.{leaf}" for expert in _short_experts(parameter, regions, is_pair)
        )
        return
    widths, dim = (
        getattr(module, "output_partition_sizes", ()),
        getattr(parameter, "output_dim", None),
    )
    if not isinstance(module, LinearBase) or dim is None or len(widths) < 2:
        return
    size, end = parameter.shape[dim], 0
    for number, width in enumerate(widths):
        start, end = end, end + width
        low, high = start * size // sum(widths), end * size // sum(widths)
        if not any(_touches(region, parameter, dim, low, high) for region in regions):
            yield f"{_part(model, prefix, number)}.{leaf}"


def _touches(region: Region, parameter: Any, dim: int, low: int, high: int) -> bool:
    """Whether a region lies in rows (columns) low to high of a parameter along `dim`."""
    offset, sizes, strides = region
    step = parameter.stride(dim)
    first = (offset - parameter.storage_offset()) // step % parameter.shape[dim]
    count = next((s for s, stride in zip(sizes, strides, strict=True) if stride == step), 1)
    return first < high and first + count > low


def _short_experts(parameter: Any, regions: set[Region], is_pair: bool) -> list[int]:
    """Experts of which gate, up, all or some rows are missing. `is_pair`: gate and up lie in the
    halves of one dimension.

    vLLM may pad each half at its end and takes weights that are too small (vllm 0.32
    fused_moe/routed_experts.py:523), so that an expert's size tells only beside the others'.
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
    return [e for e in experts if elements[e] < usual or not all(e in found for found in touched)]


def _elements(parameter: Any, regions: set[Region]) -> Counter[int]:
    """Expert -> how many of its elements were written. A region that is not a view by
    experts counts for its first.
    """
    step, found = parameter.stride(0), Counter[int]()
    for offset, sizes, strides in regions:
        count = next(
            (size for size, stride in zip(sizes, strides, strict=True) if stride == step), 1
        )
        first = (offset - parameter.storage_offset()) // step
        for number in range(count):
            found[first + number] += math.prod(sizes) // count
    return found


def _experts_in(region: Region, parameter: Any, dim: int, low: int, high: int) -> Iterator[int]:
    """Experts of which a region holds some of low to high along `dim`."""
    offset, sizes, strides = region
    step = parameter.stride(0)
    start = offset - parameter.storage_offset()
    inner = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if stride != step]
    count = next((size for size, stride in zip(sizes, strides, strict=True) if stride == step), 1)
    extent = sum((size - 1) * stride for size, stride in inner)
    is_outermost = parameter.stride(dim) == max(parameter.stride()[1:])
    for begin in range(start, start + count * step, step):
        for expert in range(begin // step, (begin + extent) // step + 1):
            first, last = (
                max(begin - expert * step, 0),
                min(begin + extent - expert * step, step - 1),
            )
            if is_outermost:
                # By places in memory: a region may be a view with other dimensions.
                is_in = first < high * parameter.stride(dim) and last >= low * parameter.stride(dim)
            else:
                is_in = _touches(region, parameter, dim, low, high)
            if is_in:
                yield expert


def _part(model: Any, prefix: str, number: int) -> str:
    """The checkpoint's name of a part of a fused layer, where the model tells it."""
    parent, _, last = prefix.rpartition(".")
    named = getattr(model, "packed_modules_mapping", None) or {}
    parts = named.get(last) or _PARTS.get(last) or ()
    part = parts[number] if number < len(parts) else f"{last}[{number}]"
    return f"{parent}.{part}" if parent else part

"""Tensors of a checkpoint against what its config.json describes, layer by layer: missing ones, extra layers, other shapes. Pure.

layer_tensors.json has the names and shapes that transformers saves for a family, with sizes as symbols. Made by
tests/fixtures/layer_tensors.py. Families that are not in it are compared by names alone (missing.py) and while vLLM loads them
(nibble_kernels/vllm_plugin/written.py).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.nvfp4 import Nvfp4Weight, Problem, gather
from nibble.checkpoint.weights import SCALE, kind_of
from nibble.errors import ExitCode

FILE = Path(__file__).with_suffix(".json")
# Symbol -> keys of config.json, the first that is there counts.
SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",), "heads": ("num_attention_heads",), "kv": ("num_key_value_heads", "num_attention_heads"),
    "head": ("head_dim",), "intermediate": ("intermediate_size",), "vocabulary": ("vocab_size",),
    "expert": ("moe_intermediate_size",), "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "shared": ("shared_expert_intermediate_size",), "shared_experts": ("n_shared_experts",),
}  # fmt: skip
_WHOLE = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")  # one element a weight
_LAYER = re.compile(r"^(.*?\blayers\.)([0-9]{1,6})\.(.+)$")
_EXPERT = re.compile(r"(?<=experts\.)[0-9]+(?=\.)")
_PACKED = re.compile(r"(?:_packed)$|(?<=\.)q(?=weight$)")
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
_FEED_FORWARD = ("mlp.", "block_sparse_moe.")


@dataclass(frozen=True)
class Family:
    """Names and shapes in symbols: of a layer (`*` for the number of an expert), and of what is beside the layers."""

    layer: Mapping[str, tuple[str, ...]]
    beside: Mapping[str, tuple[str, ...]]


@cache
def families() -> Mapping[str, Family]:
    """Those that are known, by model_type."""
    return {
        name: Family(
            *({leaf: tuple(shape) for leaf, shape in found[part].items()} for part in ("layer", "beside"))
        )
        for name, found in json.loads(FILE.read_text()).items()
    }


def layer_problems(
    tensors: Mapping[str, TensorInfo],
    weights: Iterable[Nvfp4Weight],
    text: Mapping[str, Any],
    model_type: str,
    num_layers: int | None,
    head_dim: int | None,
) -> tuple[Problem, ...]:
    """What is wrong with the tensors of a known family; nothing for any other."""
    family = families().get(model_type)
    if (
        family is None or "fc.weight" in tensors
    ):  # a draft (EAGLE) under its target's model_type, with a vocabulary of its own
        return ()
    if odd := tuple(_odd_sizes(text)):
        return odd
    if not num_layers:
        return ()
    prefix, stack = _stack(tensors, family)
    if not stack:
        return ()
    found = [*_absent(prefix, stack, num_layers, family), *_beyond(prefix, stack, num_layers, text, tensors)]
    sizes = {symbol: _size(text, keys) for symbol, keys in SIZES.items()} | {"head": head_dim or 0, "1": 1}
    shapes = {w.weight.name: (w.rows, w.columns) for w in weights if not w.experts}
    found += _misfits(prefix, tensors, shapes, family, sizes)
    return gather(found)


def _odd_sizes(text: Mapping[str, Any]) -> Iterator[Problem]:
    """Sizes that are no whole numbers above 0. One that is not there is transformers' default; some may be null."""
    keys = dict.fromkeys(("num_hidden_layers", *(key for keys in SIZES.values() for key in keys)))
    for key in keys:
        value = text.get(key, 1)
        if (value is None and key not in _NEEDED) or (type(value) is int and value > 0):
            continue
        shown = json.dumps(value)[:40]
        yield _problem("size", key, "config.json", f"is {shown}", "a whole number above 0")


def _size(text: Mapping[str, Any], keys: Sequence[str]) -> int:
    value = next((text[key] for key in keys if text.get(key) is not None), 0)
    return value if type(value) is int else 0


Stack = Mapping[
    int, frozenset[str]
]  # layer -> what follows `layers.N.`, with the names of tensors that are not packed


def _stack(tensors: Iterable[str], family: Family) -> tuple[str, Stack]:
    """The prefix and the layers of the one stack that holds most tensors of the family."""
    stacks: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in tensors:
        if (match := _LAYER.match(name)) and not SCALE.search(name):
            stacks[match[1]][int(match[2])].add(_PACKED.sub("", match[3]))
    known = {
        prefix: sum(_kind(leaf) in family.layer for leaves in stack.values() for leaf in leaves)
        for prefix, stack in stacks.items()
        if kind_of(prefix) not in ("vision", "draft")
    }
    best = max(known, key=known.__getitem__, default="")
    if not best or not known[best]:
        return "", {}
    return best, {number: frozenset(leaves) for number, leaves in stacks[best].items()}


def _kind(leaf: str) -> str:
    return _EXPERT.sub("*", leaf)


def _absent(prefix: str, stack: Stack, num_layers: int, family: Family) -> Iterator[Problem]:
    """Whole layers, and what a layer lacks that others of its kind have."""
    layers = {number: leaves for number, leaves in stack.items() if number < num_layers}
    if len(layers) < num_layers:
        first = next(number for number in range(len(layers) + 1) if number not in layers)
        expected = f"{num_layers} layers, and {len(layers)} are stored (num_hidden_layers of config.json)"
        yield _problem("layer", f"{prefix}{first}", "", "is missing", expected)
    with_experts = {
        number for number, leaves in layers.items() if any(".experts." in leaf for leaf in leaves)
    }
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for number, leaves in layers.items():
        for leaf in leaves:
            if _kind(leaf) in family.layer:
                holders[leaf].add(number)
    for leaf, holding in holders.items():
        alike = set(layers)
        if leaf.startswith(_FEED_FORWARD):
            alike = with_experts if holding & with_experts else alike - with_experts
        for number in sorted(alike - holding):
            if ".experts." not in leaf or not _stores_otherwise(layers[number], family):
                what, expected = "is missing", f"it in every layer, as in layer {min(holding)}"
                yield _problem("absent", f"{prefix}{number}.{leaf}", "", what, expected)


def _stores_otherwise(leaves: Iterable[str], family: Family) -> bool:
    """Whether a layer has its experts in a form of their own, such as all in one tensor."""
    return any(".experts." in leaf and _kind(leaf) not in family.layer for leaf in leaves)


def _beyond(
    prefix: str, stack: Stack, num_layers: int, text: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Iterator[Problem]:
    """Layers that config.json does not count. Drafts (MTP) follow the last layer, and their config says so."""
    if any("nextn" in key or "mtp" in key for key in text):
        return
    for number in sorted(stack):
        if number >= num_layers:
            name = next((f"{prefix}{number}.{leaf}" for leaf in sorted(stack[number])), "")
            file = tensors[name].file if name in tensors else ""
            yield _problem(
                "layers", name, file, "is stored", f"{num_layers} layers (num_hidden_layers of config.json)"
            )


def _misfits(
    prefix: str,
    tensors: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    family: Family,
    sizes: Mapping[str, int],
) -> Iterator[Problem]:
    """Tensors of another shape than the sizes in config.json give."""
    root = prefix.removesuffix("layers.")
    for name, tensor in tensors.items():
        symbols = _symbols(name, prefix, root, family)
        stored = shapes.get(name) or (tensor.shape if tensor.dtype in _WHOLE else None)
        if symbols is None or stored is None:
            continue
        expected = tuple(_value(symbol, sizes) for symbol in symbols)
        if None in expected or stored == expected:
            continue
        keys = ", ".join(dict.fromkeys(key for symbol in symbols for key in _keys(symbol)))
        what = f"is a weight of shape {list(stored)}"
        yield _problem("misfit", name, tensor.file, what, f"{list(expected)} ({keys} of config.json)")


def _symbols(name: str, prefix: str, root: str, family: Family) -> tuple[str, ...] | None:
    if match := _LAYER.match(name):
        return family.layer.get(_kind(_PACKED.sub("", match[3]))) if match[1] == prefix else None
    plain = _PACKED.sub("", name)
    return family.beside.get(plain.removeprefix(root)) if plain.startswith((root, "lm_head.")) else None


@cache
def _terms(symbol: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """A sum of products, each as (factors, divisors)."""
    found = []
    for term in symbol.split("+"):
        factors = [part.split("/") for part in term.split("*")]
        found.append((tuple(part[0] for part in factors), tuple(d for part in factors for d in part[1:])))
    return tuple(found)


def _value(symbol: str, sizes: Mapping[str, int]) -> int | None:
    """The number that a symbol stands for; None where config.json does not say."""
    total = 0
    for factors, divisors in _terms(symbol):
        above = math.prod(int(f) if f.isdigit() else sizes[f] for f in factors)
        below = math.prod(sizes[d] for d in divisors)
        if above <= 0 or below <= 0 or above % below:
            return None
        total += above // below
    return total


def _keys(symbol: str) -> Iterator[str]:
    for factors, divisors in _terms(symbol):
        yield from (SIZES[part][0] for part in (*factors, *divisors) if part in SIZES)


def _problem(kind: str, tensor: str, file: str, what: str, expected: str) -> Problem:
    return Problem(kind, ExitCode.MODEL, tensor, file, what, expected)

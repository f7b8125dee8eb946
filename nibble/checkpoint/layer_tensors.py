"""Compares a checkpoint's tensors with its config.json, layer by layer. Pure.

layer_tensors.json has the names and shapes that transformers saves for a family, with sizes as
symbols; tests/support/models/layer_tensors.py generates it. Other families are compared by names
alone (missing.py) and while vLLM loads them (nibble/engine/plugin/written.py).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from nibble.checkpoint.headers import TensorInfo
from nibble.checkpoint.heads import DEFAULT_HEAD_DIM, head_dim, kv_heads
from nibble.checkpoint.nvfp4 import Nvfp4Weight, Problem, gather
from nibble.checkpoint.weights import PACKING, SCALE, kind_of
from nibble.errors import ExitCode

FILE = Path(__file__).with_suffix(".json")
# Symbol -> keys of config.json, the first with a number counts.
SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv": ("num_key_value_heads",),
    "head": ("head_dim",),
    "intermediate": ("intermediate_size",),
    "vocabulary": ("vocab_size",),
    "expert": ("moe_intermediate_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "shared": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
}
_WHOLE = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")  # one element a weight
_LAYER = re.compile(r"^(.*?\blayers\.)([0-9]{1,6})\.(.+)$")
_EXPERT = re.compile(r"(?<=experts\.)[0-9]+(?=\.)")
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_NEVER_NULL = (*_NEEDED, "intermediate_size")
_FEED_FORWARD = ("mlp.", "block_sparse_moe.")


@dataclass(frozen=True)
class Family:
    """Names and shapes of a family in symbols: of a layer (`*` for an expert's number), and of the
    tensors outside layers.
    """

    layer: Mapping[str, tuple[str, ...]]
    beside: Mapping[str, tuple[str, ...]]


@cache
def families() -> Mapping[str, Family]:
    """The known families, by model_type."""
    return {
        name: Family(
            *(
                {leaf: tuple(shape) for leaf, shape in found[part].items()}
                for part in ("layer", "beside")
            )
        )
        for name, found in json.loads(FILE.read_text()).items()
    }


def layer_problems(
    tensors: Mapping[str, TensorInfo],
    weights: Iterable[Nvfp4Weight],
    text: Mapping[str, Any],
    model_type: str,
    num_layers: int | None,
) -> tuple[Problem, ...]:
    """Problems of the tensors of a known family; none for an unknown one."""
    family = families().get(model_type)
    if (
        family is None or "fc.weight" in tensors
    ):  # a draft (EAGLE) with its target's model_type and its own vocabulary
        return ()
    prefix, stack = _stack(tensors, family)
    if odd := tuple(_odd_sizes(text, _used(tensors, prefix, family))):
        return odd
    if not stack or not num_layers:
        return ()
    found = [
        *_absent(prefix, stack, num_layers, family),
        *_beyond(prefix, stack, num_layers, text, tensors),
    ]
    shapes = {w.weight.name: (w.rows, w.columns) for w in weights if not w.experts}
    misfits = _misfits(prefix, tensors, shapes, family, _sizes(text, model_type))
    found += [replace(p, is_draft=kind_of(p.tensor, num_layers) == "draft") for p in misfits]
    return gather(found)


def _used(tensors: Iterable[str], prefix: str, family: Family) -> set[str]:
    """Symbols in the shapes of the stored tensors."""
    shapes = {_symbols(name, prefix, family) for name in tensors} if prefix else set()
    terms = [term for shape in shapes for symbol in shape or () for term in _terms(symbol)]
    return {part for factors, divisors in terms for part in (*factors, *divisors)}


def _odd_sizes(text: Mapping[str, Any], used: Set[str]) -> Iterator[Problem]:
    """Sizes that are not whole numbers above 0. An absent size means transformers' default; null
    follows from other sizes.

    A size without a stored tensor may have any value: some dense models have `num_experts: 0`.
    """
    wanted = [SIZES[symbol] for symbol in SIZES if symbol in used]
    for keys in dict.fromkeys((*((key,) for key in _NEEDED), *wanted)):
        stated = [key for key in keys if key in text]
        if not stated or any(_is_size(text[key]) for key in stated):
            continue
        key = next((key for key in stated if text[key] is not None), stated[0])
        if text[key] is not None or key in _NEVER_NULL:
            yield _problem(
                "size",
                key,
                "config.json",
                f"is {json.dumps(text[key])[:40]}",
                "a whole number above 0",
            )


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _sizes(text: Mapping[str, Any], model_type: str) -> dict[str, int]:
    """Symbol -> its number, 0 where config.json does not say."""
    sizes = {
        symbol: next((text[key] for key in keys if _is_size(text.get(key))), 0)
        for symbol, keys in SIZES.items()
    }
    given = {**text, "model_type": model_type}
    for symbol, of in (("kv", kv_heads), ("head", head_dim)):
        try:
            sizes[symbol] = of(given)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            sizes[symbol] = 0
    if "head_dim" in text and text["head_dim"] is None and model_type in DEFAULT_HEAD_DIM:
        sizes["head"] = (
            0  # classes differ in what null is: their default, or hidden_size over heads
        )
    return sizes


Stack = Mapping[
    int, frozenset[str]
]  # layer -> what follows `layers.N.`, with the names of tensors that are not packed


def _stack(tensors: Iterable[str], family: Family) -> tuple[str, Stack]:
    """The prefix and the layers of the stack that holds most tensors of the family."""
    stacks: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in tensors:
        if (match := _LAYER.match(name)) and not SCALE.search(name):
            stacks[match[1]][int(match[2])].add(PACKING.sub("", match[3]))
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
    """Missing layers, and tensors that a layer lacks and others of its kind have."""
    layers = {number: leaves for number, leaves in stack.items() if number < num_layers}
    if len(layers) < num_layers:
        first = next(number for number in range(len(layers) + 1) if number not in layers)
        expected = (
            f"{num_layers} layers, and {len(layers)} are stored (num_hidden_layers of config.json)"
        )
        yield _problem("layer", f"{prefix}{first}", "", "is missing", expected)
    with_experts = {
        number for number, leaves in layers.items() if any(".experts." in leaf for leaf in leaves)
    }
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for number, leaves in layers.items():
        for leaf in leaves:
            if _kind(leaf) in family.layer:
                holders[leaf].add(number)
    # Modules with a leaf that the family does not know: in another format, or all experts in one
    # tensor.
    otherwise = {
        number: {_module(leaf) for leaf in leaves if _kind(leaf) not in family.layer}
        for number, leaves in layers.items()
    }
    for leaf, holding in holders.items():
        alike = set(layers)
        if leaf.startswith(_FEED_FORWARD):
            alike = with_experts if holding & with_experts else alike - with_experts
        for number in sorted(alike - holding):
            if _module(leaf) not in otherwise[number]:
                what, expected = "is missing", f"it in every layer, as in layer {min(holding)}"
                yield _problem("absent", f"{prefix}{number}.{leaf}", "", what, expected)


def _module(leaf: str) -> str:
    """The module of a tensor; all experts of a layer are one."""
    before, experts, _ = leaf.partition(".experts.")
    return before + experts if experts else leaf.rpartition(".")[0]


def _beyond(
    prefix: str,
    stack: Stack,
    num_layers: int,
    text: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> Iterator[Problem]:
    """Layers beyond the count in config.json. Drafts (MTP) follow the last layer, and their config
    declares them.
    """
    if any("nextn" in key or "mtp" in key for key in text):
        return
    for number in sorted(stack):
        if number >= num_layers:
            name = next((f"{prefix}{number}.{leaf}" for leaf in sorted(stack[number])), "")
            file = tensors[name].file if name in tensors else ""
            yield _problem(
                "layers",
                name,
                file,
                "is stored",
                f"{num_layers} layers (num_hidden_layers of config.json)",
            )


def _misfits(
    prefix: str,
    tensors: Mapping[str, TensorInfo],
    shapes: Mapping[str, tuple[int, ...]],
    family: Family,
    sizes: Mapping[str, int],
) -> Iterator[Problem]:
    """Tensors whose shape differs from the sizes in config.json."""
    for name, tensor in tensors.items():
        symbols = _symbols(name, prefix, family)
        stored = shapes.get(name) or (tensor.shape if tensor.dtype in _WHOLE else None)
        if symbols is None or stored is None:
            continue
        expected = tuple(_value(symbol, sizes) for symbol in symbols)
        if None in expected or stored == expected:
            continue
        keys = ", ".join(dict.fromkeys(key for symbol in symbols for key in _keys(symbol)))
        what = f"is a weight of shape {list(stored)}"
        yield Problem.of("misfit", tensor, what, f"{list(expected)} ({keys} of config.json)")


def _symbols(name: str, prefix: str, family: Family) -> tuple[str, ...] | None:
    root = prefix.removesuffix("layers.")
    if match := _LAYER.match(name):
        return family.layer.get(_kind(PACKING.sub("", match[3]))) if match[1] == prefix else None
    plain = PACKING.sub("", name)
    return (
        family.beside.get(plain.removeprefix(root))
        if plain.startswith((root, "lm_head."))
        else None
    )


@cache
def _terms(symbol: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """A sum of products, each as (factors, divisors)."""
    found = []
    for term in symbol.split("+"):
        factors = [part.split("/") for part in term.split("*")]
        found.append(
            (tuple(part[0] for part in factors), tuple(d for part in factors for d in part[1:]))
        )
    return tuple(found)


def _value(symbol: str, sizes: Mapping[str, int]) -> int | None:
    """The number for a symbol; None where config.json has none."""
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

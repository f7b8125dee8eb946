"""Suspects missing tensors by the names of those present; vLLM's check at load decides. Pure.

vLLM 0.32 looks for parameters that no tensor filled in unquantized models only, unless a flag
enables it (default_loader.py:507).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from nibble.checkpoint.weights import PACKING, SCALE, kind_of

EMBEDDING, LAST_NORM = "the embedding", "the last norm"
SHOWN = 3
FEW = 20  # one layer in so many may lack what all others have
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.([0-9]{1,6})\.")
_IS_EMBEDDING = re.compile(r"embed|wte|(?:^|\.)(?:emb|shared)\.", re.I)
_IS_NORM = re.compile(r"norm|ln", re.I)
_BUFFER = "inv_freq"  # older exporters stored it; vLLM makes it

Stack = Mapping[str, Set[int]]  # what follows `layers.N.`: the layers that have it


def missing_tensors(
    names: Iterable[str], num_layers: int | None, index: Iterable[str] = ()
) -> tuple[str, ...]:
    """Tensors that no file has: of `index`, of single layers, whole layers (`model.layers.7`),
    embedding and last norm.

    `index` are the names in the checkpoint's index. Without `num_layers` only the index is compared
    with the tensors. The check covers layers that certainly belong to the decoder: not vision
    towers, not drafts (MTP).
    """
    stored = set(names)
    promised = set(index) - stored
    if promised:
        forms = {PACKING.sub("", name) for name in stored}
        promised = {
            name for name in promised if PACKING.sub("", name) not in forms and _BUFFER not in name
        }
    named = stored | promised
    found = sorted(promised)
    prefix, stack = _decoder(named, num_layers or 0)
    if stack:
        found += _layers(prefix, stack, num_layers or 0)
        found += _ends(named)
    return tuple(found)


def some_of(missing: Sequence[str]) -> str:
    """The first missing names, and the number of the others."""
    more = f" and {len(missing) - SHOWN} more" if missing[SHOWN:] else ""
    return ", ".join(missing[:SHOWN]) + more


def _decoder(names: Iterable[str], num_layers: int) -> tuple[str, Stack]:
    """The prefix and content of the only stack with more than half of the text model's layers;
    empty unless there is exactly one.
    """
    stacks: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if (match := _LAYER.search(name)) and int(match[1]) < num_layers:  # those above are drafts
            stacks[name[: match.start(1)]][name[match.end() :]].add(int(match[1]))
    found = [
        (prefix, stack)
        for prefix, stack in stacks.items()
        if kind_of(prefix) not in ("vision", "draft")
        and 2 * len(set[int]().union(*stack.values())) > num_layers
    ]
    return found[0] if len(found) == 1 else ("", {})


def _layers(prefix: str, stack: Stack, num_layers: int) -> Iterator[str]:
    present = set[int]().union(*stack.values())
    yield from (f"{prefix}{number}" for number in range(num_layers) if number not in present)
    together: defaultdict[str, set[int]] = defaultdict(set)
    for end, layers in stack.items():
        if not SCALE.search(end) and _BUFFER not in end:  # nvfp4.py checks scales
            # A layer in another format is complete.
            together[PACKING.sub("", end)] |= layers
    ends: defaultdict[frozenset[int], list[str]] = defaultdict(list)
    for end, layers in together.items():
        ends[frozenset(layers)].append(end)
    holes = [
        (number, end)
        for layers in ends
        for number in _holes(layers, present)
        # A layer of another kind (attention among Mamba layers, dense among experts) has what the
        # others have not.
        if not any(number in other and other.isdisjoint(layers) for other in ends)
        for end in ends[layers]
    ]
    yield from (f"{prefix}{number}.{end}" for number, end in sorted(holes))


def _holes(layers: Set[int], present: Set[int]) -> list[int]:
    """The few inner layers that lack what most layers have; a model's first and last layers may
    differ.
    """
    if len(layers) < 3 or 2 * len(layers) <= len(present):
        return []
    found = [number for number in range(min(layers), max(layers)) if number in present - layers]
    return found if len(found) <= max(1, (len(layers) + len(found)) // FEW) else []


def _ends(names: Set[str]) -> Iterator[str]:
    """Tensors outside a model's layers. A draft in a separate repository takes them from its
    target.
    """
    if "fc.weight" in names:
        return
    beside = [
        name
        for name in names
        if not _LAYER.search(name) and kind_of(name) not in ("vision", "draft")
    ]
    if not any(_IS_EMBEDDING.search(name) for name in beside):
        yield EMBEDDING
    if any(map(_IS_NORM.search, names)) and not any(map(_IS_NORM.search, beside)):
        yield LAST_NORM

"""Maps a checkpoint's tensors to transformers' parameters by its table of conversions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from nibble.reference.weights import INPUT, Unsupported, Weights

EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Source:
    """Where one parameter comes from: tensors of the checkpoint and, where there is one, the
    conversion that joins them.
    """

    def __init__(self, target: str, converter: Any | None) -> None:
        self.target, self._converter = target, converter
        self.parts: list[tuple[str, str]] = []  # pattern, name

    def load(self, weights: Weights, config: Any) -> Tensor:
        """The whole parameter."""
        return self._join(weights, self.parts, config)

    @property
    def has_experts(self) -> bool:
        """Whether the parameter stacks tensors that the checkpoint has one by one."""
        return self._converter is not None and all(EXPERT.search(name) for _, name in self.parts)

    def load_expert(self, weights: Weights, expert: int, config: Any) -> Tensor:
        """One expert's slice of a stacked parameter."""
        if not self.has_experts:
            return weights.load(self.parts[0][1], expert, expert + 1)[0]
        own = [(pattern, name) for pattern, name in self.parts if _number(name) == expert]
        if not own:
            raise Unsupported(f"the checkpoint has no expert {expert} for {self.target}")
        joined = self._join(weights, own, config)
        value = joined[0]
        if (how := getattr(joined, INPUT, None)) is not None:
            setattr(value, INPUT, how)
        return value

    def _join(self, weights: Weights, parts: Iterable[tuple[str, str]], config: Any) -> Tensor:
        if self._converter is None:
            return weights.load(self.parts[0][1])
        tensors: dict[str, list[Tensor]] = {}
        inputs = []
        for pattern, name in parts:
            value = weights.load(name)
            inputs.append(getattr(value, INPUT, None))
            tensors.setdefault(pattern, []).append(value)
        converter = deepcopy(self._converter)
        found: Any = tensors
        for operation in converter.operations:
            found = operation.convert(
                found,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=self.target,
                config=config,
            )
        values = list(found.values())
        if len(values) > 1:  # one tensor that makes several parameters
            values = [value for key, value in found.items() if key in self.target]
        result = values[0][0] if isinstance(values[0], list) else values[0]
        known = [one for one in inputs if one is not None]
        if known and len(known) == len(inputs):
            # gate and up of one expert read one input: kernels take the larger scale
            # (engine/plugin/report/probes.py)
            setattr(result, INPUT, (known[0][0], max(scale for _, scale in known)))
        return result


def _number(name: str) -> int:
    found = EXPERT.search(name)
    return int(found[1]) if found else -1


def sources_of(model: Any, weights: Weights) -> dict[str, Source]:
    """Parameter (or kept buffer) -> its source, for all that the checkpoint has."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    table = get_model_conversion_mapping(model)
    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Source] = {}
    for name in sorted(weights.names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        targets = [target]
        if converter is not None and len(converter.target_patterns) > 1:
            first = converter.target_patterns[0]
            targets = [target.replace(first, one) for one in converter.target_patterns]
        for one in targets:
            found.setdefault(one, Source(one, converter)).parts.append((pattern or name, name))
    return found


def missing(model: Any, sources: dict[str, Source]) -> list[str]:
    """Parameters that nothing in the checkpoint makes; tied ones are found in what they are tied
    to.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    return [
        name
        for name, value in model.state_dict().items()
        if name not in sources and tied.get(name) not in sources and value.dtype.is_floating_point
    ]


def as_parameter(value: Tensor) -> torch.nn.Parameter:
    """A parameter that keeps how its inputs are rounded."""
    made = torch.nn.Parameter(value, requires_grad=False)
    if (how := getattr(value, INPUT, None)) is not None:
        setattr(made, INPUT, how)
    return made

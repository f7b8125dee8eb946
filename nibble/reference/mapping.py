"""Maps a checkpoint's tensors to transformers' parameters with transformers' conversion table."""

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
    """The tensors of the checkpoint that make the parameter `target`.

    `converter`: transformers' WeightConverter that joins them, or None for a single tensor.
    """

    def __init__(self, target: str, converter: Any | None) -> None:
        self.target, self._converter = target, converter
        self.parts: list[tuple[str, str]] = []  # (the converter's pattern, the tensor's name)

    def load(self, weights: Weights, config: Any) -> Tensor:
        """The whole parameter."""
        return self._join(weights, self.parts, config)

    @property
    def has_experts(self) -> bool:
        """Whether the parameter stacks tensors that the checkpoint stores one per expert."""
        return self._converter is not None and all(EXPERT.search(name) for _, name in self.parts)

    def load_expert(self, weights: Weights, expert: int, config: Any) -> Tensor:
        """One expert's slice of a stacked parameter. Raises Unsupported if it is missing."""
        if not self.has_experts:
            return weights.load(self.parts[0][1], expert, expert + 1)[0]
        parts = [(pattern, name) for pattern, name in self.parts if _number(name) == expert]
        if not parts:
            raise Unsupported(f"the checkpoint has no expert {expert} for {self.target}")
        joined = self._join(weights, parts, config)
        value = joined[0]
        if (rounding := getattr(joined, INPUT, None)) is not None:
            setattr(value, INPUT, rounding)
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
        converted: Any = tensors
        for operation in converter.operations:
            converted = operation.convert(
                converted,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=self.target,
                config=config,
            )
        values = list(converted.values())
        if len(values) > 1:  # the converter splits one tensor into several parameters
            values = [value for key, value in converted.items() if key in self.target]
        result = values[0][0] if isinstance(values[0], list) else values[0]
        known = [rounding for rounding in inputs if rounding is not None]
        if known and len(known) == len(inputs):
            # gate and up of an expert share one input: kernels use the larger scale, as
            # nibble/engine/plugin/report/probes.py does.
            setattr(result, INPUT, (known[0][0], max(scale for _, scale in known)))
        return result


def _number(name: str) -> int:
    match = EXPERT.search(name)
    return int(match[1]) if match else -1


def sources_of(model: Any, weights: Weights) -> dict[str, Source]:
    """Name of a parameter or stored buffer -> its source, for every one the checkpoint has."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, Source] = {}
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
            targets = [target.replace(first, other) for other in converter.target_patterns]
        for target in targets:
            source = sources.setdefault(target, Source(target, converter))
            source.parts.append((pattern or name, name))
    return sources


def missing(model: Any, sources: dict[str, Source]) -> list[str]:
    """Parameters without a source. A tied parameter has the source of the one it is tied to."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return [
        name
        for name, value in model.state_dict().items()
        if name not in sources and tied.get(name) not in sources and value.dtype.is_floating_point
    ]


def as_parameter(value: Tensor) -> torch.nn.Parameter:
    """`value` as a parameter that keeps the attribute INPUT."""
    parameter = torch.nn.Parameter(value, requires_grad=False)
    if (rounding := getattr(value, INPUT, None)) is not None:
        setattr(parameter, INPUT, rounding)
    return parameter

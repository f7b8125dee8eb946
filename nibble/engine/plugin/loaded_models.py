"""What changes of loaded models share: when they come, and how a module is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.model_executor.model_loader import base_loader

from nibble.engine.plugin.require import replace, required


class Unsuitable(Exception):
    """A module computes something that nibble's kernels do not."""


def expect(condition: bool, otherwise: str) -> None:
    """Raise Unsuitable unless the condition holds."""
    if not condition:
        raise Unsuitable(otherwise)


def after_loading(change: Callable[[nn.Module], None]) -> None:
    """Call `change` with every model that vLLM loads in this process, once its weights are prepared
    (vllm 0.32 base_loader.py:109).

    Raises VllmMismatch.
    """
    name = "process_weights_after_loading"  # a name in that module's namespace
    process = required(base_loader, name, "model", "model_config", "target_device")

    @functools.wraps(process)
    def process_and_change(model: nn.Module, *rest: Any) -> None:
        process(model, *rest)
        change(model)

    replace(base_loader, name, process_and_change)


def split_graphs(compilation: Any, operator: str, beside: str) -> None:
    """Split vLLM's graphs at an operator where they split at another, which it stands for."""
    operators = compilation.splitting_ops
    if operators and beside in operators and operator not in operators:
        operators.append(operator)

"""Ends a load with the name of the tensor that is missing or does not fit, for every model and
quantization.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import SpeculativeConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from nibble.engine.contract import DOES_NOT_FIT, NOT_INITIALIZED, TENSOR_ERROR, reported_as
from nibble.engine.plugin.options import weights_are_real
from nibble.engine.plugin.require import replace, required, required_of_instances
from nibble.engine.plugin.written import WrittenRegions, require_layers, unwritten

_MISFITS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Weights that a draft model takes from its target after the load, and the attribute that says that
# it has separate ones (vllm 0.32 v1/spec_decode/llm_base_proposer.py:1416, 1508;
# v1/worker/gpu/spec_decode/eagle/utils.py:71, 107).
_FROM_TARGET = {
    re.compile(r"(?:^|\.)embed_tokens\."): "has_own_embed_tokens",
    re.compile(r"(?:^|\.)(?:lm_head|shared_head\.head)\."): "has_own_lm_head",
}
# Tensors that a draft model uses only if its files have them (vllm 0.32 llama_eagle3.py:378, 459;
# qwen3_dflash.py:517, 923).
_OPTIONAL_IN_DRAFTS = re.compile(r"(?:^|\.)(?:draft_id_to_target_id|mask_embedding)$")


@reported_as(TENSOR_ERROR)
class TensorError(ValueError):
    """A tensor of the checkpoint does not fit the model: unknown name, other shape or dtype."""


def check_loads() -> None:
    """Replace methods of vLLM's default loader (vllm 0.32 model_loader/default_loader.py:367, 484).

    Other loaders have checks. Raises VllmMismatch.
    """
    load = required(DefaultModelLoader, "load_weights", "self", "model", "model_config")
    read = required(DefaultModelLoader, "get_all_weights", "self", "model_config", "model")
    required_of_instances(DefaultModelLoader, "enable_weights_track")
    required_of_instances(VllmConfig, "speculative_config", "load_config", "additional_config")
    required(SpeculativeConfig, "uses_draft_model", "self")
    require_layers()

    def load_and_check(self: Any, model: nn.Module, model_config: Any) -> None:
        if not weights_are_real() or self.enable_weights_track is False:
            return load(self, model, model_config)
        returned = _remember_returned(model)
        self.nibble_reading = None
        written = WrittenRegions(model)
        try:
            with written:
                load(self, model, model_config)
        except torch.OutOfMemoryError:
            raise
        except _MISFITS as error:
            raise _named(error, self.nibble_reading) from error
        finally:
            del model.load_weights
        missing = unwritten(model, written, returned())
        if _shares_with_target(model_config):
            missing = [name for name in missing if not _is_from_target(model, name)]
        if missing:
            names = ", ".join(map(repr, missing))
            raise ValueError(f"{NOT_INITIALIZED}{{{names}}}")

    def read_and_remember(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read(self, *args, **kwargs):
            self.nibble_reading = name, tensor
            yield name, tensor
            self.nibble_reading = None  # a later error concerns the next tensor, or none

    replace(DefaultModelLoader, "load_weights", load_and_check)
    replace(DefaultModelLoader, "get_all_weights", read_and_remember)


def _shares_with_target(model_config: Any) -> bool:
    """Whether a model is a draft head. Full draft models share nothing with the target (vllm 0.32
    v1/spec_decode/draft_model.py:115).
    """
    config = get_current_vllm_config_or_none()
    speculation = config.speculative_config if config is not None else None
    return model_config.runner_type == "draft" and not (
        speculation and speculation.uses_draft_model()
    )


def _is_from_target(model: nn.Module, name: str) -> bool:
    """Whether a draft model may lack this weight."""
    shared = any(
        pattern.search(name) and not getattr(model, has_own, False)
        for pattern, has_own in _FROM_TARGET.items()
    )
    return shared or _OPTIONAL_IN_DRAFTS.search(name) is not None


def _remember_returned(model: Any) -> Any:
    """Replace `model.load_weights` on this object and return a function that gives its result.

    vLLM's loader does not pass the result on.
    """
    load, results = model.load_weights, {}

    def load_and_remember(*args: Any, **kwargs: Any) -> Any:
        names = load(*args, **kwargs)
        results["names"] = set(names) if names is not None else None
        return names

    model.load_weights = load_and_remember
    return lambda: results.get("names")


def _described(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _named(error: Exception, reading: tuple[str, Tensor] | None) -> Exception:
    """The error with the name of the tensor being loaded, or unchanged without one."""
    if reading is None or NOT_INITIALIZED in str(error):
        return error
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    name, tensor = reading
    return TensorError(f"{name} ({_described(tensor)}) {DOES_NOT_FIT} ({why})")

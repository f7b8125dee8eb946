"""A load ends with the name of the tensor that is missing or does not fit, whatever the model
and its quantization.
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
# What a draft takes from its target after the load, and the attribute that says that it has its own
# (vllm 0.32 v1/spec_decode/llm_base_proposer.py:1416, 1508;
# v1/worker/gpu/spec_decode/eagle/utils.py:71, 107).
_FROM_TARGET = {
    re.compile(r"(?:^|\.)embed_tokens\."): "has_own_embed_tokens",
    re.compile(r"(?:^|\.)(?:lm_head|shared_head\.head)\."): "has_own_lm_head",
}
# What a draft uses only where its files hold it (vllm 0.32 llama_eagle3.py:378, 459;
# qwen3_dflash.py:517, 923).
_OPTIONAL_IN_DRAFTS = re.compile(r"(?:^|\.)(?:draft_id_to_target_id|mask_embedding)$")


@reported_as(TENSOR_ERROR)
class TensorError(ValueError):
    """A tensor of the checkpoint that the model has no place for, or one of another shape or
    type.
    """


def check_loads() -> None:
    """Follow vLLM's default loader (vllm 0.32 model_loader/default_loader.py:367, 484); other
    loaders check for themselves.
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

    def read_and_note(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read(self, *args, **kwargs):
            self.nibble_reading = name, tensor
            yield name, tensor
            self.nibble_reading = None  # what fails from here on is the next one, or none

    replace(DefaultModelLoader, "load_weights", load_and_check)
    replace(DefaultModelLoader, "get_all_weights", read_and_note)


def _shares_with_target(model_config: Any) -> bool:
    """Whether this is a draft that is not a full model: those share nothing (vllm 0.32
    v1/spec_decode/draft_model.py:115).
    """
    config = get_current_vllm_config_or_none()
    speculation = config.speculative_config if config is not None else None
    return model_config.runner_type == "draft" and not (
        speculation and speculation.uses_draft_model()
    )


def _is_from_target(model: nn.Module, name: str) -> bool:
    """Whether a draft without this weight is whole."""
    shared = any(
        pattern.search(name) and not getattr(model, has_own, False)
        for pattern, has_own in _FROM_TARGET.items()
    )
    return shared or _OPTIONAL_IN_DRAFTS.search(name) is not None


def _remember_returned(model: Any) -> Any:
    """Have `model.load_weights` keep what it returns, which vLLM's loader does not hand on."""
    load, kept = model.load_weights, {}

    def keep(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        kept["names"] = set(found) if found is not None else None
        return found

    model.load_weights = keep
    return lambda: kept.get("names")


def _described(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _named(error: Exception, reading: tuple[str, Tensor] | None) -> Exception:
    """The error with the tensor that was being loaded; as it is where none was."""
    if reading is None or NOT_INITIALIZED in str(error):
        return error
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    name, tensor = reading
    return TensorError(f"{name} ({_described(tensor)}) {DOES_NOT_FIT} ({why})")

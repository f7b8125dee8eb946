"""The plugin's options, which vLLM's --additional-config passes to every worker."""

from __future__ import annotations

from vllm.config import get_current_vllm_config_or_none

from nibble.engine.contract import Options


def current_options() -> Options:
    """The options of the model that vLLM is building. Raises ValueError for an unknown key or
    value.
    """
    config = get_current_vllm_config_or_none()
    return Options.from_config(config.additional_config if config is not None else {})


def weights_are_real() -> bool:
    """False with --load-format dummy: vLLM then fills scales with random numbers of both signs."""
    config = get_current_vllm_config_or_none()
    return config is None or config.load_config.load_format != "dummy"

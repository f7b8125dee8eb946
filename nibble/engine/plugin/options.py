"""What nibble asks of the plugin: the key "nibble" of vLLM's --additional-config, which reaches
every worker.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from nibble_kernels.quartet2 import Mode
from vllm.config import get_current_vllm_config_or_none


@dataclass(frozen=True)
class Options:
    """nvfp4_activations: as the checkpoint says, or bf16 (weights only). quantize_lm_head: a BF16
    head to NVFP4 at load.

    act_scale_mode: what the scale of Quartet II's activations is made for
    (nibble_kernels.quartet2). linear_kernel and moe_kernel: vLLM's choice, or ours for NVFP4
    weights with unquantized activations on a GPU.
    """

    nvfp4_activations: Literal["checkpoint", "bf16"] = "checkpoint"
    quantize_lm_head: Literal["off", "nvfp4"] = "off"
    act_scale_mode: Mode = "token"
    linear_kernel: Literal["vllm", "nibble"] = "vllm"
    moe_kernel: Literal["vllm", "nibble"] = "vllm"

    @property
    def weights_only(self) -> bool:
        """Whether activations stay in BF16 whatever the checkpoint says."""
        return self.nvfp4_activations == "bf16"


def current_options() -> Options:
    """The options of the model that is being made. Raises ValueError for a key or value that
    does not exist.
    """
    config = get_current_vllm_config_or_none()
    additional = config.additional_config if config is not None else {}
    given = additional.get("nibble", {}) if isinstance(additional, dict) else {}
    types = get_type_hints(Options)
    for name, value in given.items():
        allowed = get_args(types.get(name))
        if value not in allowed:
            known = ", ".join(field.name for field in fields(Options))
            raise ValueError(
                f'--additional-config {{"nibble": {{"{name}": "{value}"}}}}: expected one of'
                f" {known}"
                if not allowed
                else (
                    f"--additional-config nibble.{name} is {value!r}: expected"
                    f" {' or '.join(map(str, allowed))}"
                )
            )
    return Options(**given)


def weights_are_real() -> bool:
    """False with --load-format dummy, which fills scales with random numbers of both signs."""
    config = get_current_vllm_config_or_none()
    return config is None or config.load_config.load_format != "dummy"

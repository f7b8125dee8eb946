"""The choice of an NVFP4 MoE backend must come with its kernel class; two releases returned None
for FlashInfer's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.syntax import Sources

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
ORACLE = f"{FUSED_MOE}.oracle.nvfp4"
KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"
ROW = Row(
    id="8",
    title="NVFP4 MoE backend chosen without a kernel class",
    how="the tree's select_nvfp4_moe_backend on an SM120 with FlashInfer",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "sound"},
    verdict=(
        "Real with VLLM_USE_FLASHINFER_MOE_FP4=1 and no VLLM_FLASHINFER_MOE_BACKEND: the loop ends"
        " in `return backend, None`. 0.32.0 rewrote the function and dropped both variables."
    ),
    instead="nothing to change in 0.32.0; a backend is chosen with --moe-backend",
    references=("vllm 0.16 model_executor/layers/fused_moe/oracle/nvfp4.py:220",),
)


def probe(tree: Tree) -> Finding:
    """Let the tree choose, with dgx-vllm's variable set as its users had it."""
    sources = Sources(tree, _machine())
    if not sources.has(f"{ORACLE}.select_nvfp4_moe_backend"):
        return not_applicable("there is no oracle for NVFP4 MoE in this tree")
    platform = sources.load("vllm.platforms.interface.Platform")
    capability = sources.load("vllm.platforms.interface.DeviceCapability")
    sources.given["vllm.platforms.current_platform"] = _blackwell(platform, capability)
    select = sources.load(f"{ORACLE}.select_nvfp4_moe_backend")
    backend, kernel = select(
        _moe_config(sources),
        sources.load(f"{KEYS}.kNvfp4Static"),
        sources.load(f"{KEYS}.kNvfp4Dynamic"),
    )
    if kernel is None:
        return defect(f"chosen: {backend.value} with kernel class None")
    return sound(f"chosen: {backend.value} with kernel class {kernel.__name__}")


def _machine() -> dict[str, Any]:
    """The environment of dgx-vllm's users: FlashInfer is installed and asked for."""
    envs = SimpleNamespace(
        is_set=lambda name: name == "VLLM_USE_FLASHINFER_MOE_FP4",
        VLLM_USE_FLASHINFER_MOE_FP4=True,
        VLLM_BATCH_INVARIANT=False,
        VLLM_TEST_FORCE_FP8_MARLIN=False,
    )
    return {
        "vllm.envs": envs,
        "vllm.utils.flashinfer.has_flashinfer_cutlass_fused_moe": lambda: True,
    }


def _blackwell(platform: Any, capability: Any) -> Any:
    """A GPU of capability 12.0; the questions about it are answered by the tree's Platform."""

    class Blackwell(platform):
        device_name = "SM120"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return capability(12, 0)

        def is_cuda(self) -> bool:
            return True

        def is_cuda_alike(self) -> bool:
            return True

        @classmethod
        def fp8_dtype(cls) -> Any:
            import torch

            return torch.float8_e4m3fn

    return Blackwell()


class _Options(SimpleNamespace):
    """Configuration in which every option that is not named is off, those of later releases too."""

    def __getattr__(self, name: str) -> None:
        return None


def _moe_config(sources: Sources) -> Any:
    """A gated MoE on one GPU, as the functions that choose look at it."""
    activation: Any = "silu"
    if sources.has(f"{FUSED_MOE}.activation.MoEActivation"):
        activation = sources.load(f"{FUSED_MOE}.activation.MoEActivation").SILU
    return _Options(
        moe_parallel_config=_Options(dp_size=1, ep_size=1, tp_size=1),
        routing_method=sources.load(f"{FUSED_MOE}.config.RoutingMethodType").Renormalize,
        activation=activation,
        is_act_and_mul=True,
        moe_backend="auto",
        hidden_dim=2048,
    )

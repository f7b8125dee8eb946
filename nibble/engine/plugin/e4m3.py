"""E4M3 experts in nibble's GPU kernel, with activations in BF16, for each of vLLM's FP8 methods.

vLLM's methods round activations to E4M3 on GPUs that multiply it. nibble's take their place only
where moe_kernel is "nibble".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from nibble_kernels.nvfp4_moe import activation_of
from nibble_kernels.nvfp4_moe.e4m3 import E4m3Experts, e4m3_weight_moe, prepare_e4m3_experts
from torch import Tensor
from torch.nn import Parameter
from vllm import envs
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as vllm_compressed,
)

from nibble.engine.contract import GPU_E4M3_EXPERTS, reported_as
from nibble.engine.plugin.cuda import WEIGHTS, runs_here
from nibble.engine.plugin.experts import local_ids, swiglu
from nibble.engine.plugin.layers import check_loaded, mark_unloaded
from nibble.engine.plugin.options import current_options, weights_are_real
from nibble.engine.plugin.require import VllmMismatch, replace, required, required_of_instances

WHERE = "by nibble's GPU kernel of E4M3 experts"


class _E4m3Method(FusedMoEMethodBase):
    """nibble::e4m3_weight_moe, W8A16. The weights are rearranged once, when they are loaded.

    gate and up keep separate scales. Subclasses have the checkpoints' names of tensors.
    """

    supports_pre_processed_weights = False
    scale_name = "weight_scale"
    block: tuple[int, int] | None = None

    def _start(self, moe: FusedMoEConfig) -> None:
        """Replaces vLLM's constructors, which choose among vLLM's kernels. Raises ValueError."""
        FusedMoEMethodBase.__init__(self, moe)
        supported, reason = runs_here()
        if not supported:
            raise ValueError(f"nibble's E4M3 experts cannot run: {reason}")
        if moe.moe_backend != "auto":
            raise ValueError(
                f"--moe-backend {moe.moe_backend} and nibble's E4M3 experts were both asked for"
            )
        if envs.VLLM_BATCH_INVARIANT:
            raise ValueError(
                "VLLM_BATCH_INVARIANT rules out nibble's E4M3 experts: the order of their sums"
                " depends on the number of tokens"
            )
        if moe.has_bias:
            raise ValueError(f"experts with biases are not supported {WHERE}")
        self.is_real = weights_are_real()

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        create: Any = super().create_weights  # vLLM's, of the other base
        create(layer, *args, **kwargs)
        mark_unloaded(layer, *(f"{name}_{self.scale_name}" for name in WEIGHTS))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace weights and scales by those of prepare_e4m3_experts. Raises ValueError for
        experts that the kernel does not support.
        """
        if self.is_real:
            check_loaded(layer, *(f"{name}_{self.scale_name}" for name in WEIGHTS))
        self._check_formula(layer)
        self.rows: dict[str, int] = {}
        for name, parts in zip(WEIGHTS, (2, 1), strict=True):
            weight = getattr(layer, f"{name}_weight").data
            scale = getattr(layer, f"{name}_{self.scale_name}").data
            found = prepare_e4m3_experts(weight, scale, block=self.block, parts=parts)
            tensors = {"weight": found.codes, "tile_scale": found.scales}
            tensors["global_scale"] = found.global_scales
            if found.row_scales is not None:
                tensors["row_scale"] = found.row_scales
            for part, tensor in tensors.items():
                setattr(layer, f"{name}_{part}", Parameter(tensor, requires_grad=False))
            delattr(layer, f"{name}_{self.scale_name}")
            self.rows[name] = found.rows

    def _check_formula(self, layer: Any) -> None:
        dtype = getattr(layer, "orig_dtype", torch.bfloat16)
        if dtype != torch.bfloat16:
            raise ValueError(f"experts in {dtype} are not supported {WHERE}; expected bfloat16")
        limits = [swiglu(layer, self.moe, name) for name in ("limit", "alpha", "beta")]
        found = activation_of(layer.activation.value, *limits)
        is_plain = found == activation_of("silu", None, None, None)
        if layer.apply_router_weight_on_input or not is_plain:
            raise ValueError(
                f"experts with {layer.activation.value} are not supported {WHERE}; expected silu"
                " without limits, with the router's weights on the output"
            )

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *shared: object,
        **rest: object,
    ) -> Tensor:
        """The sum of the routed experts."""
        w13, w2 = (self._experts(layer, name) for name in WEIGHTS)
        return e4m3_weight_moe(x, topk_weights, local_ids(layer, topk_ids), w13, w2)

    def _experts(self, layer: Any, name: str) -> E4m3Experts:
        codes, scales, factors = (
            getattr(layer, f"{name}_{part}") for part in ("weight", "tile_scale", "global_scale")
        )
        row_scales = getattr(layer, f"{name}_row_scale", None)
        return E4m3Experts(codes, scales, factors, row_scales, self.rows[name])

    @property
    def supports_eplb(self) -> bool:
        """False: vLLM refuses EPLB by the name of the method."""
        return False

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: only vLLM's kernels use it."""


@reported_as(GPU_E4M3_EXPERTS[0])
class NibbleModelOptFp8MoE(_E4m3Method, modelopt.ModelOptFp8MoEMethod):
    """Experts of ModelOpt checkpoints with a scale for each weight."""

    def __init__(
        self, quant_config: modelopt.ModelOptFp8Config, moe_config: FusedMoEConfig
    ) -> None:
        self.quant_config = quant_config
        self._start(moe_config)


@reported_as(GPU_E4M3_EXPERTS[1])
class NibbleFp8MoE(_E4m3Method, fp8.Fp8MoEMethod):
    """Experts of FP8 checkpoints as DeepSeek's, and of ModelOpt's with blocks: a scale for each
    weight, or for blocks of it.
    """

    def __init__(self, quant_config: fp8.Fp8Config, layer: Any) -> None:
        self.quant_config = quant_config
        self._start(layer.moe_config)
        blocks = quant_config.weight_block_size
        self.weight_block_size = self.moe_block_shape = blocks
        self.block_quant = blocks is not None
        self.weight_scale_refine = None  # blocks that ranks would share are refused
        self.weight_scale_name = "weight_scale_inv" if self.block_quant else "weight_scale"
        self.scale_name = self.weight_scale_name
        if blocks is not None:
            self.block = (blocks[0], blocks[1])


@reported_as(GPU_E4M3_EXPERTS[2])
class NibbleCompressedTensorsFp8MoE(_E4m3Method, vllm_compressed.CompressedTensorsW8A8Fp8MoEMethod):
    """Experts of compressed-tensors checkpoints: a scale for each weight, row or block."""

    def __init__(
        self,
        weight_quant: Any,
        input_quant: Any,
        moe: FusedMoEConfig,
        layer_name: str | None = None,
    ) -> None:
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self._start(moe)
        self.static_input_scales = not input_quant.dynamic
        blocks = weight_quant.block_structure
        self.block_quant, self.weight_block_size = blocks is not None, blocks
        if blocks is not None:
            self.block = (blocks[0], blocks[1])


def install_experts() -> None:
    """Let vLLM build nibble's methods where moe_kernel is "nibble". Raises VllmMismatch."""
    _install(
        NibbleModelOptFp8MoE,
        ((modelopt, "ModelOptFp8MoEMethod"), (modelopt.ModelOptFp8Config, "FusedMoEMethodCls")),
        ("self", "quant_config", "moe_config"),
    )
    # modelopt has imported the name.
    places = ((fp8, "Fp8MoEMethod"), (modelopt, "Fp8MoEMethod"))
    _install(NibbleFp8MoE, places, ("self", "quant_config", "layer"))
    _install(
        NibbleCompressedTensorsFp8MoE,
        ((vllm_compressed, "CompressedTensorsW8A8Fp8MoEMethod"),),
        ("self", "weight_quant", "input_quant", "moe"),
    )


def _install(ours: type, places: Iterable[tuple[Any, str]], parameters: tuple[str, ...]) -> None:
    """Replace the names of one method, which all must be the same class."""
    theirs = ours.__mro__[2]
    required(theirs, "__init__", *parameters)
    required(theirs, "create_weights")
    required(theirs, "process_weights_after_loading", "self", "layer")
    required_of_instances(theirs, "moe", "fp8_backend")

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if current_options().moe_kernel == "nibble":
            return ours(*args, **kwargs)
        return object.__new__(cls)

    chosen = type(theirs.__name__, (theirs,), {"__new__": new, "__doc__": theirs.__doc__})
    for owner, name in places:
        if replace(owner, name, chosen) is not theirs:
            raise VllmMismatch(f"{name} of {owner.__name__} is not {theirs.__name__}")

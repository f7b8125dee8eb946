"""nibble's GPU kernels for NVFP4 weights and unquantized activations, as vLLM linear layers and
experts.
"""

from __future__ import annotations

from typing import Any

import torch
from nibble_kernels.library import load
from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear
from nibble_kernels.nvfp4_linear.norm_linear import LinearLayer
from nibble_kernels.nvfp4_linear.weight import PreparedWeight, prepare_weight, wants_native
from nibble_kernels.nvfp4_moe import Activation, activation_of
from nibble_kernels.nvfp4_moe.gpu import nvfp4_weight_moe
from nibble_kernels.nvfp4_moe.grouped import FUNCTIONS, MAX_EXPERTS
from nibble_kernels.nvfp4_moe.weight import PreparedExperts, prepare_experts
from nibble_kernels.nvfp4_sparse import SparseWeight, nvfp4_sparse_weight_linear
from torch import Tensor
from torch.nn import Parameter
from vllm import envs
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.platforms import current_platform

from nibble.engine.contract import GPU_EXPERTS, GPU_LINEAR, reported_as
from nibble.engine.plugin.experts import (
    CompressedTensorsExperts,
    Experts,
    ModelOptExperts,
    local_ids,
    swiglu,
)
from nibble.engine.plugin.layers import check_loaded
from nibble.engine.plugin.options import current_options
from nibble.engine.plugin.sparse import keep_experts_dense, pack_if_sparse

WEIGHTS = ("w13", "w2")
JOINED = "nibble_shared_expert"  # of vLLM's routed experts: shared_expert.JoinedExpert


def runs_here() -> tuple[bool, str | None]:
    """Whether nibble's kernels run on this GPU, and the reason if not."""
    if not current_platform.is_cuda() or not current_platform.has_device_capability(90):
        return False, "it needs an NVIDIA GPU of compute capability 9.0 or later"
    state = load().get("cuda", "not compiled")
    return state == "compiled", f"nibble-kernels: CUDA {state}"


def require_ours(kernel: str, keeps_format: bool, backend: str) -> None:
    """Raise ValueError if nibble's kernel cannot run, would change a layer's arithmetic, or
    conflicts with `backend`, the flag for another kernel. keeps_format: the kernel's activations
    have the layer's format.
    """
    supported, reason = runs_here()
    if not supported:
        raise ValueError(f"nibble's NVFP4 {kernel} cannot run: {reason}")
    if not keeps_format and current_platform.has_device_capability(100):
        raise ValueError(
            f"nibble's NVFP4 {kernel} leaves activations in BF16, and this GPU multiplies them in"
            " FP4; set nvfp4_activations to bf16"
        )
    if backend:
        raise ValueError(f"{backend} and nibble's NVFP4 {kernel} were both asked for")


@reported_as(GPU_LINEAR)
class NibbleNvFp4LinearKernel(NvFp4LinearKernel):
    """nibble::nvfp4_weight_linear. The weight is rearranged once, when it is loaded.

    W4A16, also for a layer with input scales in the checkpoint, like vLLM's Marlin and Humming.
    Applies `weight_column_scale`, float32 [N], if the layer has it. With VLLM_BATCH_INVARIANT=1 a
    row's result does not depend on the number of rows.
    """

    fuses_column_scale = True
    is_sparse = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return runs_here()

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace codes and scales by those of prepare_weight, or of pack_sparse with the option
        sparse_fp4. Raises ValueError if the number of rows is not a multiple of 8.
        """
        codes = layer.weight.data
        dtype = getattr(layer, "params_dtype", torch.get_default_dtype())
        self.global_scale = float(layer.weight_global_scale)
        if current_options().sparse_fp4 == "on" and (sparse := pack_if_sparse(layer, dtype)):
            layer.weight = Parameter(sparse.codes, requires_grad=False)
            layer.weight_places = Parameter(sparse.places, requires_grad=False)
            layer.weight_scale = Parameter(sparse.scales, requires_grad=False)
            self.rows, self.native, self.is_sparse = sparse.rows, sparse.native, True
            return
        prepared = prepare_weight(codes, layer.weight_scale.data, wants_native(dtype, codes.device))
        layer.weight = Parameter(prepared.codes, requires_grad=False)
        layer.weight_scale = Parameter(prepared.scales, requires_grad=False)
        self.rows, self.native = prepared.rows, prepared.native

    def apply_weights(
        self,
        layer: Any,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
        silu_mul: bool = False,
    ) -> Tensor:
        """x [..., K] to [..., N], or to [..., N/2] with silu_mul, plus a residual of that shape.
        Sparse weights take no residual.
        """
        options: dict[str, Any] = {
            "column_scale": getattr(layer, "weight_column_scale", None),
            "bias": bias,
            "silu_mul": silu_mul,
            "batch_invariant": envs.VLLM_BATCH_INVARIANT,
        }
        codes, scales = layer.weight, layer.weight_scale
        if self.is_sparse:
            sparse = SparseWeight(codes, layer.weight_places, scales, self.rows, self.native)
            return nvfp4_sparse_weight_linear(x, sparse, self.global_scale, **options)
        weight = PreparedWeight(codes, scales, self.rows, self.native)
        return nvfp4_weight_linear(x, weight, self.global_scale, residual=residual, **options)

    def after_norm(self, layer: Any) -> LinearLayer | None:
        """What nvfp4_norm_linear and nvfp4_norm_mlp take of the layer; None for sparse weights."""
        if self.is_sparse:
            return None
        weight = PreparedWeight(layer.weight, layer.weight_scale, self.rows, self.native)
        column_scale = getattr(layer, "weight_column_scale", None)
        return LinearLayer(weight, self.global_scale, column_scale, layer.bias)


class GpuExperts(Experts):
    """nibble::nvfp4_weight_moe, W4A16. The weights are rearranged once, when they are loaded."""

    where = "by nibble's GPU kernel"
    takes_biases = True
    in_fp4 = False  # activations

    def prepare(
        self, layer: Any, global_scales: tuple[Tensor, Tensor], input_scales: tuple[Tensor, Tensor]
    ) -> None:
        """Replace codes and scales by those of prepare_experts. Raises ValueError for experts that
        the kernel does not support.
        """
        if envs.VLLM_BATCH_INVARIANT:
            raise ValueError(
                "VLLM_BATCH_INVARIANT rules out nibble's NVFP4 experts: the order of their sums"
                " depends on the number of tokens"
            )
        backend = self.moe.moe_backend
        flag = "" if backend == "auto" else f"--moe-backend {backend}"
        require_ours("experts", self.use_a16 or self.in_fp4, flag)
        dtype = getattr(layer, "params_dtype", torch.get_default_dtype())
        self.activation = self._activation(layer)
        if self.moe.has_bias:
            self._prepare_biases(layer)
        if dtype != torch.bfloat16:
            raise ValueError(
                f"experts in {dtype} are not supported {self.where}; expected bfloat16"
            )
        if current_options().sparse_fp4 == "on":
            keep_experts_dense(layer, {name: getattr(layer, f"{name}_weight") for name in WEIGHTS})
        native = self.in_fp4 or wants_native(dtype, layer.w13_weight.device)
        self.rows: dict[str, int] = {}
        for name, scales in zip(WEIGHTS, global_scales, strict=True):
            codes, blocks = (
                getattr(layer, f"{name}_{part}").data for part in ("weight", "weight_scale")
            )
            if name == "w13" and self.activation.interleaved:
                codes, blocks = _halves(codes), _halves(blocks)
            experts = prepare_experts(codes, blocks, scales.data, native)
            parts = {
                "weight": experts.codes,
                "weight_scale": experts.scales,
                "global_scale": experts.global_scales,
            }
            for part, tensor in parts.items():
                setattr(layer, f"{name}_{part}", Parameter(tensor, requires_grad=False))
            self.rows[name] = experts.rows
        self.native = native

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The sum of the routed experts, and of the shared one where they compute it: then
        shared_experts_input has its weights. Else vLLM's runner computes it (vllm 0.32
        moe_runner.py:617).
        """
        joined = None if shared_experts_input is None else getattr(layer, JOINED, None)
        return nvfp4_weight_moe(
            x,
            topk_weights,
            local_ids(layer, topk_ids),
            self._experts(layer, "w13"),
            self._experts(layer, "w2"),
            w13_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            shared=joined and joined.of(shared_experts_input),
            **self.formula,
        )

    def _activation(self, layer: Any) -> Activation:
        """Raises ValueError for one that no kernel here computes."""
        limits = [swiglu(layer, self.moe, name) for name in ("limit", "alpha", "beta")]
        found = activation_of(layer.activation.value, *limits)
        is_plain = found == activation_of("silu", None, None, None) and not self.moe.has_bias
        if layer.apply_router_weight_on_input or (
            not is_plain
            and (
                found.function not in FUNCTIONS
                or current_platform.get_device_capability() != (9, 0)
                or len(layer.w13_weight) > MAX_EXPERTS
            )
        ):
            raise ValueError(
                f"experts with {layer.activation.value} are not supported {self.where}; expected"
                f" silu, or on SM90 also {' or '.join(FUNCTIONS[1:])}, limits or biases, with the"
                " router's weights on the output"
            )
        return found

    def _prepare_biases(self, layer: Any) -> None:
        """w2's on one rank alone: vLLM adds the ranks' results up."""
        check_loaded(layer, "w13_bias", "w2_bias")
        if self.activation.interleaved:
            layer.w13_bias.data = _halves(layer.w13_bias.data)
        if self.moe.tp_rank != 0:
            layer.w2_bias.data.zero_()

    @property
    def formula(self) -> dict[str, Any]:
        values = self.activation._asdict()
        del values["interleaved"]  # not in the prepared weight
        return values

    def _experts(self, layer: Any, name: str) -> PreparedExperts:
        codes, scales, factors = (
            getattr(layer, f"{name}_{part}") for part in ("weight", "weight_scale", "global_scale")
        )
        return PreparedExperts(codes, scales, factors, self.rows[name], self.native)


def _halves(rows: Tensor) -> Tensor:
    """Gate's rows and then up's, of experts [E, 2I, ...] that have them in turns."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


@reported_as(GPU_EXPERTS[0])
class NibbleModelOptNvFp4MoE(GpuExperts, ModelOptExperts):
    """Experts of ModelOpt checkpoints in nibble's GPU kernel."""


@reported_as(GPU_EXPERTS[1])
class NibbleCompressedTensorsNvFp4MoE(GpuExperts, CompressedTensorsExperts):
    """Experts of compressed-tensors checkpoints in nibble's GPU kernel."""


WEIGHT_ONLY = (NibbleModelOptNvFp4MoE, NibbleCompressedTensorsNvFp4MoE)

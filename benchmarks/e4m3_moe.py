"""A layer of E4M3 experts with scales of 128 x 128 blocks: nibble's kernel, with activations in
BF16, beside vLLM's Triton kernel, which rounds activations to E4M3, and its Marlin.

    python benchmarks/e4m3_moe.py --out FILE [--shapes 30b-a3b 35b-a3b] [--tokens 1 2 4 8 16]

From the router's choices to the sum, with vLLM's own layers. `error` is |y - right| / |right|
against float64. Each call of a CUDA graph has another routing; the graphs replay alternately, and
the median counts. Bytes are those of the experts in use with their scales. The read bandwidth is
torch.sum's over 2 GiB in the same run.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine
from nibble_kernels.nvfp4_moe.e4m3 import e4m3_weight_moe, prepare_e4m3_experts
from nvfp4_linear import interleaved, read_bandwidth
from nvfp4_moe import SHAPES, Routing, Shape, routings
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

BLOCK = 128
THEIRS = ("triton", "marlin")
Layer = Callable[[Tensor, Routing], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["30b-a3b", "35b-a3b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options = parser.parse_args()
    torch.manual_seed(0)
    read = read_bandwidth()
    results: list[dict[str, Any]] = []
    described = {
        "machine": machine(),
        "read_gb_per_s": round(read / 1e9),
        "command": sys.argv,
        "results": results,
    }
    for name in options.shapes:
        weights = Weights(SHAPES[name])
        layers = weights.layers()
        for tokens in options.tokens:
            results.append({"shape": name} | measure(weights, layers, tokens, read))
            print(json.dumps(results[-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(described, indent=1) + "\n")


class Weights:
    """Random experts as a checkpoint has them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
        self.values = [
            (torch.randn(shape.experts, *size, device="cuda") * 64).to(torch.float8_e4m3fn)
            for size in sizes
        ]
        self.scales = [
            (torch.rand(shape.experts, rows // BLOCK, columns // BLOCK, device="cuda") + 0.5) / 2048
            for rows, columns in sizes
        ]

    def layers(self) -> dict[str, Layer]:
        w13, w2 = (
            prepare_e4m3_experts(values, scales, block=(BLOCK, BLOCK), parts=parts)
            for values, scales, parts in zip(self.values, self.scales, (2, 1), strict=True)
        )
        ours: Layer = lambda x, routing: e4m3_weight_moe(  # noqa: E731
            x, routing.weights, routing.ids, w13, w2
        )
        return {"nibble": ours} | {name: self._vllm(name) for name in THEIRS}

    def _vllm(self, backend: str) -> Layer:
        """vLLM's layer with this --moe-backend, without nibble's plugin."""
        from nibble.trials.worker.vllm_layers import config_of, enter_world

        enter_world("cuda")
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config
        from vllm.v1.worker import workspace

        device, shape = torch.device("cuda"), self.shape
        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(device)
        config = copy.deepcopy(config_of("auto"))
        config.kernel_config.moe_backend = backend
        with set_current_vllm_config(config), device:
            runner = FusedMoEFactory(
                shape.experts,
                shape.topk,
                shape.hidden,
                shape.intermediate,
                params_dtype=torch.bfloat16,
                quant_config=Fp8Config(True, "dynamic", [], [BLOCK, BLOCK]),
                prefix=f"experts.{backend}.{shape.experts}.{shape.intermediate}",
                activation="silu",
                ckpt_names=("gate_proj", "down_proj", "up_proj"),
            )
            layer: Any = runner.routed_experts
            for name, values, scales in zip(("w13", "w2"), self.values, self.scales, strict=True):
                getattr(layer, f"{name}_weight").data.copy_(values)
                getattr(layer, f"{name}_weight_scale_inv").data.copy_(scales)
            method = layer.quant_method
            method.process_weights_after_loading(layer)
        ran = method.fp8_backend.name.lower()
        if ran != backend:
            raise SystemExit(f"error: vLLM took {ran} for --moe-backend {backend}")
        dtype = method.topk_indices_dtype or torch.int32

        def call(x: Tensor, routing: Routing) -> Tensor:
            with set_current_vllm_config(config):
                ids = routing.ids.to(dtype)
                return method.apply(layer, x, routing.weights.float(), ids, None, None)

        return call

    def right(self, x: Tensor, routing: Routing) -> Tensor:
        """The sum in float64."""
        out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for expert in routing.ids.unique().tolist():
            token, place = (routing.ids == expert).nonzero(as_tuple=True)
            w13, w2 = (
                values[expert].double()
                * scales[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                for values, scales in zip(self.values, self.scales, strict=True)
            )
            gate, up = (x[token].double() @ w13.T).chunk(2, dim=-1)
            y = (torch.nn.functional.silu(gate) * up) @ w2.T
            out.index_add_(0, token, y * routing.weights[token, place].double()[:, None])
        return out


def measure(weights: Weights, layers: dict[str, Layer], tokens: int, read: float) -> dict[str, Any]:
    """One row: errors, µs of each implementation, nibble's share of the read bandwidth, ratios."""
    shape = weights.shape
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    some = routings(shape, tokens, 0.0)
    right = weights.right(x, some[0])
    errors = {
        name: float((layer(x, some[0]).double() - right).norm() / right.norm())
        for name, layer in layers.items()
    }
    times = interleaved(
        {name: [partial(layer, x, one) for one in some] for name, layer in layers.items()}
    )
    used = sum(one.used for one in some) / len(some)
    own = times["nibble"]
    nbytes = used * 3 * shape.hidden * shape.intermediate * (1 + 4 / BLOCK**2)
    return {
        "tokens": tokens,
        "experts_in_use": round(used, 1),
        "error": {name: round(error, 5) for name, error in errors.items()},
        "us": {name: round(time * 1e6, 2) for name, time in times.items()},
        "percent_of_read": round(100 * nbytes / own / read, 1),
        "ratio": {name: round(time / own, 2) for name, time in times.items() if name != "nibble"},
    }


if __name__ == "__main__":
    main()

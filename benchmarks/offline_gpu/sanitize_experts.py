"""A layer of experts in every form, a linear layer in every tile, and an MLP and all between two
attentions with their norms, on small batches, for compute-sanitizer:

    compute-sanitizer --tool memcheck python benchmarks/offline_gpu/sanitize_experts.py
"""

from __future__ import annotations

import torch

from tests.kernels.test_nvfp4_moe_linear import (
    FEW,
    FORMS,
    MOST_FEW_PAIRS,
    SILU,
    Layer,
    assert_close,
    routed,
)
from tests.support.kernels.kernel_cases import activations, packed_weight, values_of

SHAPES = ((6, 3, 144, 80), (60, 4, 528, 272))
TILES = (
    *((16, 192), (16, 256), (32, 192), (32, 256), (64, 192)),
    *((128, 128), (128, 192), (128, 256)),
)
GLOBAL_SCALE = 1.23e-4


def main() -> None:
    for shape in SHAPES:
        layer = Layer(shape, True, "cuda")
        for tokens in (1, 7, 40):
            given = routed("others", tokens, shape, "cuda")
            exact = layer.exact(given, SILU, (None, None))
            few = FEW if tokens * shape[1] <= MOST_FEW_PAIRS else ()
            for form in (0, *few, *FORMS):
                assert_close(layer.run(given, form=form), exact)
        print(f"experts {shape}: right", flush=True)
    linear()
    after_norms()


def linear() -> None:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_decode_linear, nvfp4_warpgroup_linear
    from nibble_kernels.nvfp4_linear.weight import prepare_weight

    codes, scales = packed_weight(520, 656)
    weight = prepare_weight(codes.cuda(), scales.cuda(), native=False)
    values = values_of(codes, scales)
    for rows in (1, 7, 16):
        x = activations(rows, 656, torch.bfloat16)
        check(nvfp4_decode_linear(x.cuda(), weight, GLOBAL_SCALE), x, values)
    for tile in TILES:
        for division in ((*tile, 0, 1), (*tile, 2, 1)):  # whole units, equal ranges
            x = activations(133, 656, torch.bfloat16)
            found = nvfp4_warpgroup_linear(x.cuda(), weight, GLOBAL_SCALE, division=division)
            check(found, x, values)
    print("linear layers: right", flush=True)


def after_norms() -> None:
    from nibble_kernels.nvfp4_linear.gpu import nvfp4_weight_linear
    from nibble_kernels.nvfp4_linear.norm_linear import (
        LinearLayer,
        Norm,
        nvfp4_between_attentions,
        nvfp4_norm_mlp,
    )
    from nibble_kernels.nvfp4_linear.weight import prepare_weight
    from nibble_kernels.rms_norm import rms_norm

    def layer(rows: int, columns: int) -> LinearLayer:
        codes, scales = packed_weight(rows, columns)
        return LinearLayer(prepare_weight(codes.cuda(), scales.cuda(), native=False), GLOBAL_SCALE)

    o, gate_up, down, qkv = layer(256, 272), layer(768, 256), layer(256, 384), layer(520, 256)
    norm = Norm(torch.ones(256, dtype=torch.bfloat16, device="cuda"), 1e-6)
    for rows in (1, 12, 24, 48, 133):
        x = torch.randn(rows, 256, device="cuda").bfloat16()
        attended = torch.randn(rows, 272, device="cuda").bfloat16()

        def mlp(x: torch.Tensor) -> torch.Tensor:
            between = nvfp4_weight_linear(rms_norm(x, *norm), *gate_up[:2], silu_mul=True)
            return nvfp4_weight_linear(between, *down[:2], residual=x)

        close(nvfp4_norm_mlp(x, norm, gate_up, down), mlp(x))
        stream = mlp(nvfp4_weight_linear(attended, *o[:2], residual=x))
        parts = (o, norm, gate_up, down, norm, qkv)
        found, found_qkv = nvfp4_between_attentions(attended, x, *parts)
        close(found, stream)
        close(found_qkv, nvfp4_weight_linear(rms_norm(stream, *norm), *qkv[:2]))
    print("products after norms: right", flush=True)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).float().norm() <= expected.float().norm() * 2.0**-7


def check(found: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
    exact = GLOBAL_SCALE * x.double() @ values.double().T
    assert (found.cpu().double() - exact).abs().max() <= exact.abs().max() * 2.0**-7


if __name__ == "__main__":
    main()

"""What the benchmarks of computed references say of a run: models whose every part does
something, and why a process ended.
"""

from __future__ import annotations

import pytest
import torch
from reference_families import FAMILIES, fill_zeros
from reference_faults import error_in
from torch import nn


def test_zeros_become_random_numbers_and_the_rest_stays() -> None:
    """All experts of a router of zeros are equally good, and each top-k takes others."""
    router, norm = nn.Linear(16, 8), nn.LayerNorm(16)
    nn.init.zeros_(router.weight)
    norm.register_buffer("e_score_correction_bias", torch.zeros(8))
    norm.register_buffer("positions", torch.zeros(8, dtype=torch.int64))
    model, kept = nn.Sequential(router, norm), router.bias.clone()
    fill_zeros(model, 0.06)
    assert 0.03 < float(router.weight.detach().std()) < 0.1
    assert norm.bias.all() and norm.get_buffer("e_score_correction_bias").all()
    assert torch.equal(router.bias, kept) and norm.weight.eq(1).all()
    assert not norm.get_buffer("positions").any()


def test_linear_attention_has_heads_that_kernels_of_gpus_take() -> None:
    """FlashInfer's kernel for SM90: DSL kernel only supports D=128, got 64."""
    widths = {
        one["linear_key_head_dim"] for one in FAMILIES.values() if "linear_key_head_dim" in one
    }
    assert widths == {128}


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (
            "INFO started\n[rank0]: Traceback\n[rank0]: ValueError: Head dimension 96\n",
            "ValueError: Head dimension 96",
        ),
        (
            (
                "(EngineCore pid=7) ERROR 11-23 [core.py:9] AssertionError\nRuntimeError: Engine"
                " core failed\n"
            ),
            "AssertionError",
        ),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory\n",
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
        ),
        ("loading\nKilled\n", "Killed"),
        ("", "no word"),
    ],
)
def test_the_first_error_of_a_log_is_the_reason(log: str, why: str) -> None:
    assert error_in(log) == why

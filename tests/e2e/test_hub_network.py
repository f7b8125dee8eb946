"""Against the real Hub: run where the internet is, deselected elsewhere."""

from __future__ import annotations

import pytest

from nibble.plan.gather import plan_for, read_wishes

pytestmark = pytest.mark.network


@pytest.mark.parametrize(
    ("model", "scheme"), [("Qwen/Qwen3-0.6B", "bf16"), ("nvidia/Qwen3-8B-NVFP4", "NVFP4")]
)
def test_a_plan_reads_sizes_from_headers_on_the_hub(model: str, scheme: str) -> None:
    found = plan_for(read_wishes([model, "--target", "gb10"], {}))
    assert found.checkpoint is not None and found.checkpoint.scheme.name == scheme
    assert found.budget.weights_bytes and found.bound.tokens_per_s

"""The bounds that docs/nvfp4.md states: how far the demo's log-probabilities are from float32
arithmetic on the same weights.
"""

from __future__ import annotations

import nvfp4_logits
import pytest
import torch

from tests.support.changes import OPERATORS

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
DENSE = "nibble-demo-nvfp4"


# On two ranks each merges its own shards of layers whose parts have unequal scales.
@pytest.mark.parametrize(
    "name",
    [
        "nibble on the CPU, W4A4",
        pytest.param("nibble on the CPU, W4A16", marks=pytest.mark.slow),
        pytest.param("nibble on the CPU, W4A16, two ranks", marks=pytest.mark.slow),
        pytest.param("nibble on the CPU, W4A4, two ranks", marks=pytest.mark.slow),
    ],
)
def test_a_path_of_the_cpu_is_within_its_bound(name: str) -> None:
    found = nvfp4_logits.run_path(DENSE, name)
    assert isinstance(found, torch.Tensor), found
    activations = nvfp4_logits.PATHS[name].activations
    wanted = nvfp4_logits.reference(DENSE, activations)
    divergence = nvfp4_logits.compare(found, wanted)["mean_kl_nats"]
    assert divergence < nvfp4_logits.BOUNDS_NATS[DENSE, activations]

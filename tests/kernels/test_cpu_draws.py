"""Random tokens on the CPU platform: vLLM's, with and without seeds."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
import torch
from nibble_kernels import implementations

if TYPE_CHECKING:
    from vllm.config.model import LogprobsMode

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_draws")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(implementations()["cpu"] != "compiled", reason="vLLM's operator computes"),
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("with_top", [False, True])
def test_tokens_and_log_probs_are_those_of_vllm(
    with_top: bool, mode: LogprobsMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    theirs_forward = inspect.unwrap(TopKTopPSampler.forward_cpu)  # the plugin may be loaded
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", theirs_forward)
    theirs = TopKTopPSampler(mode)
    plugin.draw_with_few_exponentials()
    ours = TopKTopPSampler(mode)
    assert ours.forward.__func__ is not theirs.forward.__func__
    torch.manual_seed(0)
    logits = torch.randn(50, 3000) * 3
    k = torch.full((50,), 20, dtype=torch.int32) if with_top else None
    p = torch.full((50,), 0.9) if with_top else None
    found = []
    for sampler in (theirs, ours):
        torch.manual_seed(1)
        generators = {row: torch.Generator().manual_seed(row) for row in (3, 40)}
        tokens, returned = [], None
        for _ in range(3):
            drawn, returned = sampler(logits.clone(), generators, k, p)
            tokens.append(drawn)
        found.append((torch.stack(tokens), returned))
    (tokens, returned), (our_tokens, our_returned) = found
    assert torch.equal(our_tokens, tokens) and len(tokens.unique()) > 50
    assert (returned is None) == (our_returned is None) == (mode == "raw_logprobs")
    assert returned is None or torch.equal(our_returned, returned)

"""The whole sampler on the CPU platform: a batch of different requests has vLLM's tokens."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from nibble_kernels import implementations

pytest.importorskip("vllm")
pytest.importorskip("nibble.engine.plugin.cpu_draws")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(implementations()["cpu"] != "compiled", reason="vLLM's operators compute"),
]
VOCABULARY = 5000
REQUESTS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 1.0},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.3, "top_p": 0.05, "seed": 5, "frequency_penalty": -1.0},
]


def metadata(step: int) -> Any:
    """vLLM's of one request a row, after `step` tokens each."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def each(name: str, default: float) -> torch.Tensor:
        return torch.tensor([float(request.get(name, default)) for request in REQUESTS])

    seeds = {row: int(one["seed"]) + step for row, one in enumerate(REQUESTS) if "seed" in one}
    rows = len(REQUESTS)
    torch.manual_seed(step)
    return SamplingMetadata(
        temperature=each("temperature", 1.0),
        all_greedy=False,
        all_random=False,
        top_p=each("top_p", 1.0),
        top_k=each("top_k", VOCABULARY).int(),
        generators={row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()},
        max_num_logprobs=3,
        no_penalties=False,
        prompt_token_ids=torch.randint(0, VOCABULARY + 1, (rows, 40)),
        frequency_penalties=each("frequency_penalty", 0.0),
        presence_penalties=each("presence_penalty", 0.0),
        repetition_penalties=each("repetition_penalty", 1.0),
        output_token_ids=torch.randint(0, VOCABULARY, (rows, step)).tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def greedy_of_vllm(logits: torch.Tensor) -> torch.Tensor:
    return torch.ops._C.greedy_argmax(logits)


def answers(sampler: Any) -> list[tuple[Any, Any]]:
    """Tokens and log-probs of some steps."""
    found = []
    for step in range(12):
        given = metadata(step)
        logits = torch.randn(len(REQUESTS), VOCABULARY) * 3
        torch.manual_seed(100 + step)
        out = sampler(logits, given)
        found.append((out.sampled_token_ids.tolist(), out.logprobs_tensors.logprobs.tolist()))
    return found


def test_a_batch_of_different_requests_has_the_tokens_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import penalties, topk_topp_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    from nibble.engine.plugin import cpu_draws, cpu_greedy, cpu_penalties, cpu_top_p

    current_platform.import_kernels()
    # Another test may have loaded the plugin in this process.
    top, random = topk_topp_sampler.apply_top_k_top_p_pytorch, TopKTopPSampler.forward_cpu
    theirs_of: list[tuple[Any, str, Any]] = [
        (Sampler, "greedy_sample", staticmethod(greedy_of_vllm)),
        (penalties, "apply_penalties", utils.apply_penalties),
        (topk_topp_sampler, "apply_top_k_top_p_pytorch", inspect.unwrap(top)),
        (TopKTopPSampler, "forward_cpu", inspect.unwrap(random)),
    ]
    for owner, name, value in theirs_of:
        monkeypatch.setattr(owner, name, value)
    theirs = answers(Sampler())
    cpu_draws.draw_with_few_exponentials()
    cpu_greedy.compare_in_vectors()
    cpu_penalties.change_few_logits()
    cpu_top_p.sort_few_logits()
    assert not any(vars(owner)[name] is value for owner, name, value in theirs_of)
    assert answers(Sampler()) == theirs
    tokens = {row[0] for step, _ in theirs for row in step}
    assert len(tokens) > 30

"""How many of the largest logits requests need on the CPU platform, and heads that keep vLLM's
product.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nibble_kernels import implementations

pytest.importorskip("vllm")
plugin = pytest.importorskip("nibble.engine.plugin.cpu_leading")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(implementations()["cpu"] != "compiled", reason="vLLM's operators compute"),
]
VOCABULARY = 200


def counts(temperatures: list[float], top_k: list[int] | None = None, **changes: Any) -> Any:
    """Of requests with these parameters, as vLLM describes them."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata

    rows, is_greedy = len(temperatures), not any(temperatures)
    processor = object.__new__(MinPLogitsProcessor)
    processor.min_p_count = changes.pop("min_p_count", 0)
    others = changes.pop("processors", [])
    scheduled = SimpleNamespace(has_structured_output_requests=changes.pop("has_grammar", False))
    given = {
        "temperature": None if is_greedy else torch.tensor(temperatures),
        "all_greedy": is_greedy,
        "all_random": all(temperatures),
        "top_p": None,
        "top_k": None if top_k is None else torch.tensor(top_k, dtype=torch.int32),
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(rows),
        "presence_penalties": torch.zeros(rows),
        "repetition_penalties": torch.ones(rows),
        "output_token_ids": [[]] * rows,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors([processor, *others]),
    }
    found = plugin.counts_of(SamplingMetadata(**given | changes), rows, scheduled)
    return None if found is None else found.tolist()


def test_greedy_requests_need_the_largest_logit() -> None:
    assert counts([0.0]) == [1]
    assert counts([0.0] * 4) == [1] * 4


def test_top_k_needs_its_own_number() -> None:
    assert counts([0.6], [20]) == [20]
    assert counts([0.6, 0.0, 1.0], [20, VOCABULARY, 3]) == [20, 1, 3]


def test_without_top_k_every_logit_counts() -> None:
    assert counts([0.6]) is None
    assert counts([0.6, 0.6], [20, 152_000]) is None


def test_many_rows_take_the_whole_product() -> None:
    assert counts([0.0] * (plugin.FEW_ROWS + 1)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [3]}},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.zeros(1, VOCABULARY, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[3]]}},
        {"min_p_count": 1},
        {"has_grammar": True},
        {"processors": [SimpleNamespace(is_argmax_invariant=lambda: False)]},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_else_changes_logits_takes_the_whole_product(change: dict[str, Any]) -> None:
    assert counts([0.0], **change) is None
    assert counts([0.6], [20], **change) is None


def sketched(weight: torch.Tensor, **processor: Any) -> Any:
    """The head's product of a model with this head."""
    usual = {"scale": 1.0, "soft_cap": None, "logits_as_input": False, "org_vocab_size": 150}
    model = SimpleNamespace(
        lm_head=SimpleNamespace(weight=weight, cpu_linear=plugin.head_product),
        logits_processor=SimpleNamespace(**usual | processor),
    )
    plugin.sketch_head(model)
    return model.lm_head.cpu_linear


def test_rows_of_padding_are_no_tokens() -> None:
    """With weights of 0 their logits could be the largest."""
    torch.manual_seed(0)
    weight, x = torch.randn(VOCABULARY, 64).abs().bfloat16(), -torch.rand(1, 64).bfloat16()
    weight[150:] = 0
    head = sketched(weight)
    head.counts = torch.tensor([1])
    found, exact = head(x, weight, None), plugin.head_product(x, weight, None)
    assert exact[0, :150].max() < 0
    assert found[0, :150].argmax() == exact[0, :150].argmax()


@pytest.mark.parametrize(
    ("weight", "processor"),
    [
        (torch.zeros(200, 64), {}),
        (torch.zeros(64, 200).bfloat16().T, {}),
        (torch.full((200, 64), float("nan")).bfloat16(), {}),
        (torch.zeros(200, 64).bfloat16(), {"scale": -1.0}),
        (torch.zeros(200, 64).bfloat16(), {"soft_cap": 30.0}),
        (torch.zeros(200, 64).bfloat16(), {"logits_as_input": True}),
    ],
    ids=["float32", "not contiguous", "NaN", "scaled", "soft cap", "no product"],
)
def test_other_heads_keep_their_product(weight: torch.Tensor, processor: dict[str, Any]) -> None:
    assert sketched(weight, **processor) is plugin.head_product


def test_products_without_counts_are_whole() -> None:
    """Prompts, log-probs and whatever asks the head outside of a decode step."""
    weight = torch.randn(150, 64).bfloat16()
    x = torch.randn(3, 64).bfloat16()
    head, whole = sketched(weight), plugin.head_product(x, weight, None)
    assert torch.equal(head(x, weight, None), whole)
    head.counts = torch.tensor([1])
    assert torch.equal(head(x, weight, None), whole)  # another number of rows


def test_the_plan_counts_copies_of_the_models_that_get_one() -> None:
    from nibble.engine.plugin.plain_decoders import CAUSAL_MODELS
    from nibble.plan.leading_head import ARCHITECTURES

    assert {model.__name__ for model in CAUSAL_MODELS} == ARCHITECTURES

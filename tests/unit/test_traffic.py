"""Rates and latencies of the status page, from /metrics as vLLM 0.32 writes it."""

from __future__ import annotations

import math

import pytest

from nibble.engine.metrics import samples, totals
from nibble.serve import traffic
from nibble.serve.traffic import NAMES, Reading, TrafficReader, Window, quantile


def page(
    generated: float, prompt: float = 0, kv: tuple[float, ...] = (0.25,), slow: int = 0
) -> str:
    """/metrics of as many engines as `kv` has values; `slow` first tokens took 0.05 to 0.1 s."""
    lines = []
    for number, share in enumerate(kv):
        at = f'engine="{number}",model_name="m"'
        lines += [
            f"vllm:generation_tokens_total{{{at}}} {generated / len(kv)}",
            f"vllm:prompt_tokens_total{{{at}}} {prompt / len(kv)}",
            f"vllm:num_requests_running{{{at}}} 2.0",
            f"vllm:num_requests_waiting{{{at}}} 1.0",
            f'vllm:num_requests_waiting_by_reason{{{at},reason="capacity"}} 9.0',
            f"vllm:kv_cache_usage_perc{{{at}}} {share}",
            f'vllm:request_success_total{{{at},finished_reason="stop"}} 3.0',
            f'vllm:request_success_total{{{at},finished_reason="length"}} 1.0',
        ]
    name = "vllm:time_to_first_token_seconds_bucket"
    for bound, count in (("0.05", 0), ("0.1", slow), ("+Inf", slow)):
        lines.append(f'{name}{{engine="0",le="{bound}"}} {count}')
    return "\n".join(lines) + "\n"


def reading(at_s: float, text: str) -> Reading:
    return Reading.of(at_s, samples(text, NAMES))


def test_totals_sum_over_engines_and_only_over_the_names() -> None:
    found = totals(page(40, kv=(0.1, 0.2)), ["vllm:num_requests_waiting"])
    assert found == {"vllm:num_requests_waiting": 2.0}


def test_text_that_is_not_prometheus_has_no_samples() -> None:
    assert samples("vllm:num_requests_running{x= 1\n", ["vllm:num_requests_running"]) == []


def test_a_first_reading_has_counts_and_no_rates() -> None:
    window = Window()
    window.add(reading(0, page(100, kv=(0.25, 0.75))))
    found = window.to_json()
    assert (found["running"], found["waiting"], found["answered_total"]) == (4, 2, 8)
    assert found["kv_share"] == 0.75  # the fullest engine's
    assert found["generated_tokens_per_s"] is None
    assert found["first_token_s"] == {"p50": None, "p95": None}


def test_rates_are_those_of_the_last_ten_seconds() -> None:
    window = Window()
    for at_s, generated in ((0, 0), (20, 10_000), (26, 10_300), (30, 10_500)):
        window.add(reading(at_s, page(generated)))
    assert window.to_json()["generated_tokens_per_s"] == 50.0  # since 20 s


def test_latencies_are_those_of_the_last_minute() -> None:
    window = Window()
    window.add(reading(0, page(0, slow=1000)))
    window.add(reading(59, page(0, slow=1004)))
    assert window.to_json()["first_token_s"]["p50"] == pytest.approx(0.075)
    window.add(reading(70, page(0, slow=1004)))
    assert window.to_json()["first_token_s"]["p50"] is None  # the reading at 0 s is too old


def test_a_new_engine_begins_a_new_window() -> None:
    window = Window()
    window.add(reading(0, page(1000, prompt=500)))
    window.add(reading(2, page(10, prompt=5)))
    assert window.to_json()["generated_tokens_per_s"] is None


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [
        ({}, 0.5, None),
        ({1.0: 0, math.inf: 0}, 0.5, None),
        ({1.0: 10, 2.0: 20, math.inf: 20}, 0.5, 1.0),
        ({1.0: 10, 2.0: 20, math.inf: 20}, 0.75, 1.5),
        ({1.0: 0, 2.0: 0, math.inf: 5}, 0.5, 2.0),  # the last bucket has no end
    ],
)
def test_quantiles_lie_within_their_bucket(
    counts: dict[float, float], share: float, wanted: float | None
) -> None:
    assert quantile(counts, share) == wanted


def test_several_pages_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fetch() -> str | None:
        asked.append(1)
        return page(10)

    reader = TrafficReader(fetch)
    assert reader.read() is reader.read()
    assert len(asked) == 1
    monkeypatch.setattr(traffic, "CACHE_S", 0.0)
    reader.read()
    assert len(asked) == 2


def test_a_server_without_an_answer_has_no_traffic() -> None:
    assert TrafficReader(lambda: None).read() is None

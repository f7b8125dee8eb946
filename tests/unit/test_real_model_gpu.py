"""benchmarks/real_model_gpu.py reads what pytest wrote for the lane `real_model`."""

from __future__ import annotations

from pathlib import Path

from real_model_gpu import measured
from real_model_server import Comparison

CASE = '<testcase name="{}">{}</testcase>'
PROPERTIES = "<properties>{}</properties>"
PROPERTY = '<property name="{}" value="{}" />'


def test_outcomes_and_what_was_recorded(tmp_path: Path) -> None:
    compared = Comparison(4088, 1.1e-3, 0.03, 0.3, 0.97)
    twice = PROPERTY.format("mean_kl_nats", 8e-4) + PROPERTY.format("mean_kl_nats", 7e-4)
    cases = [
        CASE.format("one", PROPERTIES.format(PROPERTY.format("measured", compared))),
        CASE.format("two", PROPERTIES.format(twice)),
        CASE.format("three", '<failure message="assert" />'),
    ]
    text = f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
    (tmp_path / "real_model_nibble_4000.xml").write_text(text)
    assert measured(tmp_path, "nibble") == {
        "one": {"outcome": "passed", "measured": compared._asdict()},
        "two": {"outcome": "passed", "mean_kl_nats": [8e-4, 7e-4]},
        "three": {"outcome": "failed"},
    }
    assert measured(tmp_path, "vllm") == {}

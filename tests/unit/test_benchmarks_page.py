"""docs/benchmarks.md, README's results and the plots have what benchmarks/results has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import make_page
import plot_figures
import pytest

from nibble.machine.paths import root

README = (root() / "README.md").read_text()


@pytest.mark.parametrize("program", ["plot_readme.py", "plot_figures.py", "make_page.py"])
def test_page_and_pictures_are_those_of_the_results(program: str) -> None:
    words = [sys.executable, root() / "benchmarks" / program, "--check"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("3.2× faster (0.56 ms vs 1.82 ms)", "3.3× faster (0.56 ms vs 1.82 ms)"),
        ("502 vs 263", "999 vs 263"),
        ("130, 13.4, 96.7 %", "130, 13.4, 97.6 %"),
        ("68 of 68", "69 of 69"),
        ("1.93 against 3.72 ms", "1.92 against 3.72 ms"),
    ],
)
def test_a_number_of_the_readme_that_no_result_has_is_named(old: str, new: str) -> None:
    found = list(plot_figures.figures())
    assert old in README and plot_figures.missing(found, README) == []
    (line,) = plot_figures.missing(found, README.replace(old, new))
    assert line.split(": ")[-1].split(", ")[0] in new


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("start_time_hopper: summary/first/vllm_s: .0f", "234"),
        ("start_time_hopper: summary/first/vllm_s / summary/first/nibble_s: .1f", "2.2"),
        ("host_floor_h200: rows/[model=dense2,streams=8]/steady_share * 100: .1f", "99.4"),
        ("start_overhead_one_process: median overhead/vllm_s: .3s", "25.0"),
        ("gate_cost: gate_cost_ms/GET ~version: .2f", "0.02"),
        ("reference_faults_cpu: count models/*/faults/*/definition - 4", "68"),
    ],
)
def test_an_expression_gives_its_figure(expression: str, text: str) -> None:
    assert make_page.shown(expression) == text


def test_a_half_is_rounded_up_in_the_overview_as_in_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's format rounds 442.5 to 442."""
    (tmp_path / "rates.json").write_text('{"rate": 442.5}')
    monkeypatch.setattr(make_page, "RESULTS", tmp_path)
    assert plot_figures.rounded(442.5, 0) == make_page.shown("rates: rate: .0f") == "443"


@pytest.mark.parametrize(
    "expression",
    [
        "none_such: a",
        "gate_cost: none",
        "host_floor_h200: rows/[model=none]/stock_ms",
        "host_floor_h200: rows/99",
        "gate_cost: gate_cost_ms",
    ],
)
def test_an_expression_that_the_data_does_not_answer_is_refused(expression: str) -> None:
    with pytest.raises(make_page.Wrong):
        make_page.shown(expression)


def test_lines_between_each_and_end_come_once_for_each_item() -> None:
    template = ["a", "{{ each host_floor_h100: rows/[model=dense2] }}", "{{ .streams }}",
                "{{ end }}", "z"]  # fmt: skip
    rendered = make_page.render(template)
    assert [text for _, text in rendered] == ["a", "1", "8", "16", "z"]


def test_a_line_typed_in_the_page_is_taken_over_and_the_others_keep_their_expressions() -> None:
    template = ["{{ gate_cost: limit_ms }}", "b", "c"]
    page = ["0.1", "new", "other", "c"]
    assert make_page.adopt(template, page) == ["{{ gate_cost: limit_ms }}", "new", "other", "c"]

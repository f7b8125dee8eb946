"""Time by kernel in traces of torch's profiler, and the file for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nibble.bench.trace import merge, profile, read_trace, table, write_merged
from nibble.cli.trace import trace
from nibble.errors import ExitCode, NibbleError
from tests.support.refusals import refusal_of


def event(name: str, begin: float, length: float, cat: str = "cpu_op", **more: Any) -> Any:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": length,
            **more}  # fmt: skip


def test_an_operators_own_time_leaves_out_what_it_called() -> None:
    events = [event("outer", 0, 10), event("inner", 2, 3), event("leaf", 3, 1),
              event("inner", 6, 2), event("next", 10, 5), event("outer", 0, 4, tid=2)]  # fmt: skip
    found = profile({"traceEvents": events})
    assert {one.name: one.microseconds for one in found.kernels} == {
        "outer": 5 + 4, "inner": 2 + 2, "leaf": 1, "next": 5}  # fmt: skip
    assert not found.on_gpu and found.microseconds == 19
    assert sum(one.share for one in found.kernels) == pytest.approx(1)


def test_with_a_gpu_only_kernels_count_and_steps_are_those_of_the_model() -> None:
    events = [event("aten::mm", 0, 50), event("gemm", 10, 30, "kernel"),
              event("gemm", 50, 10, "kernel"), event("copy", 60, 5, "gpu_memcpy"),
              event("execute_context_1(1)_generation_0(0)", 0, 90, "user_annotation")]  # fmt: skip
    found = profile({"traceEvents": events})
    assert found.on_gpu and found.steps == 1
    assert [(one.name, one.count, one.microseconds) for one in found.kernels] == [
        ("gemm", 2, 40), ("copy", 1, 5)]  # fmt: skip


def test_a_table_ends_with_the_sum_of_the_rest() -> None:
    rows = table(profile({"traceEvents": [event(f"k{n}", n * 10, n + 1) for n in range(5)]}), 2)
    assert rows[0][:2] == ("k4", "1") and rows[-1] == ("3 more", "3", "0.006", "40.0%")


def test_no_events_are_an_empty_profile() -> None:
    found = profile({"traceEvents": []})
    assert (found.kernels, found.microseconds, table(found, 3)) == ((), 0, [])


def test_merged_traces_keep_processes_and_flows_apart(tmp_path: Path) -> None:
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}
    one = {"traceEvents": [name, event("a", 0, 1, id=7)]}
    write_merged(merge({"rank0": one, "rank1": one}), tmp_path / "p.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "p.json.gz").read_bytes()))["traceEvents"]
    assert [x["pid"] for x in events] == [1, 1, 2, 2]
    assert [x["args"]["name"] for x in events if x["ph"] == "M"] == ["rank0: python",
                                                                    "rank1: python"]  # fmt: skip
    assert len({x["id"] for x in events if "id" in x}) == 2


@pytest.mark.parametrize("content", [b"", b"x", b"{}", b'{"traceEvents": 1}', b"\x1f\x8b"])
def test_what_is_not_a_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("t.json", "t.json.gz"):
        (tmp_path / name).write_bytes(content)
        found = refusal_of(lambda: read_trace(tmp_path / name), ExitCode.INTERNAL)  # noqa: B023
        assert "is not a trace" in found.line()


@pytest.mark.parametrize("was_there", [True, False])
def test_a_profile_that_cannot_be_made_leaves_no_new_folder(
    tmp_path: Path, was_there: bool
) -> None:
    out = tmp_path / "trace"
    if was_there:
        out.mkdir()
    with pytest.raises(NibbleError):
        trace(url="http://127.0.0.1:9", out=out)
    assert out.exists() == was_there

"""`nibble bench`, `soak`, `eval` and `trace` with a real server: results, verdicts, errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nibble.serve.endpoint import Endpoint
from tests.support import prometheus
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

pytestmark = pytest.mark.vllm
KEY = "bench-key-0123456789"
SWEEP = ("--prompt-tokens", "16", "--output-tokens", "8", "--concurrency", "1,2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder / "profiles")})
    words = ["serve", "nibble-demo-nvfp4", "--profiler-config", profiler]
    running = Server(folder, words, NIBBLE_API_KEY=KEY)
    try:
        yield running.wait_until_ready()
    finally:
        running.end()


def start(server: Server, *words: str, key: str = KEY) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nibble", *words],
        env={**server.environ, "NIBBLE_API_KEY": key},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(server: Server, *words: str, key: str = KEY) -> tuple[int, str, str]:
    process = start(server, *words, key=key)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_a_wrong_key_is_refused_before_anything_is_measured(server: Server) -> None:
    code, out, err = run(server, "bench", *SWEEP, key="wrong-key-0123456789")
    assert (code, out) == (2, "")
    assert "refuses the key (401" in err and "Traceback" not in err


def test_a_result_has_every_cell_and_a_much_faster_old_one_is_a_regression(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "first"
    code, text, err = run(server, "bench", *SWEEP, "--requests", "3", "--out", str(out))
    assert code == 0, err
    assert text.splitlines()[0].startswith("prompt  output  streams  tokens/s")
    result = json.loads((out / "results.json").read_text())
    assert result["complete"] and result["model"]["id"] == "nibble-demo-nvfp4"
    assert KEY not in json.dumps(result)
    for cell, streams in zip(result["cells"], (1, 2), strict=True):
        assert (cell["concurrency"], cell["errors"], len(cell["rounds"])) == (streams, 0, 3)
        assert all(one["output_tokens"] == 3 * 8 and one["ttft_ms"] > 0 for one in cell["rounds"])
    names = {path.name for path in out.iterdir()}
    assert {"results.json", "README.md", "results.svg", "results.png"} <= names
    for one in [one for cell in result["cells"] for one in cell["rounds"]]:
        one["tokens_per_s"] = 1e6
    (tmp_path / "old.json").write_text(json.dumps(result))
    words = ("--compare", str(tmp_path / "old.json"), "--json")
    code, text, _ = run(server, "bench", *SWEEP, *words)
    assert code == 6
    worse = [one for one in json.loads(text)["changes"] if one["verdict"] == "worse"]
    assert {one["figure"] for one in worse} >= {"tokens_per_s"}


def test_a_healthy_server_is_steady_under_every_kind_of_load(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "soak.json"
    words = ("--minutes", "0.25", "--concurrency", "3", "--out", str(out))
    code, text, err = run(server, "soak", *words)
    assert code == 0, text + err
    found = json.loads(out.read_text())
    kinds = {"short", "long", "streamed", "aborted", "seeded", "structured"}
    assert found["done"].keys() == kinds and found["failed"] == found["left_out"] == {}
    assert found["verdict"] == "steady" and found["left_over"] == 0
    assert found["memory_bytes"] > 1 << 28
    assert len(found["drifts"]) >= 2 and {one["engine_pid"] for one in found["samples"]} == {
        server.engine_pid
    }
    assert "verdict: steady" in text


def test_a_server_is_its_own_reference_and_its_answers_follow_schemas(
    server: Server, tmp_path: Path
) -> None:
    record = str(tmp_path / "reference.json")
    code, _, err = run(server, "eval", "--record", record)
    assert code == 0, err
    code, text, err = run(
        server, "eval", "--against", record, "--tools", "--min-tools", "0.6", "--json"
    )
    found = json.loads(text)
    assert code == 0, found["failures"]
    assert found["parity"]["top1"] == 1 and found["parity"]["kl_nats"] < 1e-3
    names = [one["name"] for one in found["parts"]["tools"]["cases"]]
    assert "JSON by a schema, streamed" in names
    recording = json.loads(Path(record).read_text())
    for place in recording["places"]:
        for token in place:
            place[token] = -1.0
    Path(record).write_text(json.dumps(recording))
    code, text, _ = run(server, "eval", "--against", record)
    assert code == 6 and "verdict  failed" in text


def test_scripted_answers_of_a_parser_pass_without_a_server(server: Server) -> None:
    code, text, err = run(server, "eval", "--parsers", "hermes,openai")
    assert code == 0, text + err
    assert "18 of 18 cases passed" in text and "not run: openai" in text


def test_a_profile_has_the_steps_asked_for_and_nibbles_operators(
    server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "trace"
    code, text, err = run(server, "trace", "--steps", "5", "--out", str(out))
    assert code == 0, err
    found = json.loads((out / "trace.json").read_text())
    assert found["steps"] == 5 and not found["on_gpu"]
    assert any(one["name"].startswith("nibble::") for one in found["kernels"])
    assert {path.name for path in out.iterdir()} == {"trace.json", "trace.txt", "perfetto.json.gz"}
    assert "operator (own time)" in text


def test_prometheus_reads_the_server_and_evaluates_every_alert(
    server: Server, tmp_path: Path
) -> None:
    prometheus.check(tmp_path)
    dashboard = json.loads((ROOT / "docker/metrics/grafana/dashboards/nibble.json").read_text())
    # Kinds that only a GPU has
    panels = [one for one in dashboard["panels"] if not one["title"].startswith("GPU")]
    with prometheus.scraping(tmp_path, server.port, KEY) as url:
        (up,) = prometheus.query(url, 'up{job="nibble"} == 1')
        assert up["metric"]["instance"].endswith(f":{server.port}")
        for panel in panels:
            for target in panel["targets"]:
                expression = target["expr"].replace("$instance", ".*")
                assert prometheus.query(url, expression), panel["title"]
        assert set(prometheus.alerts(url).values()) == {"ok"}


def until_measured(file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return json.loads(file.read_text())


@dataclass(frozen=True)
class Killed:
    """What was seen when a server was killed: the benchmark's end, its folder, alerts that fire."""

    code: int
    text: str
    err: str
    out: Path
    alerts: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def killed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """The server's end while `nibble bench` measures it and Prometheus reads it."""
    folder = tmp_path_factory.mktemp("killed")
    out = folder / "out"
    bench = start(server, "bench", *SWEEP, "--rounds", "100", "--requests", "20", "--out", str(out))
    assert until_measured(out / "results.json")["complete"] is False
    with prometheus.scraping(folder, server.port, KEY, quick=True) as url:
        prometheus.query(url, "nibble_ready == 1")
        assert prometheus.firing(url, lambda names: not names) == {}
        server.signal(signal.SIGKILL)
        alerts = prometheus.firing(url, bool)
    text, err = bench.communicate(timeout=120)
    return Killed(bench.returncode, text, err, out, alerts)


def test_what_was_measured_is_kept_when_the_server_ends(killed: Killed) -> None:
    assert killed.code == 10, killed.err
    assert killed.err.count("nibble: error: ") == 1 and "Traceback" not in killed.err
    result = json.loads((killed.out / "results.json").read_text())
    assert result["cells"] and not result["complete"] and result["ended"]
    assert "tokens/s" in killed.text and (killed.out / "README.md").exists()


def test_the_alert_not_ready_fires_for_a_killed_server_and_names_it(
    server: Server, killed: Killed
) -> None:
    assert set(killed.alerts) == {"NotReady"}
    assert f":{server.port} has not been ready" in killed.alerts["NotReady"]["summary"]


@pytest.mark.slow
def test_stock_vllm_is_measured_in_turns_and_ends(tmp_path: Path) -> None:
    server = Server(tmp_path, ["serve", "nibble-demo"])
    try:
        server.wait_until_ready()
        words = ("--against", "stock", "--stock-flags", "--enforce-eager", "--json")
        code, text, err = run(server, "bench", *SWEEP, "--requests", "2", *words, key="")
        assert code == 0, err
        result = json.loads(text)
        assert [cell["side"] for cell in result["cells"]] == ["nibble", "stock"] * 2
        assert {one["figure"] for one in result["ratios"]} >= {"tokens_per_s"}
        other = Endpoint("127.0.0.1", int(result["sides"][1]["url"].rpartition(":")[2]))
        with pytest.raises(OSError, match="refused"):
            other.call("/health")
        code, text, err = run(
            server, "bench", *SWEEP, "--against", "stock", "--stock-flags", "--none-such", key=""
        )
        assert (code, text) == (10, "")
        assert "stock vLLM did not start" in err and "--none-such" in err
    finally:
        server.end()

"""`nibble bench` without a server: sweeps, vLLM's result, comparisons, files, and what a server
can answer.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nibble.bench.about import Energy
from nibble.bench.compare import compare, ratios, refuse_others, refuse_too_little
from nibble.bench.files import JSON, read_result, write_json
from nibble.bench.plot import draw
from nibble.bench.report import Report, change_lines, markdown, ratio_lines
from nibble.bench.result import Measured, Round, gather, read_round
from nibble.bench.run import Bench, Side, steps
from nibble.bench.served import Served, find_served, fingerprint
from nibble.bench.stock import Peer, last_error, running, stock_words
from nibble.bench.sweep import Cell, make_sweep, read_lists
from nibble.engine.bench_serve import usage_apart
from nibble.errors import ExitCode, NibbleError
from nibble.machine.out_path import create_folder
from nibble.serve.endpoint import Endpoint, endpoint_at, local_endpoint
from tests.support.refusals import refusal_of

CELL, OTHER = Cell(64, 16, 4), Cell(64, 16, 8)
FROM_VLLM: dict[str, Any] = {
    "duration": 2.0,
    "completed": 3,
    "failed": 1,
    "total_output_tokens": 40,
    "request_throughput": 1.5,
    "output_throughput": 20.0,
    "median_ttft_ms": 11.0,
    "p99_ttft_ms": 19.0,
    "median_itl_ms": 4.0,
    "p99_itl_ms": 9.0,
    "median_tpot_ms": 5.0,
    "output_lens": [16, 16, 8, 0],
    "errors": ["", "", "", "Traceback (most recent call last):\n  x\nClientError: cut\x1b[2J\n"],
}
ABOUT: dict[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "command": "nibble bench",
    "model": {"id": "acme/tiny", "fingerprint": "f", "max_model_len": 512},
    "machine": {"cpu": "A", "cores": 2, "gpus": [], "memory_gib": 8},
    "software": {"vllm": "0.32.0"},
    "rounds": 3,
    "sides": [{"name": "nibble"}, {"name": "stock"}],
}


def one_round(rate: float, first: float = 10.0, each: float = 5.0) -> Round:
    return Round(1, 8, 0, 1, rate, first, first, each, each, each, 128)


def measured(rates: Sequence[float], side: str = "nibble", cell: Cell = CELL) -> Measured:
    return Measured(side, cell, tuple(one_round(rate) for rate in rates))


def test_a_sweep_has_every_combination_once() -> None:
    cells = make_sweep(read_lists("64,32,64", "16", "1, 2"), 512)
    assert cells == (Cell(64, 16, 1), Cell(64, 16, 2), Cell(32, 16, 1), Cell(32, 16, 2))


@pytest.mark.parametrize("length", [2, 64, 200, 512, 4096])
def test_the_default_sweep_fits_every_context(length: int) -> None:
    cells = make_sweep(read_lists(None, None, None), length)
    assert cells and all(
        cell.prompt_tokens > 0 and cell.output_tokens > 0
        and cell.prompt_tokens + cell.output_tokens <= length
        for cell in cells
    )  # fmt: skip


def test_a_sweep_beyond_the_context_is_refused() -> None:
    error = refusal_of(lambda: make_sweep(read_lists("500", "16", "1"), 512), ExitCode.CONFIG)
    assert "are 516, beyond the server's context of 512" in error.line()


@pytest.mark.parametrize("text", ["", "x", "1,,2", "-1", "0", "1.5", "1e3", "²", "1 2", "9" * 30])
def test_a_malformed_list_is_refused(text: str) -> None:
    error = refusal_of(lambda: read_lists(None, text, None), ExitCode.USAGE)
    assert "--output-tokens is" in error.line()


def test_a_round_counts_failed_and_short_answers() -> None:
    found = read_round(FROM_VLLM, CELL, joules=80.0)
    assert (found.requests, found.errors, found.tokens_per_s) == (4, 2, 20.0)
    assert (found.per_token_ms, found.between_ms, found.between_p99_ms) == (5.0, 4.0, 9.0)
    assert found.joules_per_token == 2.0
    assert found.reasons[1] == "1 answers shorter than asked"
    assert found.reasons[0].startswith("ClientError: cut") and "\x1b" not in found.reasons[0]


@pytest.mark.parametrize("name", ["median_ttft_ms", "output_lens", "errors", "failed"])
def test_another_format_of_vllms_result_is_one_line_that_names_the_field(name: str) -> None:
    found = {key: value for key, value in FROM_VLLM.items() if key != name}
    assert name in refusal_of(lambda: read_round(found, CELL, None), ExitCode.INTERNAL).line()


def test_rounds_become_cells_in_order_with_median_and_spread() -> None:
    taken = [("stock", CELL, one_round(8)), ("nibble", OTHER, one_round(1)),
             *(("nibble", CELL, one_round(rate)) for rate in (10, 12, 9))]  # fmt: skip
    cells = gather(taken, ("nibble", "stock"))
    order = [("nibble", CELL), ("stock", CELL), ("nibble", OTHER)]
    assert [(one.side, one.cell) for one in cells] == order
    assert (cells[0].median("tokens_per_s"), cells[0].spread("tokens_per_s")) == (10, 0.3)
    assert cells[1].spread("tokens_per_s") == 0


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((100, 101, 99), (98, 97, 99), "same"),  # below the floor
        ((100, 101, 99), (90, 91, 90), "worse"),
        ((100, 101, 99), (110, 111, 112), "better"),
        ((100, 120, 90), (80, 80, 81), "same"),  # the old rounds differ by 30 %
        ((100, 101, 99), (80, 60, 95), "same"),  # the new ones do
        ((100, 101, 99), (60, 30, 95), "same"),  # by 108 %
        ((1000, 1010, 990), (60, 30, 95), "worse"),  # far beyond that
    ],
)
def test_only_a_change_beyond_noise_counts(old: Any, new: Any, verdict: str) -> None:
    changes = {one.figure: one for one in compare([measured(old)], [measured(new)])}
    assert changes["tokens_per_s"].verdict == verdict
    assert changes["ttft_ms"].verdict == changes["per_token_ms"].verdict == "same"


def test_a_longer_time_is_worse() -> None:
    old = Measured("nibble", CELL, (one_round(100, 10),) * 3)
    new = Measured("nibble", CELL, (one_round(100, 20),) * 3)
    changes = compare([old], [new])
    assert [one.figure for one in changes if one.verdict == "worse"] == ["ttft_ms"]
    assert list(change_lines(changes)) == [
        "64 + 16 tokens × 4: time to first token is worse: 20.0 instead of 10.0 (-50 %, noise 5 %)"
    ]
    assert list(change_lines(compare([old], [old]))) == ["no change beyond noise in 1 cell"]


def test_a_comparison_without_shared_cells_or_rounds_is_refused_before_it_is_measured() -> None:
    old = [measured((1, 2, 3))]
    refuse_too_little(old, [CELL, OTHER], 3)
    refusal_of(lambda: refuse_too_little(old, [OTHER], 3), ExitCode.CONFIG)
    refusal_of(lambda: refuse_too_little(old, [CELL], 2), ExitCode.CONFIG)
    refusal_of(lambda: refuse_too_little([measured((1, 2))], [CELL], 3), ExitCode.CONFIG)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("model", "id", "acme/other"), ("model", "fingerprint", "g"),
     ("machine", "cpu", "B"), ("machine", "gpus", ["H200"]), ("machine", "remote", "b:1")],
)  # fmt: skip
def test_a_result_of_another_model_or_machine_is_refused(part: str, name: str, value: Any) -> None:
    refuse_others(ABOUT, ABOUT["model"], ABOUT["machine"] | {"memory_gib": 9})
    now = {"model": ABOUT["model"], "machine": ABOUT["machine"]}
    now[part] = {**now[part], name: value}
    error = refusal_of(lambda: refuse_others(ABOUT, now["model"], now["machine"]), ExitCode.CONFIG)
    assert f"another {part}: its {name} is" in error.line()


def test_a_ratio_is_of_rounds_that_took_turns() -> None:
    found = ratios([measured((20, 30, 40)), measured((10, 10, 10), "stock")], "nibble", "stock")
    rate = next(one for one in found if one.figure == "tokens_per_s")
    assert (rate.median, rate.lowest, rate.highest) == (3, 2, 4)
    assert "tokens/s: 3.00× as fast as stock (2.00 to 4.00)" in next(
        iter(ratio_lines([rate], "stock"))
    )


def test_servers_take_turns_with_the_same_prompts_and_a_warm_up_first() -> None:
    sides = [Side(name, Endpoint("h", 1), Served("m", "m", 9)) for name in ("nibble", "stock")]
    order = steps([CELL, OTHER], sides, 2)
    assert [step.round for step in order] == [0] * 4 + [1] * 4 + [2] * 4
    assert [step.side.name for step in order[:8]] == [
        *("nibble", "stock", "stock", "nibble"), *("stock", "nibble", "nibble", "stock")
    ]  # fmt: skip
    seeds = {(step.round, step.cell): step.seed for step in order}
    assert all(step.seed == seeds[step.round, step.cell] for step in order)
    assert len(set(seeds.values())) == 6


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    cells = (measured((1.5, 2, 3)), measured((1, 2, 3), "stock"))
    write_json(tmp_path, Report(ABOUT, cells).to_json())
    about, ours = read_result(tmp_path)
    assert about["model"] == ABOUT["model"] and ours == cells[:1]


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("cells"),
        lambda found: found.update(format="nibble bench 2"),
        lambda found: found.update(machine=None),
        lambda found: found["cells"][0].update(rounds=[]),
        lambda found: found["cells"][0]["rounds"][0].update(tokens_per_s="fast"),
        lambda found: found["cells"][0]["rounds"][0].pop("ttft_ms"),
    ],
)
def test_a_damaged_result_is_refused(change: Callable[[Any], Any], tmp_path: Path) -> None:
    found = json.loads(json.dumps(Report(ABOUT, [measured((1, 2, 3))]).to_json()))
    change(found)
    (tmp_path / "old.json").write_text(json.dumps(found))
    error = refusal_of(lambda: read_result(tmp_path / "old.json"), ExitCode.USAGE)
    assert "is not a result of `nibble bench`" in error.line()


@pytest.mark.parametrize("deviation", [0.01, 0.03, 0.05, 0.1])
def test_at_most_3_of_100_comparisons_of_a_server_with_itself_find_a_regression(
    deviation: float,
) -> None:
    """As docs/measuring.md says: independent, normally distributed rounds of six cells."""
    dice = random.Random(0)
    cells = [Cell(prompt, 128, streams) for prompt in (128, 1024) for streams in (1, 4, 16)]

    def around(middle: float) -> float:
        return dice.gauss(middle, deviation * middle)

    def result() -> list[Measured]:
        return [
            Measured(
                "nibble", cell, tuple(one_round(*map(around, (100, 50, 10))) for _ in range(3))
            )
            for cell in cells
        ]

    alarms = [
        any(one.verdict == "worse" for one in compare(result(), result())) for _ in range(500)
    ]
    assert sum(alarms) <= 0.03 * len(alarms)


def test_a_folder_with_a_result_is_not_overwritten(tmp_path: Path) -> None:
    create_folder(tmp_path / "new" / "folder", "results", JSON)
    write_json(tmp_path, {})
    refusal_of(lambda: create_folder(tmp_path, "results", JSON), ExitCode.CONFIG)
    (tmp_path / "file").write_text("")
    refusal_of(
        lambda: create_folder(tmp_path / "file" / "folder", "results", JSON), ExitCode.CONFIG
    )


def test_the_page_says_what_is_missing_and_shows_every_cell() -> None:
    report = Report(ABOUT, [measured((10, 11, 12))], ended="the server ended")
    page = markdown(report, has_plot=True)
    assert "Not complete: the server ended" in page and "(results.svg)" in page
    assert "| 64 | 16 | 4 | nibble | 11.0 | 10.0 (10.0) | 5.00 (5.00) | 0 |  | 18.2 % |" in page


def test_the_plot_is_an_svg_and_a_png_of_every_line(tmp_path: Path) -> None:
    cells = [measured((10, 11, 12)), measured((20, 21, 22), cell=OTHER), measured((5,), "stock")]
    svg, png = draw("acme/tiny", cells, tmp_path / "results")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    first = svg.read_bytes()
    assert draw("acme/tiny", cells, tmp_path / "again")[0].read_bytes() == first


def test_stock_vllm_gets_checkpoint_length_and_cache_and_the_users_flags_last() -> None:
    words = stock_words(Served("default", "/models/m", 512), 9000, 1024, ["--max-model-len", "9"])
    text = " ".join(words)
    assert text.startswith("serve /models/m ") and text.endswith("--max-model-len 9")
    assert "--max-model-len 512 --kv-cache-memory-bytes 1024" in text
    assert "--kv-cache" not in " ".join(stock_words(Served("d", "/m", 512), 9000, None, []))


def test_the_reason_of_a_server_that_did_not_start_is_its_last_error() -> None:
    log = (
        "INFO start\nValueError: no memory\nTraceback\nRuntimeError: Engine core initialization"
        " failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert last_error(log) == "no memory"
    assert last_error("usage: vllm\nmain.py: error: unknown --x\n") == "main.py: error: unknown --x"
    assert last_error("") == "it printed nothing"


Answer = tuple[int, Any]


@pytest.fixture
def server() -> Iterator[Callable[[Answer], Endpoint]]:
    """Starts a server that answers every GET so."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> Endpoint:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = answer[1] if isinstance(answer[1], bytes) else json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return Endpoint("127.0.0.1", servers[-1].server_address[1])

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


MODELS = {"data": [{"id": "m", "root": "/nowhere/m", "max_model_len": 512}]}


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        ((401, {"error": {"message": "no key"}}), ExitCode.USAGE, "refuses the key (401: no key)"),
        ((503, {"error": {"message": "starting."}}), ExitCode.ENGINE_DIED, "not ready (503: star"),
        ((404, b"<html>"), ExitCode.ENGINE_DIED, "is not ready (404: <html>)"),
        ((200, b"hello"), ExitCode.ENGINE_DIED, "another program answers"),
        ((200, {"data": [{}]}), ExitCode.ENGINE_DIED, "another program answers"),
        ((200, {"data": []}), ExitCode.MODEL, "it serves none"),
        ((200, MODELS), ExitCode.MODEL, "does not serve other; it serves m"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_line(
    server: Callable[[Answer], Endpoint], answer: Answer, code: ExitCode, text: str
) -> None:
    endpoint = server(answer)
    assert text in refusal_of(lambda: find_served(endpoint, {}, "bench", "other"), code).line()


def test_the_first_model_is_measured(server: Callable[[Answer], Endpoint]) -> None:
    found = find_served(server((200, MODELS)), {}, "bench")
    assert (found.name, found.max_model_len, found.folder, found.id) == ("m", 512, None, "m")


def test_a_model_of_the_hubs_cache_has_the_hubs_id() -> None:
    assert Served("x", "/cache/models--acme--tiny/snapshots/12ab", 1).id == "acme/tiny"
    assert Served("x", "acme/tiny", 1).id == "acme/tiny"


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    first = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert first and fingerprint(tmp_path) not in (None, first)


def test_the_stored_key_goes_to_this_machine_only(tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("nbl-stored\n")
    environ = {"NIBBLE_CACHE_DIR": str(tmp_path), "PORT": "9000"}
    assert local_endpoint(environ) == Endpoint("127.0.0.1", 9000, "nbl-stored")
    assert endpoint_at("http://localhost:9000/v1", environ).key == "nbl-stored"
    assert endpoint_at("https://example.org", environ) == Endpoint("example.org", 443, None, True)
    given = environ | {"NIBBLE_API_KEY": "given-key"}
    assert endpoint_at("example.org:80", given).key == "given-key"
    assert "given" not in repr(endpoint_at("example.org:80", given))


def test_each_peer_gets_model_length_and_streams() -> None:
    served = Served("default", "/models/m", 512)
    sglang = Peer("sglang", ["--tp", "2"], "py").command(served, 9, None)
    assert sglang[:5] == ["py", "-m", "sglang.launch_server", "--model-path", "/models/m"]
    assert sglang[-4:] == ["--context-length", "512", "--tp", "2"]
    llama = Peer("llama.cpp", [], "llama-server", Path("m.gguf"), 4).command(served, 9, None)
    assert llama[:3] == ["llama-server", "--model", "m.gguf"]
    assert llama[-4:] == ["--parallel", "4", "--ctx-size", "2048"]


def test_llama_servers_last_piece_is_read_as_its_usage() -> None:
    usage = {"completion_tokens": 4}
    last = {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}
    assert usage_apart("data: " + json.dumps(last)) == [
        "data: " + json.dumps({"choices": [], "usage": usage})
    ]
    both = usage_apart("data: " + json.dumps({"choices": [{"text": "a"}], "usage": usage}))
    assert [json.loads(one.removeprefix("data: ")).get("usage") for one in both] == [None, usage]
    for same in ('data: {"choices": [{"text": "a"}]}', "data: [DONE]", ": ping",
                 'data: {"choices": [], "usage": {"completion_tokens": 4}}'):  # fmt: skip
        assert usage_apart(same) == [same]


def test_a_peer_that_cannot_load_the_checkpoint_is_named_with_its_reason(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'RuntimeError: unknown architecture nvfp4'\nexit 1\n")
    program.chmod(0o755)
    peer = Peer("llama.cpp", [], str(program), tmp_path / "m.gguf")

    def start() -> None:
        with running(peer, Served("d", "/m", 64), None, tmp_path / "log", {}):
            pass

    error = refusal_of(start, ExitCode.ENGINE_DIED)
    assert "llama.cpp did not start (exit code 1): unknown architecture nvfp4" in error.line()
    program.write_text("#!/bin/sh\necho 'Error: a warning of before'; echo loading\nkill -9 $$\n")
    error = refusal_of(start, ExitCode.ENGINE_DIED)
    killed = "did not start (killed by SIGKILL): it printed last: Error: a warning of before | load"
    assert killed in error.line()
    program.unlink()
    assert "cannot be run" in refusal_of(start, ExitCode.CONFIG).line()


# Serves a model until the first completion, which crashes it.
CRASHING = """#!{python}
import http.server, json, os, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"data": [{{"id": "default", "max_model_len": 64}}]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        print("first cause\\nllm_load: GGML_ASSERT(n_tokens > 0) failed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class OneRequest:
    """Stands for vLLM's benchmark: one request, which fails, or a start that finds no server."""

    def __init__(self, ends_with: str) -> None:
        self.ends_with = ends_with

    def measure(self, endpoint: Endpoint, words: list[str], is_alive: object) -> dict[str, Any]:
        with suppress(OSError):
            endpoint.call("/v1/completions", {})
        if self.ends_with == "silence":
            raise ConnectionError("no answer for 30 s")
        if self.ends_with == "error":
            raise NibbleError(ExitCode.CONFIG, what="vLLM's benchmark failed")
        lost = {"completed": 0, "failed": 1, "output_lens": [0], "errors": ["refused"]}
        return FROM_VLLM | lost


@pytest.mark.parametrize("ends_with", ["errors", "silence", "error"])
def test_a_peer_that_crashes_while_it_is_measured_is_named_with_its_end_and_last_lines(
    tmp_path: Path, ends_with: str
) -> None:
    program, log = tmp_path / "llama-server", tmp_path / "llama.cpp.log"
    program.write_text(CRASHING.format(python=sys.executable))
    program.chmod(0o755)
    peer = Peer("llama.cpp", [], str(program), tmp_path / "m.gguf")
    with running(peer, Served("d", "/m", 64), None, log, {}) as (process, model):
        side = Side("llama.cpp", process.endpoint, model, process)
        driver: Any = OneRequest(ends_with)
        bench = Bench(driver, [], None, Energy([]), {}, "bench")
        plan = steps([CELL], [side], 1)
        error = refusal_of(lambda: list(bench.run(plan, lambda _: None)), ExitCode.ENGINE_DIED)
    assert error.what == (
        "llama.cpp ended (killed by SIGKILL) while it was measured; it printed last:"
        " first cause | llm_load: GGML_ASSERT(n_tokens > 0) failed"
    )
    assert str(log) in error.action and "--concurrency" in error.action
    assert "make serve" not in error.line()


def test_a_server_of_nibbles_that_ends_while_it_is_measured_is_not_to_be_started_first() -> None:
    side = Side("nibble", Endpoint("127.0.0.1", 9), Served("m", "m", 64))
    error = refusal_of(side.look, ExitCode.ENGINE_DIED)
    assert "127.0.0.1:9 was lost while it was measured (Connection refused)" in error.line()
    assert error.action == "see `nibble status` and `nibble logs`"

"""`nibble status` for people, from what the control port answers in every state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.cli.status import read_status, status_lines
from nibble.errors import ExitCode, NibbleError
from nibble.serve.control import ControlServer
from nibble.serve.json_http import JsonHandler, Server

RAN = {
    "linear": {"nvfp4: HummingNvFp4LinearKernel": 144},
    "moe": {},
    "attention": {"FLASH_ATTN": 36},
    "kv_cache_dtype": ["bfloat16"],
    "cudagraph_mode": "FULL",
    "cudagraphs_captured": 35,
    "compilation_mode": "VLLM_COMPILE",
    "sampler": "flashinfer",
}
STARTING: dict[str, Any] = {
    "state": "starting",
    "phase": "load",
    "seconds_in_phase": 12.4,
    "eta_s": 31.0,
    "last_start_s": {"start": 6.0, "load": 20.0},
    "url": "http://127.0.0.1:8000/v1",
    "served_names": ["m", "default"],
    "assertion": {"verdict": "pending", "deviations": [], "ran": []},
    "canary": {"verdict": "pending", "findings": []},
}


def lines(**changed: Any) -> str:
    return "\n".join(status_lines(STARTING | changed))


def test_a_start_tells_how_long_it_may_take() -> None:
    told = lines()
    assert (
        "starting, load, 12 s in this phase; ready in about 31 s if it takes as long as the last"
        " start" in told
    )
    assert "last start start 6 s, load 20 s" in told


def test_what_ran_and_what_is_wrong_is_told() -> None:
    assertion = {
        "verdict": "failed",
        "deviations": ["sampler: native ran, expected flashinfer"],
        "ran": [RAN],
    }
    findings = [
        {
            "mechanism": "coherence",
            "verdict": "passed",
            "detail": "arithmetic",
            "warning": "wrong: JSON",
        }
    ]
    told = lines(assertion=assertion, canary={"verdict": "passed", "findings": findings})
    for part in (
        "kernels   failed",
        "sampler: native ran, expected flashinfer",
        "linear: nvfp4: HummingNvFp4LinearKernel in 144 layer(s)",
        "CUDA graphs FULL (35 captured)",
        "coherence: passed: arithmetic; wrong: JSON",
    ):
        assert part in told


@pytest.mark.parametrize(
    "status",
    [
        {"state": "starting", "phase": "download"},
        {"state": "holding", "phase": "hold", "detail": "x"},
    ],
)
def test_states_without_an_engine_are_told_too(status: dict[str, Any]) -> None:
    assert next(status_lines(status)).startswith(f"state     {status['state']}")


def test_it_is_read_from_the_control_port() -> None:
    server = ControlServer(0, lambda: STARTING, lambda: False)
    server.start()
    try:
        assert read_status({"NIBBLE_CONTROL_PORT": str(server.port)})["phase"] == "load"
    finally:
        server.close()
    with pytest.raises(NibbleError) as raised:
        read_status({"NIBBLE_CONTROL_PORT": str(server.port)})
    assert raised.value.code == ExitCode.ENGINE_DIED
    with pytest.raises(NibbleError) as raised:
        read_status({"NIBBLE_CONTROL_PORT": "many"})
    assert raised.value.code == ExitCode.USAGE


def test_the_settings_file_says_the_control_port_too(tmp_path: Path) -> None:
    server = ControlServer(0, lambda: STARTING, lambda: False)
    server.start()
    settings = tmp_path / "nibble.toml"
    settings.write_text(f"control_port = {server.port}\n")
    try:
        assert read_status({"NIBBLE_CONFIG": str(settings)})["phase"] == "load"
    finally:
        server.close()


@pytest.mark.parametrize(
    "answer",
    [
        (404, {"detail": "Not Found"}),
        (404, STARTING),
        (200, {"status": "ok"}),
        (200, [1]),
        (200, None),
    ],
)
def test_something_else_on_the_control_port_is_no_server_of_ours(answer: tuple[int, Any]) -> None:
    class Other(JsonHandler):
        def do_GET(self) -> None:
            self.reply(*answer)

    server = Server(("127.0.0.1", 0), Other)
    server.start("other")
    port = server.server_address[1]
    try:
        with pytest.raises(NibbleError) as raised:
            read_status({"NIBBLE_CONTROL_PORT": str(port)})
    finally:
        server.stop()
    assert raised.value.code == ExitCode.ENGINE_DIED
    assert f"nibble does not answer on control port {port} (another program" in raised.value.line()

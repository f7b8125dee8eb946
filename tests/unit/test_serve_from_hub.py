"""`nibble serve ORG/NAME` up to the start of vLLM: what is fetched first, and what vLLM is then
given.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nibble.cli import on_disk
from nibble.cli import serve as serve_module
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import cache_dir
from nibble.plan.plan import Plan
from nibble.serve.crash_loop import Breaker, plan_key
from tests.support.models.tiny_model import QWEN3, write_model
from tests.support.servers.hub import GOOD_TOKEN, Hub
from tests.support.servers.serving import free_port


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_model(tmp_path / "repo")
    with Hub() as server:
        server.add("acme/tiny", folder)
        server.add("acme/draft", folder)
        server.add("acme/gated", folder, gated=True)
        yield server


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {
        "HOME": str(tmp_path),
        "HF_ENDPOINT": hub.url,
        "NIBBLE_TARGET": "cpu",
        "NIBBLE_REFERENCE": "off",
        "NIBBLE_CONTROL_PORT": str(free_port()),
        "PORT": str(free_port()),
    }


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, dict[str, str]]]:
    """The plans that would have been launched and vLLM's environment; starting vLLM is
    tests/e2e's subject.
    """
    plans: list[tuple[Plan, dict[str, str]]] = []

    def launch(plan: Plan, environ: dict[str, str], *_: object, **__: object) -> int:
        plans.append((plan, plan.vllm_environ(environ)))
        return 0

    monkeypatch.setattr(serve_module, "launch", launch)
    # This process has tests to run
    monkeypatch.setattr(serve_module, "survive_memory_pressure", lambda: None)
    return plans


def weights_fetched(hub: Hub) -> int:
    """Whole downloads of weights; reading headers by range asks for part of the file only."""
    return sum(path.endswith("model.safetensors") for path in hub.downloads())


def test_vllm_gets_the_complete_folder_and_stays_offline(hub: Hub, environ, started) -> None:
    assert serve_module.serve(["acme/tiny"], environ) == 0
    plan, child = started[0]
    assert (
        Path(plan.argv()[1])
        == Path(environ["HOME"])
        / ".cache/huggingface/hub/models--acme--tiny/snapshots"
        / hub.repos["acme/tiny"].sha
    )
    assert (Path(plan.model) / "model.safetensors").is_file()
    assert child["HF_HUB_OFFLINE"] == "1"
    assert plan.served_names == ("acme/tiny", "default")


def test_a_gated_models_token_is_used_for_the_download_and_withheld_from_vllm(
    environ, started
) -> None:
    assert serve_module.serve(["acme/gated"], environ | {"HF_TOKEN": GOOD_TOKEN}) == 0
    plan, child = started[0]
    assert GOOD_TOKEN not in " ".join([*plan.argv(), *child.values()])


def test_a_draft_model_is_on_disk_before_vllm_starts(hub: Hub, environ, started) -> None:
    config = '{"method": "draft_model", "model": "acme/draft", "num_speculative_tokens": 2}'
    assert serve_module.serve(["acme/tiny", "--speculative-config", config], environ) == 0
    draft = Path(started[0][0].args["--speculative-config"].value["model"])
    assert draft.name == hub.repos["acme/draft"].sha
    assert (draft / "model.safetensors").is_file()


def test_a_draft_that_comes_down_beside_a_model_on_disk_shows_in_status(
    hub: Hub, environ, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A liveness probe that finds nothing there would end a long download."""
    seen: list[dict[str, object]] = []

    def pull(*given: Any) -> Any:
        url = f"http://127.0.0.1:{environ['NIBBLE_CONTROL_PORT']}/status"
        with urllib.request.urlopen(url, timeout=5) as reply:
            seen.append(json.load(reply))
        return real(*given)

    real = on_disk.pull
    monkeypatch.setattr(on_disk, "pull", pull)
    model = write_model(tmp_path / "mine")
    config = '{"method": "draft_model", "model": "acme/draft", "num_speculative_tokens": 2}'
    assert serve_module.serve([str(model), "--speculative-config", config], environ) == 0
    assert [one["phase"] for one in seen] == ["download"]
    assert (
        Path(started[0][0].args["--speculative-config"].value["model"]).name
        == hub.repos["acme/draft"].sha
    )


def test_what_this_machine_cannot_serve_costs_no_download(
    hub: Hub, environ, started, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ["PORT"] = str(listener.getsockname()[1])
        with pytest.raises(NibbleError) as caught:
            serve_module.serve(["acme/tiny"], environ)
    assert caught.value.code is ExitCode.CONFIG
    assert started == []
    assert not (tmp_path / ".cache/huggingface").exists()


def test_second_start_fetches_nothing_and_works_without_the_hub(hub: Hub, environ, started) -> None:
    serve_module.serve(["acme/tiny"], environ)
    first = weights_fetched(hub)
    serve_module.serve(["acme/tiny"], environ)
    hub.outage = True
    serve_module.serve(["acme/tiny"], environ)
    assert weights_fetched(hub) == first
    assert len({plan.model for plan, _ in started}) == 1


def test_with_json_the_first_line_on_stdout_is_the_plan_and_where_to_follow_it(
    environ, started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_module.serve(["acme/tiny", "--json"], environ) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["status"] == f"http://127.0.0.1:{environ['NIBBLE_CONTROL_PORT']}/status"
    assert first["plan"] == json.loads(json.dumps(started[0][0].to_json(), default=str))


def test_a_held_start_looks_at_the_checkpoint_again_when_it_is_released(
    environ, started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "mine")
    assert serve_module.serve([str(model)], environ) == 0
    breaker = Breaker(record_of(started[0][0], environ), "mine", print)
    for _ in range(3):
        breaker.begin()
        breaker.end(NibbleError(ExitCode.ENGINE_DIED, what="vLLM ended by itself"))

    def hold(*_: object) -> bool:
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100])
        return True

    monkeypatch.setattr(serve_module, "hold", hold)
    with pytest.raises(NibbleError) as caught:
        serve_module.serve([str(model)], environ)
    assert caught.value.code is ExitCode.MODEL and "model.safetensors" in caught.value.line()
    assert len(started) == 1


def record_of(plan: Plan, environ: dict[str, str]) -> Path:
    return cache_dir(environ) / "crash-loop" / f"{plan_key(plan, environ)}.json"


def test_a_server_in_the_background_that_is_stopped_while_it_downloads_ended_as_asked(
    hub: Hub, environ, tmp_path: Path
) -> None:
    large = write_model(tmp_path / "large", QWEN3 | {"vocab_size": 4096, "model_type": "afmoe"})
    hub.add("acme/large", large, faults={"model.safetensors": "stall"})
    environ |= {"PATH": os.environ["PATH"], "NIBBLE_CACHE_DIR": str(tmp_path / "nibble")}

    def nibble(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nibble", *words]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=60
        )

    begun = nibble("serve", "--detach", "acme/large")
    assert begun.returncode == 0, begun.stderr
    stopped = nibble("stop")
    assert (stopped.returncode, "ended with code 0" in stopped.stderr + stopped.stdout) == (0, True)

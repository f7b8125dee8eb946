"""`nibble recipes verify`: evidence from a self-test's report and a run, and its lint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nibble.cli import report_evidence
from nibble.cli.recipes import app
from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.recipes.lint import lint_file
from nibble.trials.report import Place, Report
from nibble.trials.trial import Outcome

MODEL = "acme/Model-8B-NVFP4"
RECIPE = '[model]\nid = "acme/Model-8B-NVFP4"\nsource = "x"\n'
PLACE = Place("hopper", "NVIDIA H200", 1, "580.1", "13.0", "abc", "0123456789ab")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with one recipe."""
    shutil.copytree(root() / "targets", tmp_path / "targets")
    shutil.copytree(root() / "rules", tmp_path / "rules")
    (tmp_path / "recipes" / "acme").mkdir(parents=True)
    (tmp_path / "recipes" / f"{MODEL}.toml").write_text(RECIPE)
    monkeypatch.setenv("NIBBLE_ROOT", str(tmp_path))
    return tmp_path


def status(**changed: Any) -> dict[str, Any]:
    choice = {"value": 32768, "source": "recipe", "reason": ""}
    plan = {
        "target": "hopper",
        "recipe": {"id": MODEL},
        "checkpoint": {"id": MODEL, "revision": "f" * 40},
        "args": {"--max-model-len": choice, "--served-model-name": choice | {"value": ["secret"]}},
    }
    checks = {
        "assertion": {"verdict": "passed", "ran": [{"linear": {"nvfp4: X": 36}}]},
        "canary": {
            "verdict": "passed",
            "findings": [{"mechanism": "layers", "verdict": "right", "detail": "/home/me"}],
        },
    }
    return {"state": "ready", "plan": plan, "build": PLACE.build, **checks} | changed


def report_file(folder: Path, wrong: tuple[str, ...] = (), **place: str) -> Path:
    report = Report(
        Place(**{**vars(PLACE), **place}),
        "2026-11-25",
        9.0,
        (Outcome("decode", "right"),),
        (),
        wrong,
    )
    path = folder / "report.json"
    path.write_text(json.dumps(report.to_json()))
    return path


def verify(here: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], **rest: Any) -> Any:
    monkeypatch.setattr(report_evidence, "read_status", lambda environ: said)
    return report_evidence.report_evidence(MODEL, report_file(here, **rest), None, {})


def problems(here: Path) -> list[str]:
    path = here / "recipes" / f"{MODEL}.toml"
    return [problem.line() for problem in lint_file(path, here, load_schema())]


def test_evidence_that_a_run_gave_passes_lint(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verify(here, monkeypatch, status())
    recipe = here / "recipes" / f"{MODEL}.toml"
    recipe.write_text(RECIPE + found["section"])
    assert 'status = "verified"' in found["section"] and 'gpu = "NVIDIA H200"' in found["section"]
    assert problems(here) == []
    text = Path(found["path"]).read_text()
    assert "secret" not in text and "/home" not in text
    assert json.loads(text)["run"]["args"] == {"--max-model-len": 32768}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"verdict": "right"', '"verdict": "wrong"', "another report than the one that its sha256"),
        ('"canary": "passed"', '"canary": "failed"', "did not pass"),
        (f'"model": "{MODEL}",\n "target"', '"model": "acme/Other",\n "target"', "acme/Other"),
        ('"gpu": "NVIDIA H200"', '"gpu": "NVIDIA H100"', "does not name"),
        ('"format": 1', '"format": 1 "', "is not evidence"),
    ],
    ids=["report", "run", "model", "GPU", "JSON"],
)
def test_changed_evidence_is_found(
    here: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, expected: str
) -> None:
    found = verify(here, monkeypatch, status())
    (here / "recipes" / f"{MODEL}.toml").write_text(RECIPE + found["section"])
    path = Path(found["path"])
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert [expected in line for line in problems(here)] == [True]


def test_a_section_of_another_hash_or_without_its_file_is_found(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verify(here, monkeypatch, status())
    digest, recipe = found["evidence"]["report_sha256"], here / "recipes" / f"{MODEL}.toml"
    recipe.write_text(RECIPE + found["section"].replace(digest, "0" * 64))
    assert "which the evidence does not name" in problems(here)[0]
    recipe.write_text(RECIPE + found["section"])
    Path(found["path"]).unlink()
    assert "cannot be read" in problems(here)[0]


@pytest.mark.parametrize(
    ("said", "place", "code"),
    [
        (status(state="starting"), {}, ExitCode.CANARY),
        (status(canary={"verdict": "failed", "findings": []}), {}, ExitCode.CANARY),
        (status(build="other"), {}, ExitCode.CONFIG),
        (status(), {"target": "gb10"}, ExitCode.CONFIG),
        (status(plan={}), {}, ExitCode.CONFIG),
        ({"state": "ready"}, {}, ExitCode.CONFIG),
        (status(), {"wrong": ("decode",)}, ExitCode.CANARY),
    ],
    ids=["not ready", "canary", "build", "target", "plan", "status", "self-test"],
)
def test_what_did_not_pass_or_is_of_another_machine_gives_no_evidence(
    here: Path, monkeypatch: pytest.MonkeyPatch, said: Any, place: Any, code: ExitCode
) -> None:
    with pytest.raises(NibbleError) as refused:
        verify(here, monkeypatch, said, **place)
    assert refused.value.code is code
    assert not list((here / "recipes").rglob("*.json"))


def test_the_command_prints_the_lines(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_evidence, "read_status", lambda environ: status())
    words = ["verify", MODEL, "--report", str(report_file(here))]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and done.stdout.startswith("[target.hopper]")

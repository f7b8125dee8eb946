"""`nibble bundle` with a stand-in for the container engine: files, checksums, refusals."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from nibble.bundle.model_files import files_of, write_model
from nibble.bundle.write import write_bundle
from nibble.errors import ExitCode, NibbleError

ENGINE = r"""#!/usr/bin/env bash
case $1 in
  image) [[ $3 == nibble:cpu ]] || { echo "Error: No such image: $3" >&2; exit 1; }
    echo '[{"Id": "sha256:1", "Size": 1000, "Config": {"Labels": {"ai.nibble.target": "cpu"}}}]' ;;
  save) echo archive >"$3" ;;
  run) printf 'torch\t2.13.0\tBSD-3-Clause\n' ;;
  load) echo "$*" >>"$(dirname "$0")/loaded" ;;
esac
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "engine"
    program.write_text(ENGINE)
    program.chmod(0o755)
    return {"DOCKER": str(program), "PATH": "/usr/bin:/bin", "HF_HUB_CACHE": str(tmp_path / "hub")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "weights").write_text("weights")
    return folder


def test_a_bundle_has_image_model_licences_scripts_and_valid_checksums(
    tmp_path: Path, environ: dict[str, str], model: Path
) -> None:
    to = tmp_path / "bundle"
    made = write_bundle(str(model), None, to, "nibble:cpu", environ, lambda _: None)
    assert made.model.word == "/models/my-model" and made.image.target == "cpu"
    assert (to / "models/my-model/sub/weights").read_text() == "weights"
    assert "MODEL=/models/my-model\n" in (to / "bundle.env").read_text()
    assert "BSD-3-Clause" in (to / "licences/packages.tsv").read_text()
    assert json.loads((to / "bundle.json").read_text())["image"]["name"] == "nibble:cpu"
    listed = {line.split("  ")[1] for line in (to / "SHA256SUMS").read_text().splitlines()}
    present = {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()}
    assert listed == present - {"SHA256SUMS"}


def install(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "install.sh")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_install_loads_the_image_and_refuses_a_changed_file(
    tmp_path: Path, environ: dict[str, str], model: Path
) -> None:
    to = tmp_path / "bundle"
    write_bundle(str(model), None, to, "nibble:cpu", environ, lambda _: None)
    assert install(to, environ).returncode == 0
    assert (tmp_path / "loaded").read_text() == "load --quiet --input image.tar\n"
    (to / "image.tar").write_text("changed")
    result = install(to, environ)
    assert result.returncode == 6 and "was changed" in result.stderr
    assert (tmp_path / "loaded").read_text().count("\n") == 1


def test_a_hub_model_keeps_its_id_revision_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, commit = tmp_path / "hub/models--org--name", "a" * 40
    snapshot = storage / "snapshots" / commit
    for folder in (snapshot, storage / "blobs", storage / "refs"):
        folder.mkdir(parents=True)
    (storage / "blobs/123").write_text("{}")
    (storage / "blobs/of-another-revision").write_text("old")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (storage / "refs/main").write_text(commit)
    (storage / "refs/other").write_text("b" * 40)

    class Found:
        path = snapshot

    monkeypatch.setattr("nibble.bundle.model_files.pull", lambda *_: Found)
    files = files_of("org/name", None, {})
    write_model(files, tmp_path / "out")
    copy = tmp_path / "out/huggingface/hub/models--org--name"
    assert files.word == "org/name" and files.revision == commit
    assert (copy / "snapshots" / commit / "config.json").read_text() == "{}"
    assert (copy / "snapshots" / commit / "config.json").is_symlink()
    assert [path.name for path in (copy / "refs").iterdir()] == ["main"]
    assert [path.name for path in (copy / "blobs").iterdir()] == ["123"]


def test_a_model_of_the_image_needs_no_copy(tmp_path: Path) -> None:
    files = files_of("nibble-demo-nvfp4", None, {})
    assert files.word == "nibble-demo-nvfp4" and not files.copies


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"image_name": "other:1"}, ExitCode.CONFIG, "has no image other:1"),
        ({"model": "/nowhere/at/all"}, ExitCode.MODEL, "neither a folder nor a model"),
        ({"folder": "existing"}, ExitCode.CONFIG, "exists"),
        ({"room": 0}, ExitCode.NO_FIT, "the bundle takes"),
    ],
)
def test_what_cannot_be_bundled_is_refused_and_leaves_nothing(
    tmp_path: Path, environ: dict[str, str], model: Path, change: dict[str, str],
    code: ExitCode, text: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "existing").mkdir()
    if "room" in change:
        monkeypatch.setattr("nibble.bundle.write.free_bytes", lambda _: 0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(NibbleError) as caught:
        write_bundle(
            change.get("model", str(model)), None, tmp_path / change.get("folder", "bundle"),
            change.get("image_name", "nibble:cpu"), environ, lambda _: None,
        )  # fmt: skip
    assert caught.value.code == code and text in caught.value.line()
    assert sorted(tmp_path.iterdir()) == before


def test_an_engine_that_does_not_answer_is_not_taken_for_one_without_the_image(
    tmp_path: Path, environ: dict[str, str], model: Path
) -> None:
    cannot = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock"
    Path(environ["DOCKER"]).write_text(f"#!/bin/sh\necho '{cannot}' >&2\nexit 1\n")
    with pytest.raises(NibbleError) as caught:
        write_bundle(str(model), None, tmp_path / "bundle", "nibble:cpu", environ, lambda _: None)
    assert caught.value.code == ExitCode.NO_HARDWARE
    assert f"does not answer: {cannot}" in caught.value.line()
    assert "systemctl start docker" in caught.value.action and "build.sh" not in caught.value.line()


def test_without_a_container_engine_the_error_says_where_to_run_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NibbleError) as caught:
        write_bundle(str(model), None, tmp_path / "bundle", "nibble:cpu", {}, lambda _: None)
    assert caught.value.code == ExitCode.NO_HARDWARE
    assert "neither docker nor podman" in caught.value.line()
    assert "on the machine that has the image" in caught.value.action


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, environ: dict[str, str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nibble.bundle.write.write_model", full)
    with pytest.raises(NibbleError) as caught:
        write_bundle(str(model), None, tmp_path / "bundle", "nibble:cpu", environ, lambda _: None)
    assert caught.value.code == ExitCode.NO_FIT and "No space left" in caught.value.line()
    assert not [path for path in tmp_path.iterdir() if "bundle" in path.name]

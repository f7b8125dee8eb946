"""The metadata-only `vllm` wheel."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import subprocess
import sys
import zipfile
from pathlib import Path

from setup import pins, shim


def test_the_shim_is_named_for_the_pinned_vllm_and_says_cpu(tmp_path: Path):
    assert shim.build(tmp_path).name == f"vllm-{pins.VLLM_VERSION}+cpu-py3-none-any.whl"


def test_the_shim_holds_metadata_only(tmp_path: Path):
    with zipfile.ZipFile(shim.build(tmp_path)) as wheel:
        folders = {Path(name).parent.name for name in wheel.namelist()}
        names = {Path(name).name for name in wheel.namelist()}
    assert folders == {"vllm-0.32.0+cpu.dist-info"}
    assert names == {"METADATA", "WHEEL", "RECORD"}


def test_the_shim_says_whose_it_is(tmp_path: Path):
    with zipfile.ZipFile(shim.build(tmp_path)) as wheel:
        metadata = wheel.read("vllm-0.32.0+cpu.dist-info/METADATA").decode()
    assert "Summary: nibble: metadata-only stand-in" in metadata


def test_the_record_has_the_true_hash_and_size_of_every_file(tmp_path: Path):
    with zipfile.ZipFile(shim.build(tmp_path)) as wheel:
        record = list(
            csv.reader(io.StringIO(wheel.read("vllm-0.32.0+cpu.dist-info/RECORD").decode()))
        )
        assert {row[0] for row in record} == set(wheel.namelist())
        for name, recorded, size in record:
            if name.endswith("RECORD"):
                continue
            data = wheel.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (recorded, int(size)) == (f"sha256={digest}", len(data))


def test_the_same_source_gives_the_same_bytes(tmp_path: Path):
    assert shim.build(tmp_path / "a").read_bytes() == shim.build(tmp_path / "b").read_bytes()


def test_pip_installs_the_shim_and_python_finds_its_version(tmp_path: Path):
    wheel, target = shim.build(tmp_path), tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = importlib.metadata.distributions(path=[str(target)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert not (target / "vllm").exists()

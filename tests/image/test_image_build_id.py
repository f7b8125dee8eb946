"""The build id of an image says what is in it: its parts are those of the checkout that it was built from."""

from __future__ import annotations

import hashlib
import json

import pytest
from containers import docker
from images import ROOT

from nibble.build_id import part_files

pytestmark = pytest.mark.docker
ASK = "import json; from nibble.build_id import FILES, part_files; print(json.dumps({n: dict(part_files(n)) for n in FILES}))"


def test_the_parts_of_the_image_are_those_of_the_checkout(cpu_image: str) -> None:
    words = ["run", "--rm", "--entrypoint", "/opt/venv/bin/python", cpu_image, "-c", ASK]
    image = json.loads(docker(*words).stdout.splitlines()[-1])
    for part in ("nibble", "vllm files", "patches"):
        assert image[part] == part_files(part), part
    kernels = ROOT / "kernels"
    sources = {name: value for name, value in image["kernels"].items() if not name.endswith(".so")}
    assert image["kernels"]["_cpu.abi3.so"] == "compiled"
    for name, value in sources.items():
        path = (
            kernels / name
            if name.startswith(("src/", "setup.py"))
            else kernels / "src" / "nibble_kernels" / name
        )
        assert hashlib.sha256(path.read_bytes()).hexdigest() == value, name

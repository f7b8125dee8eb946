"""The build id of an image says what is in it: its parts are those of the checkout that it was
built from.
"""

from __future__ import annotations

import hashlib
import json
import subprocess

import pytest

from nibble.engine.installed import part_files
from tests.support.docker.containers import builder, docker
from tests.support.paths import ROOT

pytestmark = pytest.mark.docker
IDS = "from nibble.engine.installed import build_id, compiled_id; print(build_id(), compiled_id())"
ASK = (
    "import json; from nibble.engine.installed import FILES, part_files; print(json.dumps({n:"
    " dict(part_files(n)) for n in FILES}))"
)


def test_the_parts_of_the_image_are_those_of_the_checkout(cpu_image: str) -> None:
    words = ["run", "--rm", "--entrypoint", "/opt/venv/bin/python", cpu_image, "-c", ASK]
    image = json.loads(docker(*words).stdout.splitlines()[-1])
    for part in ("nibble", "plugin", "vllm files", "patches"):
        assert image[part] == part_files(part), part
    kernels = ROOT / "kernels"
    sources = {name: value for name, value in image["kernels"].items() if not name.endswith(".so")}
    assert image["kernels"]["_cpu.abi3.so"] == "compiled"
    for name, value in sources.items():
        path = (
            kernels / name
            if name.startswith(("src/", "setup.py", "cross_build.py"))
            else kernels / "src" / "nibble_kernels" / name
        )
        assert hashlib.sha256(path.read_bytes()).hexdigest() == value, name


@pytest.fixture(scope="module")
def rebuilt_image(cpu_image: str, build_environ: dict[str, str], base_image: str) -> str:
    """The same source on another base, so that every step runs again, at another time."""
    base = f"{base_image.partition(':')[0]}:rebuilt"
    lines = f"FROM {base_image}\nRUN touch /rebuilt\n"
    command = [builder(), "build", "--quiet", "--tag", base, "-"]
    subprocess.run(command, input=lines, text=True, check=True, capture_output=True, timeout=300)
    environ = build_environ | {"BASE_IMAGE": base, "IMAGE": "nibble-test-rebuilt"}
    words = [str(ROOT / "build.sh"), "cpu"]
    done = subprocess.run(
        words, env=environ, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, f"build.sh cpu\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return "nibble-test-rebuilt:cpu"


def said(image: str, *words: str) -> str:
    return docker("run", "--rm", image, *words).stdout


@pytest.mark.slow
def test_two_images_of_one_source_are_the_same_build_and_have_the_same_caches(
    cpu_image: str, rebuilt_image: str
) -> None:
    first, second = (
        docker("image", "inspect", "--format", "{{.Id}}", one).stdout
        for one in (cpu_image, rebuilt_image)
    )
    assert first != second
    assert said(cpu_image, "python", "-c", IDS) == said(rebuilt_image, "python", "-c", IDS)
    plans = [
        json.loads(said(one, "plan", "nibble-demo-nvfp4", "--json"))
        for one in (cpu_image, rebuilt_image)
    ]
    for part in ("env", "cache_entries"):
        assert plans[0][part] == plans[1][part], part
    assert "/var/cache/nibble/engine/graphs-" in plans[0]["env"]["VLLM_CACHE_ROOT"]["value"]

"""Which form of nibble-kernels the installer tries, from what a machine has; what installs it
for real is in tests/e2e.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from setup import kernels, main, venv
from setup.decide import SetupError
from setup.kernels import KernelsInstallation, Machine
from setup.pip_runner import Pip

NOTHING = Machine("cpu", compiler="", nvcc="", gpus="", chosen_wheel="")
GPU = Machine(
    "cuda", compiler="/usr/bin/g++-12", nvcc="/usr/local/cuda/bin/nvcc", gpus="", chosen_wheel=""
)


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of wheels in the place of the checkout's."""
    monkeypatch.setattr(kernels, "WHEELS", tmp_path / "dist")
    return tmp_path / "dist"


def wheel(folder: Path, age_seconds: float = -10, machine: str = platform.machine()) -> Path:
    """A file named like a wheel, changed so long before the newest source (less than 0: after
    it).
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"nibble_kernels-0.1.0-cp311-abi3-linux_{machine}.whl"
    path.touch()
    newest = max(source.stat().st_mtime for source in kernels.sources())
    os.utime(path, (newest - age_seconds, newest - age_seconds))
    return path


def installation(tmp_path: Path, machine: Machine, *targets: str) -> KernelsInstallation:
    made = KernelsInstallation(
        tmp_path / "venv", Pip(tmp_path / "python", tmp_path / "log"), machine
    )
    made.targets = {
        name: {"hopper": "9.0a", "gb10": "12.0f"}.get(name, "") for name in targets or ("cpu",)
    }
    return made


def forms(tmp_path: Path, machine: Machine, *targets: str) -> list[str]:
    return [form.what for form in installation(tmp_path, machine, *targets)._forms()]


def test_compilers_are_found_on_the_path_and_named_by_what_they_really_are(tmp_path: Path):
    real = program(tmp_path / "bin" / "g++-12")
    (tmp_path / "bin" / "c++").symlink_to(real)
    assert kernels.look("cpu", {"PATH": str(tmp_path / "bin")}).compiler == str(real)
    assert kernels.look("cpu", {"PATH": str(tmp_path)}).compiler == ""


def test_cxx_names_another_compiler_and_an_absent_one_is_none(tmp_path: Path):
    real = program(tmp_path / "clang")
    assert kernels.look("cpu", {"PATH": "", "CXX": str(real)}).compiler == str(real)
    assert (
        kernels.look("cpu", {"PATH": os.environ["PATH"], "CXX": "no-such-compiler"}).compiler == ""
    )


def test_nvcc_matters_to_the_cuda_runtime_only(tmp_path: Path):
    program(tmp_path / "c++")
    nvcc = program(tmp_path / "cuda" / "bin" / "nvcc")
    environ = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}
    assert kernels.look("cuda", environ).nvcc == str(nvcc)
    assert kernels.look("cpu", environ).nvcc == ""


def test_the_user_can_have_nothing_compiled(tmp_path: Path, dist: Path):
    program(tmp_path / "c++")
    machine = kernels.look("cpu", {"PATH": str(tmp_path), "NIBBLE_KERNELS_COMPILE": "0"})
    assert forms(tmp_path, machine) == ["installing plain torch code"]


def test_without_compiler_or_wheel_plain_torch_is_the_only_form(tmp_path: Path, dist: Path):
    assert forms(tmp_path, NOTHING) == ["installing plain torch code"]


def test_a_gpu_with_nvcc_is_compiled_for_then_the_cpu_alone_then_nothing(
    tmp_path: Path, dist: Path
):
    made = list(installation(tmp_path, GPU, "hopper", "gb10")._forms())
    assert [form.environ for form in made] == [
        {"TORCH_CUDA_ARCH_LIST": "12.0f;9.0a"},
        {"TORCH_CUDA_ARCH_LIST": ""},
        {"NIBBLE_KERNELS_COMPILE": "0"},
    ]
    assert [form.devices for form in made] == [("cpu", "cuda"), ("cpu",), ()]


def test_the_wheel_of_this_machines_target_comes_first(tmp_path: Path, dist: Path):
    wheel(dist / "cpu")
    found = wheel(dist / "hopper")
    assert forms(tmp_path, GPU, "hopper")[0] == f"the wheel {found}"
    assert forms(tmp_path, GPU, "gb10")[0] == "compiling CUDA"


def test_a_wheel_older_than_the_sources_is_not_taken(tmp_path: Path, dist: Path):
    wheel(dist / "cpu", age_seconds=10)
    assert forms(tmp_path, NOTHING) == ["installing plain torch code"]


def test_a_wheel_for_another_processor_is_not_taken(tmp_path: Path, dist: Path):
    wheel(dist / "cpu", machine="riscv64")
    assert forms(tmp_path, NOTHING) == ["installing plain torch code"]


def test_a_wheel_that_was_named_is_taken_whatever_its_age(tmp_path: Path, dist: Path):
    named = wheel(tmp_path / "elsewhere", age_seconds=1e6)
    machine = kernels.look("cpu", {"PATH": "", "NIBBLE_KERNELS_WHEEL": str(named)})
    assert forms(tmp_path, machine) == [f"the wheel {named}", "installing plain torch code"]


def test_a_named_wheel_that_is_not_there_is_a_usage_error(tmp_path: Path, dist: Path):
    machine = kernels.look("cpu", {"PATH": "", "NIBBLE_KERNELS_WHEEL": "/no/such.whl"})
    with pytest.raises(
        SetupError, match=r"NIBBLE_KERNELS_WHEEL: /no/such\.whl is not a wheel"
    ) as caught:
        forms(tmp_path, machine)
    assert caught.value.code == 2


def test_the_build_is_in_a_copy_that_keeps_what_was_compiled_and_nothing_else(
    tmp_path: Path, dist: Path
):
    copy = tmp_path / "venv" / "nibble-setup" / "kernels"
    for path in ("src/nibble_kernels/gone.py", "build/lib.x/gone.py", "build/temp.x/kept.o"):
        (copy / path).parent.mkdir(parents=True)
        (copy / path).touch()
    forms(tmp_path, NOTHING)
    assert [path.name for path in copy.rglob("*") if path.name in {"gone.py", "kept.o"}] == [
        "kept.o"
    ]
    for source in kernels.sources():
        copied = copy / source.relative_to(kernels.KERNELS)
        assert copied.stat().st_mtime_ns == source.stat().st_mtime_ns, (
            "ninja compiles what is newer than its object"
        )


def key(tmp_path: Path, **environ: str) -> str:
    folder = tmp_path / "venv"
    return main.Installation(main.parse(["--venv", str(folder), "--runtime", "cpu"]))._wanted()[
        "kernels"
    ]


def test_a_compiler_that_appears_a_newer_wheel_and_a_changed_source_each_make_it_stale(
    tmp_path: Path, dist: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "KERNELS", tmp_path / "kernels")
    source = tmp_path / "kernels" / "src" / "nibble_kernels" / "a" / "cpu.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("int one;\n")
    monkeypatch.setenv("PATH", "")
    seen = [key(tmp_path)]
    assert key(tmp_path) == seen[0]
    program(tmp_path / "bin" / "c++")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    seen.append(key(tmp_path))
    wheel(dist / "cpu")
    seen.append(key(tmp_path))
    source.write_text("int two;\n")
    seen.append(key(tmp_path))
    assert len(set(seen)) == len(seen)


def test_a_form_that_failed_is_tried_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The user fixes the compiler and runs `make setup` again, as the sentence says."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    made = main.Installation(main.parse(["--venv", str(folder), "--runtime", "cpu"]))
    wanted = made._wanted()
    venv.write_stamp(folder, {**wanted, "kernels": ""})
    for settled in (False, True):
        monkeypatch.setattr(
            KernelsInstallation, "run", lambda self, settled=settled: ("kernels: …", settled)
        )
        made.unsettled.clear()
        made.run()
        assert (venv.read_stamp(folder).get("kernels") == wanted["kernels"]) is settled

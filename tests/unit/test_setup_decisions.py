"""The installer's pure parts: which runtime, from where, and what makes an installation stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from setup import decide, pins
from setup.decide import OfficialWheel, SetupError

SHA = "a" * 64


def runtime(asked: str, *signs: str, nvidia_smi: bool = True) -> str:
    return decide.choose_runtime(asked, lambda path: path in signs, nvidia_smi).value


def test_a_machine_with_an_nvidia_device_gets_the_cuda_runtime():
    choice = decide.choose_runtime("auto", lambda path: path == "/dev/nvidia0", False)
    assert (choice.value, choice.reason) == ("cuda", "/dev/nvidia0 is here")


def test_a_machine_without_one_gets_the_cpu_runtime():
    assert runtime("auto") == "cpu"


def test_wsl_without_an_nvidia_driver_gets_the_cpu_runtime():
    assert runtime("auto", "/dev/dxg", nvidia_smi=False) == "cpu"
    assert runtime("auto", "/dev/dxg", nvidia_smi=True) == "cuda"


@pytest.mark.parametrize("asked", ["cpu", "cuda"])
def test_an_explicit_runtime_beats_what_is_found(asked: str):
    assert runtime(asked) == runtime(asked, "/dev/nvidia0") == asked


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64"), ("Windows", "AMD64")]
)
def test_a_machine_without_vllm_wheels_is_refused_as_no_hardware(system: str, machine: str):
    with pytest.raises(SetupError, match=f"{system} {machine}") as caught:
        decide.check_machine(system, machine)
    assert caught.value.code == 3


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_on_both_architectures_is_accepted(machine: str):
    decide.check_machine("Linux", machine)


def test_no_official_wheel_is_named_by_an_unset_or_empty_variable():
    assert decide.parse_official_wheel(None) is decide.parse_official_wheel("") is None


def test_the_official_wheel_of_a_url_becomes_a_requirement_with_its_hash():
    url = "https://example.org/vllm-0.32.0%2Bcpu-cp38-abi3-linux_x86_64.whl"
    wheel = decide.parse_official_wheel(f"{url}#sha256={SHA.upper()}")
    assert wheel is not None and wheel == OfficialWheel(url, SHA)
    assert wheel.requirement() == f"vllm @ {url} --hash=sha256:{SHA}\n"


def test_the_official_wheel_of_a_path_becomes_a_file_url(tmp_path: Path):
    path = tmp_path / "vllm 0.whl"
    path.touch()
    wheel = decide.parse_official_wheel(f"{path}#sha256={SHA}")
    assert wheel is not None
    assert wheel.url == f"file://{tmp_path}/vllm%200.whl"


@pytest.mark.parametrize(
    "value",
    [
        "https://example.org/vllm.whl",
        "https://example.org/vllm.whl#sha256=",
        f"https://example.org/vllm.whl#sha256={SHA[:-1]}",
        f"https://example.org/vllm.whl#md5={SHA}",
        f"https://example.org/vllm.tar.gz#sha256={SHA}",
        f"/no/such/vllm.whl#sha256={SHA}",
    ],
)
def test_an_official_wheel_that_cannot_be_checked_is_a_usage_error(value: str):
    with pytest.raises(SetupError, match="NIBBLE_VLLM_CPU_WHEEL") as caught:
        decide.parse_official_wheel(value)
    assert caught.value.code == 2


def test_torch_is_looked_for_at_pytorchs_index_first_and_then_where_pip_is_configured():
    first, second = decide.torch_sources(None)
    assert first.pip_args[-2:] == ("--index-url", "https://download.pytorch.org/whl/cpu")
    assert first.probe_url == "https://download.pytorch.org/whl/cpu/torch/"
    assert (second.pip_args, second.probe_url) == ((), "")


def test_a_torch_index_that_was_named_is_the_only_one_asked():
    (source,) = decide.torch_sources("https://mirror.example/cpu")
    assert source.pip_args == ("--index-url", "https://mirror.example/cpu")


def test_a_folder_of_wheels_serves_as_torch_index_without_any_network(tmp_path: Path):
    (source,) = decide.torch_sources(str(tmp_path))
    assert source.pip_args == ("--no-index", "--find-links", str(tmp_path))


def test_the_word_pip_asks_the_configured_index_at_once():
    (source,) = decide.torch_sources("pip")
    assert (source.pip_args, source.probe_url) == ((), "")


def test_a_torch_index_that_is_no_index_is_a_usage_error():
    with pytest.raises(SetupError, match="NIBBLE_TORCH_INDEX=/no/such/folder") as caught:
        decide.torch_sources("/no/such/folder")
    assert caught.value.code == 2


def test_the_torch_that_is_asked_for_cannot_be_a_cuda_build():
    assert pins.TORCH_CPU_REQUIREMENT == "torch==2.13.0+cpu"


def test_one_package_and_its_hashes_are_taken_out_of_a_lock():
    lock = (
        f"vllm==1 \\\n    --hash=sha256:{SHA}\nvllm-cpu==2 \\\n    --hash=sha256:{SHA} \\\n   "
        " --hash=sha256:b\nwrapt==3\n"
    )
    assert (
        decide.without_package(lock, "vllm-cpu")
        == f"vllm==1 \\\n    --hash=sha256:{SHA}\nwrapt==3\n"
    )
    assert decide.without_package(lock, "vllm").startswith("vllm-cpu==2")


def test_the_stamp_changes_with_a_files_content_and_with_a_fact(tmp_path: Path):
    file = tmp_path / "cpu.lock"
    file.write_text("a")
    first = decide.stamp_key([file], {"python": "3.11"})
    assert decide.stamp_key([file], {"python": "3.11"}) == first
    assert decide.stamp_key([file], {"python": "3.12"}) != first
    file.write_text("b")
    assert decide.stamp_key([file], {"python": "3.11"}) != first


def test_a_setup_error_is_one_line_with_what_expected_and_action():
    error = SetupError(7, "1 GB is free", "5 GB", "free space")
    assert (str(error), error.code) == ("1 GB is free; expected 5 GB; free space", 7)

"""Which variables are ours, vLLM's, dead, or only look like ours."""

from __future__ import annotations

import re
import subprocess

import pytest

from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.settings.environment import OTHER_NIBBLE_NAMES, accept, nibble_names
from nibble.settings.older_guides import DEAD_VARIABLES
from nibble.settings.options import options
from nibble.settings.sources import load_settings
from tests.support.refusals import refusal_of

KNOWN = load_schema().envs


def failure(environ: dict[str, str]) -> NibbleError:
    return refusal_of(lambda: accept(environ, KNOWN, in_image=False))


def test_a_misspelled_name_is_an_error_with_the_nearest_spelling() -> None:
    error = failure({"NIBBLE_CONTOL_PORT": "8001"})
    assert error.code == ExitCode.USAGE and "did you mean NIBBLE_CONTROL_PORT?" in error.line()


def test_an_unknown_vllm_variable_is_an_error() -> None:
    error = failure({"VLLM_LOGING_LEVEL": "DEBUG"})
    assert error.code == ExitCode.CONFIG and "VLLM_LOGGING_LEVEL" in error.line()


def test_variables_of_vllm_and_of_the_ecosystem_pass() -> None:
    environ = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
    }
    accepted = accept(environ, KNOWN, in_image=False)
    assert accepted.environ == environ and not accepted.notices


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NIBBLE_SERVICE_HOST", "10.0.0.1"),
        ("NIBBLE_SERVICE_PORT", "8000"),
        ("NIBBLE_SERVICE_PORT_HTTP", "8000"),
        ("NIBBLE_PORT", "tcp://10.0.0.1:8000"),
        ("NIBBLE_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("NIBBLE_PORT_8000_TCP_PROTO", "tcp"),
        ("NIBBLE_GPU_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("NIBBLE_CONTROL_PORT", "tcp://10.0.0.1:8001"),
        ("VLLM_SERVICE_HOST", "10.0.0.1"),
        ("VLLM_PORT", "tcp://10.0.0.1:8000"),
    ],
)
def test_kubernetes_service_links_are_dropped_with_a_notice(name: str, value: str) -> None:
    accepted = accept({name: value}, KNOWN, in_image=False)
    assert name not in accepted.environ
    assert len(accepted.notices) == 1 and name in accepted.notices[0]


@pytest.mark.parametrize("name", ["NIBBLE_CONTROL_PORT", "VLLM_PORT"])
def test_a_port_that_is_a_number_is_not_a_service_link(name: str) -> None:
    assert accept({name: "8123"}, KNOWN, in_image=False).environ == {name: "8123"}


def test_a_misspelled_port_is_not_mistaken_for_a_service_link() -> None:
    assert failure({"NIBBLE_CONTRL_PORT": "8001"}).code == ExitCode.USAGE


@pytest.mark.parametrize("host", ["mybox", "x86_64-linux-gnu"])
def test_a_native_host_that_is_no_address_is_ignored(host: str) -> None:
    accepted = accept({"HOST": host}, KNOWN, in_image=False)
    assert "HOST" not in accepted.environ and host in accepted.notices[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "192.168.1.5"])
def test_a_host_that_is_an_address_is_kept(host: str) -> None:
    assert accept({"HOST": host}, KNOWN, in_image=False).environ["HOST"] == host


def test_in_the_image_host_is_taken_as_it_is() -> None:
    assert accept({"HOST": "mybox"}, KNOWN, in_image=True).environ["HOST"] == "mybox"


def test_dead_variables_are_absent_from_the_installed_vllm() -> None:
    assert not set(DEAD_VARIABLES) & KNOWN


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("VLLM_NVFP4_GEMM_BACKEND", "marlin", {"--linear-backend": "marlin"}),
        (
            "VLLM_NVFP4_GEMM_BACKEND",
            "flashinfer-cutlass",
            {"--linear-backend": "flashinfer_cutlass"},
        ),
        ("VLLM_ATTENTION_BACKEND", "triton_attn", {"--attention-backend": "TRITON_ATTN"}),
        ("VLLM_TEST_FORCE_FP8_MARLIN", "1", {"--moe-backend": "marlin"}),
        ("VLLM_USE_FLASHINFER_MOE_FP4", "1", {"--moe-backend": "flashinfer_cutlass"}),
        ("VLLM_USE_FLASHINFER_MOE_FP4", "0", {}),
        ("VLLM_FLASHINFER_MOE_BACKEND", "latency", {"--moe-backend": "flashinfer_trtllm"}),
        ("VLLM_USE_TRTLLM_ATTENTION", "0", {"--attention-config": {"use_trtllm_attention": False}}),
    ],
)
def test_a_dead_variable_becomes_todays_flag_with_a_notice(
    name: str, value: str, flags: dict[str, object]
) -> None:
    accepted = accept({name: value}, KNOWN, in_image=False)
    assert accepted.flags == flags and name not in accepted.environ
    assert name in accepted.notices[0]
    assert all(flag in accepted.notices[0] for flag in flags)


def test_the_variables_of_seed_002_become_the_backends_it_meant() -> None:
    environ = {
        "VLLM_USE_FLASHINFER_MOE_FP4": "0",
        "VLLM_TEST_FORCE_FP8_MARLIN": "1",
        "VLLM_NVFP4_GEMM_BACKEND": "marlin",
    }
    flags = accept(environ, KNOWN, in_image=True).flags
    assert flags == {"--moe-backend": "marlin", "--linear-backend": "marlin"}


def test_a_named_backend_wins_over_a_switch() -> None:
    environ = {"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_FLASHINFER_MOE_BACKEND": "latency"}
    assert accept(environ, KNOWN, in_image=True).flags == {"--moe-backend": "flashinfer_trtllm"}


def test_every_variable_of_a_serve_script_for_rtx_pro_6000_takes_effect_or_is_refused() -> None:
    """The names that serve_glm47_nvfp4_vllm.sh reads; HF_HUB_OFFLINE is huggingface_hub's."""
    script = {
        "MODEL_PATH": "/models/glm",
        "TP": "4",
        "GPU_MEM_UTIL": "0.80",
        "DTYPE": "bfloat16",
        "QUANTIZATION": "modelopt_fp4",
        "ATTENTION_BACKEND": "triton_attn",
    }
    accepted = accept(script, KNOWN, in_image=False)
    assert accepted.flags == {
        "--dtype": "bfloat16",
        "--quantization": "modelopt_fp4",
        "--attention-backend": "TRITON_ATTN",
    }
    assert len(accepted.notices) == 3
    settings = load_settings({}, accepted.environ).settings
    assert settings.model == "/models/glm"
    assert settings.tensor_parallel_size == 4 and settings.gpu_memory_util == 0.8
    assert "VLLM_PYTHON" in failure({"VLLM_PYTHON": "/usr/bin/python3"}).line()


@pytest.mark.parametrize(
    ("first", "second"),
    [("TENSOR_PARALLEL_SIZE", "TP"), ("GPU_MEMORY_UTIL", "GPU_MEM_UTIL"), ("MODEL", "MODEL_PATH")],
)
def test_two_names_of_one_option_must_agree(first: str, second: str) -> None:
    with pytest.raises(NibbleError) as caught:
        load_settings({}, {first: "1", second: "0.5"})
    assert caught.value.code == ExitCode.CONFIG
    assert first in caught.value.line() and second in caught.value.line()


@pytest.mark.parametrize(
    "name", ["VLLM_NVFP4_SPARSE_V7", "VLLM_RPC_TIMEOUT", "VLLM_MEMORY_PROFILE_INCLUDE_ATTN"]
)
def test_a_dead_variable_without_a_successor_is_an_error_naming_it(name: str) -> None:
    error = failure({name: "1"})
    assert error.code == ExitCode.CONFIG and name in error.line()


@pytest.mark.parametrize("name", ["PORT", "MODEL", "HOST"])
def test_a_name_that_has_no_prefix_is_suggested_without_it(name: str) -> None:
    assert f"did you mean {name}?" in failure({f"NIBBLE_{name}": "1"}).line()


def test_every_option_name_is_known() -> None:
    for option in options().values():
        assert set(option.env) <= nibble_names()
    assert set(OTHER_NIBBLE_NAMES) <= nibble_names()


def test_every_name_with_our_prefix_that_the_repository_uses_is_known() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=root(), capture_output=True, text=True, check=True
    ).stdout.split()
    used: dict[str, str] = {}
    for name in files:
        path = root() / name
        if (
            name.startswith(("tests/", "benchmarks/"))
            or name in ("CHANGELOG.md", "docs/bad-input.md")
            or path.suffix
            in (
                ".json",
                ".safetensors",
                ".lock",
                ".cpp",
                ".cu",
                ".h",
                ".cuh",
            )  # macros
        ):
            continue
        for found in re.findall(r"\bNIBBLE_[A-Z][A-Z_]*[A-Z]\b", path.read_text(errors="ignore")):
            used[found] = name
    links = {"NIBBLE_PORT", "NIBBLE_SERVICE_HOST", "NIBBLE_PORT_8000_TCP", "NIBBLE_SCRIPT_MODEL"}
    assert {name: file for name, file in used.items() if name not in nibble_names() | links} == {}

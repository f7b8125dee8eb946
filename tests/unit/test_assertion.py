"""What ran against what the plan expects: pure, with reports as a worker writes them."""

from __future__ import annotations

from typing import Any

import pytest

from nibble.canary.kernels import Expectation, deviations, expectations, plain_torch_on_the_cpu
from nibble.errors import ExitCode
from tests.support.canary.worker_reports import RAN, plan


def found(ran: dict[str, Any], **wishes: Any) -> list[str]:
    return [one.line() for one in deviations(expectations(plan(**wishes), {}), [RAN | ran])]


def test_what_a_target_expects_is_fine() -> None:
    assert found({}) == []


@pytest.mark.parametrize(
    ("ran", "wishes", "told"),
    [
        ({"linear": {"nvfp4: EmulationNvFp4LinearKernel": 144}}, {}, "EmulationNvFp4LinearKernel ran"),  # noqa: E501
        ({"linear": {"nvfp4: CutlassNvFp4LinearKernel": 144}}, {}, "CutlassNvFp4LinearKernel ran, expected Nibble"),  # noqa: E501
        ({}, {"linear_backend": "marlin"}, "expected marlin (--linear-backend (command line))"),
        ({"moe": {"nvfp4: EMULATION EmulationExperts": 36}}, {"expected": {"attention": "FLASH"}}, "EmulationExperts ran"),  # noqa: E501
        ({}, {"additional_config": {"nibble": {"linear_kernel": "nibble"}}}, "expected NibbleNvFp4LinearKernel (linear_kernel"),  # noqa: E501
        ({}, {"additional_config": {"nibble": {"moe_kernel": "nibble"}}}, "expected NibbleModelOptNvFp4MoE or Nibble"),  # noqa: E501
        ({}, {"expected": {"moe": "FLASHINFER_CUTLASS"}}, "expected FLASHINFER_CUTLASS (recipe org/model)"),  # noqa: E501
        ({}, {"attention_backend": "TRITON_ATTN"}, "attention: FLASH_ATTN ran"),
        ({"attention": {"FLEX_ATTENTION": 36}}, {}, "attention: FLEX_ATTENTION ran, expected no slow fallback"),  # noqa: E501
        ({}, {"kv_cache_dtype": "fp8"}, "KV cache: bfloat16 ran, expected fp8"),
        ({}, {"kv": "fp8"}, "KV cache: bfloat16 ran, expected fp8 (the checkpoint)"),
        ({"kv_cache_dtype": ["fp8_e4m3"]}, {}, "KV cache: fp8_e4m3 ran, expected bfloat16"),
        ({"cudagraph_mode": "NONE", "cudagraphs_captured": 0}, {}, "CUDA graph mode: NONE (eager) ran"),  # noqa: E501
        ({"cudagraphs_captured": 0}, {}, "CUDA graphs: none captured in mode FULL_AND_PIECEWISE ran"),  # noqa: E501
        ({"cudagraph_mode": "PIECEWISE"}, {"compilation_config": {"cudagraph_mode": "FULL"}}, "expected FULL"),  # noqa: E501
        ({"compilation_mode": "NONE"}, {}, "compilation mode: NONE (eager) ran"),
        ({"compilation_mode": "NONE"}, {"optimization_level": "1"}, "compilation mode: NONE (eager) ran"),  # noqa: E501
        ({"sampler": "native"}, {}, "sampler: native ran, expected flashinfer"),
        (
            {"linear": {"nvfp4: NibbleNvFp4LinearKernel": 144}, "operators": {"cuda": "not compiled when it was installed"}},  # noqa: E501
            {},
            "plain torch code (not compiled when it was installed) ran",
        ),
        (
            {"linear": {"other: Quartet2LinearMethod": 48}, "operators": {"cuda": "does not load: other torch"}},  # noqa: E501
            {},
            "plain torch code (does not load: other torch) ran",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_as_expected_is_told(
    ran: dict[str, Any], wishes: dict[str, Any], told: str
) -> None:
    lines = found(ran, **wishes)
    assert len(lines) == 1
    assert told in lines[0]


@pytest.mark.parametrize(
    ("ran", "wishes"),
    [
        ({"linear": {"nvfp4: EmulationNvFp4LinearKernel": 144}}, {"linear_backend": "emulation"}),
        ({"linear": {"nvfp4: NibbleNvFp4LinearKernel": 100, "nvfp4: HummingNvFp4LinearKernel": 44}}, {}),  # noqa: E501
        ({"linear": {"other: FlashInferFP8ScaledMMLinearKernel": 36}}, {}),
        ({"linear": {"nvfp4: NibbleNvFp4LinearKernel": 144, "draft head: MarlinNvFp4LinearKernel": 1}}, {}),  # noqa: E501
        ({"moe": {"nvfp4: VLLM_CUTLASS CutlassExpertsFp4": 36}}, {"moe_backend": "cutlass"}),
        ({"kv_cache_dtype": ["fp8_e4m3"]}, {"kv_cache_dtype": "fp8"}),
        ({"kv_cache_dtype": ["bfloat16", "fp8_e4m3"]}, {"kv": "fp8"}),
        ({"cudagraph_mode": "NONE", "cudagraphs_captured": 0, "compilation_mode": "NONE"}, {"enforce_eager": True}),  # noqa: E501
        ({"cudagraph_mode": "NONE", "cudagraphs_captured": 0, "compilation_mode": "NONE"}, {"optimization_level": "0"}),  # noqa: E501
        ({"attention": {"FLASH_ATTN": 9, "GDN_ATTN": 27}}, {"attention_backend": "FLASH_ATTN"}),
        ({"attention": {"FLEX_ATTENTION": 36}}, {"attention_backend": "flex_attention"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_asked_for_or_has_no_rule_is_fine(
    ran: dict[str, Any], wishes: dict[str, Any]
) -> None:
    assert found(ran, **wishes) == []


ON_THE_CPU = RAN | {
    "device": "cpu",
    "linear": {"nvfp4: CpuNvFp4LinearKernel": 16},
    "moe": {},
    "attention": {"CPU_ATTN": 4},
    "sampler": "forward_cpu",
    "cudagraph_mode": "NONE",
    "cudagraphs_captured": 0,
    "operators": {"cpu": "not compiled when it was installed"},
}


@pytest.mark.parametrize("kernel", ["nvfp4: CpuNvFp4LinearKernel", "other: Quartet2LinearMethod"])
def test_plain_torch_on_the_cpu_is_told_in_one_line_and_no_deviation(kernel: str) -> None:
    reports = [ON_THE_CPU | {"linear": {kernel: 16}}] * 2
    assert deviations(expectations(plan("cpu"), {}), reports) == ()
    assert (
        plain_torch_on_the_cpu(reports)
        == "nibble's kernels are plain torch code (not compiled when it was installed), much slower"
        " than compiled ones; run `make setup` or use the image"
    )


def test_compiled_kernels_and_models_that_need_none_get_no_such_line() -> None:
    compiled = ON_THE_CPU | {"operators": {"cpu": "compiled"}}
    assert plain_torch_on_the_cpu([compiled, ON_THE_CPU | {"linear": {}}]) == ""


def test_a_deviation_of_any_worker_counts_and_is_told_once() -> None:
    wrong = RAN | {"sampler": "native"}
    assert (
        len(deviations((Expectation("sampler", ("flashinfer",), "target"),), [RAN, wrong, wrong]))
        == 1
    )


def test_the_error_names_part_found_expected_and_what_to_do() -> None:
    wrong = RAN | {"linear": {"nvfp4: EmulationNvFp4LinearKernel": 1}}
    error = deviations(expectations(plan(), {}), [wrong])[0].error("ask by name")
    assert error.code == ExitCode.CANARY
    assert "nvfp4 linear layers: EmulationNvFp4LinearKernel" in error.what
    assert error.expected.startswith("NibbleNvFp4LinearKernel or ")
    assert error.action == "ask by name; set NIBBLE_KERNEL_ASSERTION=warn to serve anyway"


def test_a_user_may_switch_flashinfers_sampler_off() -> None:
    ran = RAN | {"sampler": "native"}
    assert deviations(expectations(plan(), {"VLLM_USE_FLASHINFER_SAMPLER": "0"}), [ran]) == ()

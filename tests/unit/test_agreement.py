"""What workers ran, compared with each other: pure, with reports as workers write them."""

from __future__ import annotations

from typing import Any

import pytest

from nibble.canary.agreement import disagreements
from tests.support.canary.worker_reports import RAN

FULL = RAN | {
    "stage": 0,
    "architecture": "Qwen3ForCausalLM",
    "quantization": "modelopt_fp4",
    "max_model_len": 1024,
}
FULL |= {"max_num_batched_tokens": 2048, "block_size": 16, "activations": ("fp4",)}


def ran(rank: int, node: str = "", **more: Any) -> dict[str, Any]:
    return FULL | {"rank": rank, "node": node} | more


def test_equal_workers_agree() -> None:
    assert disagreements([ran(0), ran(1), ran(2, "b")]) == ()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"linear": {}}, "linear layers: none, as rank 0: nvfp4: HummingNvFp4LinearKernel in 144 layers"),  # noqa: E501
        ({"linear": {"nvfp4: HummingNvFp4LinearKernel": 143}}, "linear layers: nvfp4: HummingNvFp4LinearKernel in 143 layers"),  # noqa: E501
        ({"moe": {}}, "experts: none"),
        ({"attention": {"FLASHINFER": 36}}, "attention: FLASHINFER in 36 layers, as rank 0: FLASH_ATTN in 36 layers"),  # noqa: E501
        ({"kv_cache_dtype": ["fp8"]}, "KV cache: fp8, as rank 0: bfloat16"),
        ({"max_model_len": 512}, "max_model_len: 512, as rank 0: 1024"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens: 512"),
        ({"block_size": 32}, "KV cache block size: 32"),
        ({"model_dtype": "float32"}, "model dtype: float32"),
        ({"activations": ("bf16",)}, "activations of NVFP4 layers: bf16, as rank 0: fp4"),
        ({"quantization": None}, "quantization: none, as rank 0: modelopt_fp4"),
        ({"architecture": "Other"}, "architecture: Other"),
        ({"compilation_mode": "NONE"}, "compilation mode: NONE"),
        ({"cudagraph_mode": "NONE"}, "CUDA graph mode: NONE"),
        ({"sampler": "native"}, "sampler: native"),
        ({"operators": {"cuda": "not compiled"}}, "nibble's operators: cuda not compiled"),
    ],
)  # fmt: skip
def test_each_difference_names_the_node_and_both_sides(changed: dict[str, Any], line: str) -> None:
    (found,) = disagreements([ran(0), ran(1, "b", **changed)])
    assert found.line().startswith(f"node b: rank 1: {line}")


def test_stages_hold_other_layers_and_only_workers_of_one_are_held_to_each_other() -> None:
    last: dict[str, Any] = {
        "stage": 1,
        "linear": {"nvfp4: X": 2},
        "attention": {"FLASH_ATTN": 2},
        "kv_cache_dtype": [],
    }
    assert disagreements([ran(0), ran(1), ran(2, "b", **last), ran(3, "b", **last)]) == ()
    (found,) = disagreements(
        [ran(0), ran(1, "b", **last), ran(2, "c", **last | {"linear": {"nvfp4: X": 3}})]
    )
    assert (
        found.line()
        == "node c: rank 2: linear layers: nvfp4: X in 3 layers, as rank 1 on node b: nvfp4: X in 2"
        " layers"
    )
    (found,) = disagreements([ran(0), ran(1, "b", **last | {"max_model_len": 512})])
    assert found.part == "max_model_len"

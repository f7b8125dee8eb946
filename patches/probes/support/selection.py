"""What vLLM's own code chooses on a pretended GPU: attention backends, NVFP4 linear and MoE
kernels, the sampler.

    python -m probes.support.selection --root TREE < cases.json      # one JSON object a case

A case is one machine and the questions to it; each is answered in a forked process, for a process
can pretend only once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nibble.engine.patching.run import NURSERY
from probes.support import fake_cuda

# flashinfer 0.7 compilation_context.py:43, the names of its targets for 9.0, 10.0, 12.0 and 12.1
ALL_TARGETS = ("sm90a", "sm100a", "sm120f", "sm121a")
TOOLCHAINS: dict[str, dict[str, Any]] = {
    "nvcc 13.0": {},
    "none": {"nvcc": None, "ninja": False},
    "nvcc 12.8": {"nvcc": "12.8"},
    "cubins": {"nvcc": None, "ninja": False, "cubin": True},
    "jit-cache": {"nvcc": None, "ninja": False, "jit_cache": ALL_TARGETS},
}


@dataclass(frozen=True)
class Case:
    """A machine, `fake_cuda.become`'s other arguments, and names of QUESTIONS."""

    capability: tuple[int, int]
    questions: Sequence[str]
    machine: Mapping[str, Any] = field(default_factory=dict)


def ask(cases: Sequence[Case], jobs: int = 2) -> list[dict[str, Any]]:
    """The answers to each case by question. `vllm` must not be imported yet; sys.path leads to
    the tree.
    """
    pool = multiprocessing.get_context("fork").Pool(min(jobs, len(cases)), maxtasksperchild=1)
    with pool:
        return pool.map(_answer, cases, chunksize=1)


def _answer(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fake-cuda-") as scratch:
        tempfile.tempdir = scratch
        fake_cuda.become(case.capability, **case.machine)
        answers = {question: QUESTIONS[question]() for question in case.questions}
        tempfile.tempdir = None
    return answers


def _attention(kv_cache_dtype: str = "auto", **layer: Any) -> list[str]:
    """The valid backends, the one that is taken first."""
    from vllm.platforms import current_platform

    selector, context = _attention_layer(kv_cache_dtype, **layer)
    with context:
        valid, _ = current_platform.get_valid_backends(  # pyright: ignore[reportOptionalCall]
            current_platform.get_device_capability(), selector, 32
        )
    return [candidate.backend.name for candidate in sorted(valid, key=lambda each: each.priority)]


def _forced_flashinfer() -> str:
    """The class `--attention-backend FLASHINFER` gives, or the message it is refused with."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    selector, context = _attention_layer("fp8")
    try:
        with context:
            return current_platform.get_attn_backend_cls(
                AttentionBackendEnum.FLASHINFER, selector, 32
            )
    except ValueError as error:
        return f"refused: {error}"


def _attention_layer(kv_cache_dtype: str, **layer: Any) -> tuple[Any, Any]:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.selector import AttentionSelectorConfig

    plain = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": None,
    }
    return AttentionSelectorConfig(**(plain | layer)), set_current_vllm_config(VllmConfig())


def _mla_refusals(backend: str, **layer: Any) -> list[str]:
    """Why an MLA backend is not taken; asked of it alone, for SM 10.x's CUTLASS_MLA allocates on
    the GPU when it is imported.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    selector, context = _attention_layer("auto", head_size=576, use_mla=True, **layer)
    with context:
        each = getattr(AttentionBackendEnum, backend).get_class()
        capability = current_platform.get_device_capability()
        return each.validate_configuration(device_capability=capability, **selector._asdict())


def _mla_prefill() -> list[str]:
    """The MLA prefill backends that would be taken for DeepSeek's dimensions, in no order."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    model = MLAPrefillSelectorConfig(
        torch.bfloat16, MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    )
    gpu = current_platform.get_device_capability()
    asked = ("FLASH_ATTN", "FLASHINFER", "TRTLLM_RAGGED")
    backends = {name: getattr(MLAPrefillBackendEnum, name).get_class() for name in asked}
    return [
        name for name, backend in backends.items() if not backend.validate_configuration(gpu, model)
    ]


def _linear(use_a16: bool = False) -> str:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel

    with set_current_vllm_config(VllmConfig()):
        kernel = init_nvfp4_linear_kernel(use_a16=use_a16)
    return type(kernel).__name__.removesuffix("LinearKernel")


def _moe(use_a16: bool = False) -> str:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import select_nvfp4_moe_backend
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kNvfp4Dynamic,
        kNvfp4Static,
    )

    with set_current_vllm_config(VllmConfig()):
        layer = config.FusedMoEConfig(
            num_experts=128,
            experts_per_token=8,
            hidden_dim=2048,
            intermediate_size=768,
            num_local_experts=128,
            num_logical_experts=128,
            activation=MoEActivation.SILU,
            device="cuda",
            in_dtype=torch.bfloat16,
            routing_method=config.RoutingMethodType.Renormalize,
            moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        )
        backend, _ = select_nvfp4_moe_backend(
            layer, kNvfp4Static, None if use_a16 else kNvfp4Dynamic
        )
    return backend.value


def _prefill_module() -> str:
    """What FlashInfer's plan() does first: build the kernels of a bf16 model with an fp8 KV
    cache.
    """
    import torch
    from flashinfer.prefill import get_batch_prefill_module  # pyright: ignore[reportMissingImports]

    types = (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, torch.int32)
    return _outcome(
        lambda: get_batch_prefill_module("fa2", *types, 128, 128, 0, False, False, False)
    )


def _trtllm_gen_module() -> str:
    """What FlashInfer does before it loads a trtllm-gen attention cubin: build the host code
    that launches it.
    """
    from flashinfer.jit.attention import modules  # pyright: ignore[reportMissingImports]

    vars(modules).update(get_artifact=lambda *_: b"cubin", get_meta_hash=lambda *_: "hash")
    return _outcome(lambda: modules.gen_trtllm_gen_fmha_module().build_and_load())


def _outcome(build: Callable[[], Any]) -> str:
    try:
        build()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "built"


def _jit_cache_targets() -> dict[str, list[bool]]:
    """Provider of flashinfer-jit-cache -> whether vLLM (patched) takes it for this GPU, and
    whether FlashInfer does.
    """
    from types import SimpleNamespace

    import flashinfer_jit_cache  # pyright: ignore[reportMissingImports]
    from flashinfer.jit import env  # pyright: ignore[reportMissingImports]
    from vllm.utils import flashinfer

    takes = {}
    for target in (
        "sm80",
        "sm89",
        "sm90a",
        "sm100a",
        "sm100f",
        "sm103a",
        "sm120",
        "sm120a",
        "sm120f",
        "sm121a",
        "sm121f",
    ):
        provider = SimpleNamespace(cuda_architectures=frozenset([target]))
        flashinfer_jit_cache.get_jit_cache_providers = lambda: (provider,)  # noqa: B023  # used in this round
        ours = flashinfer._has_prebuilt_flashinfer_kernels()  # pyright: ignore[reportAttributeAccessIssue]
        takes[target] = [
            ours,
            env._provider_covers_targets(frozenset([target]), env._target_cuda_architectures()),
        ]
    return takes


def _has_flashinfer() -> bool:
    from vllm.utils.flashinfer import has_flashinfer

    return has_flashinfer()


def _sampler() -> bool:
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    return flashinfer_sampler_supported()


QUESTIONS: dict[str, Callable[[], Any]] = {
    "has_flashinfer": _has_flashinfer,
    "linear W4A4": _linear,
    "linear W4A16": lambda: _linear(use_a16=True),
    "MoE W4A4": _moe,
    "MoE W4A16": lambda: _moe(use_a16=True),
    "attention bf16": _attention,
    "attention fp8": lambda: _attention("fp8"),
    "attention h512": lambda: _attention(head_size=512),
    "attention sinks": lambda: _attention(head_size=64, has_sink=True),
    "attention MLA": lambda: _attention(head_size=576, use_mla=True),
    "attention MLA sparse": lambda: _attention(head_size=576, use_mla=True, use_sparse=True),
    "MLA prefill": _mla_prefill,
    "FLASHINFER_MLA": lambda: _mla_refusals("FLASHINFER_MLA"),
    "FLASHINFER_MLA_SPARSE": lambda: _mla_refusals("FLASHINFER_MLA_SPARSE", use_sparse=True),
    "FLASHINFER forced": _forced_flashinfer,
    "sampler": _sampler,
    "prefill module": _prefill_module,
    "trtllm-gen module": _trtllm_gen_module,
    "jit-cache targets": _jit_cache_targets,
}


def main() -> None:
    """Answer the cases on standard input, in their order."""
    parser = argparse.ArgumentParser(prog="python -m probes.support.selection")
    parser.add_argument("--root", required=True)
    sys.path.insert(0, parser.parse_args().root)
    for module in NURSERY:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    cases = [
        Case(tuple(case["capability"]), case["questions"], case["machine"])
        for case in json.load(sys.stdin)
    ]
    for answers in ask(cases, os.cpu_count() or 1):
        print(json.dumps(answers))


if __name__ == "__main__":
    main()

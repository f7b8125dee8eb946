"""CloverLM's log-probabilities, by vLLM and by the formula in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models.cloverlm_models import CloverShape
from tests.support.paths import IN_VLLM, python_path
from tests.support.servers.serving import clean_environ

SHAPE = CloverShape()
QUARTET2 = {"quantization": "quartet2"}
FLOAT32 = {"dtype": "float32"}
PROMPTS = [
    torch.randint(
        0, SHAPE.vocabulary, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    for length in (12, 7, 20, 33)
]
EACH_ALONE = tuple([prompt] for prompt in PROMPTS)
# Log-probabilities of 512 tokens with a standard deviation of 5. Seen: 0.24 and 0.09, in BF16 with
# either kind of weights.
BF16_MAX, BF16_RMS = 0.5, 0.15
# In float32 two orders of summation differ by 1e-6. A code that lies on a tie can fall the other
# way, and from that position on the answers to a prompt are another draw of the quantization error;
# prompts without such a code agree. Relative to the largest.
FLOAT32_RMS = 2e-6


def in_vllm(
    installed: Path, folder: Path, requests: list[dict[str, Any]], **environ: str
) -> list[Any]:
    """For each request, batch and prompt the log-probabilities, float64 [positions, vocabulary]."""
    path = python_path(installed)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": path, **environ}
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "cloverlm_in_vllm.py")],
        input=json.dumps(requests),
        env=clean_environ(folder, **settings),
        text=True,
        capture_output=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = json.loads(done.stdout.rpartition("RESULT ")[2])
    return [
        [[torch.tensor(prompt, dtype=torch.float64) for prompt in batch] for batch in run]
        for run in found
    ]


def request(
    folder: Path, options: dict[str, Any], *batches: list[list[int]], **nibble: str
) -> dict[str, Any]:
    more = {"additional_config": {"nibble": nibble}} if nibble else {}
    return {"folder": str(folder), "options": options | more, "batches": list(batches) or [PROMPTS]}


def of_all_batches(run: list[list[Tensor]]) -> list[Tensor]:
    """Each prompt's answer, in the order in which they were asked."""
    return [prompt for batch in run for prompt in batch]


def quantized(
    tensors: dict[str, Tensor], quantize: Callable[[Tensor], Tensor] | None
) -> Callable[[str, Tensor], Tensor]:
    """A block's products with NVFP4 weights, and with activations that `quantize` rounds."""
    from nibble_kernels.quartet2.quantize import quant_fp4

    weights: dict[str, Tensor] = {}

    def linear(name: str, x: Tensor) -> Tensor:
        if name not in weights:
            stored = tensors[f"transformer.{name}.weight"]
            weights[name] = exactly(*quant_fp4(stored, four_over_six=True, tiled=False))
        return (x if quantize is None else quantize(x)) @ weights[name].T

    return linear


def exactly(codes: Tensor, scales: Tensor, g: Tensor) -> Tensor:
    """What NVFP4 stands for, in float64."""
    from nibble_kernels.quartet2 import nvfp4_dequantize

    return nvfp4_dequantize(codes, scales, torch.ones(()), torch.float64) * g.double()


def by_mode(mode: Any) -> Callable[[Tensor], Tensor]:
    from nibble_kernels.quartet2 import quartet2_quant

    return lambda x: exactly(*quartet2_quant(x.float(), mode, tiled=False))


def expected(shape: CloverShape, prompts: list[list[int]], linear: Any = None) -> list[Tensor]:
    """By the formula in float64, one prompt at a time."""
    from nibble.engine.plugin.cloverlm import reference

    tensors = shape.tensors()
    linear = linear and linear(tensors)
    heads = {"heads": shape.heads, "head_dim": shape.head_dim}
    return [
        reference.logits(tensors, torch.tensor(p), **heads, linear=linear).log_softmax(-1)
        for p in prompts
    ]


def largest(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True))


def rms(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((x - y).square().mean().sqrt()) for x, y in zip(found, wanted, strict=True))


def most_agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether at least half of the prompts agree at all of their positions."""
    each = [
        bool(((x - y).square().mean(-1).sqrt() < FLOAT32_RMS * y.abs().max()).all())
        for x, y in zip(found, wanted, strict=True)
    ]
    return sum(each) >= len(each) / 2

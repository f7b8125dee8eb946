"""The operators inside torch.compile and CUDA graphs, on the stream that is current."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

from tests.support.kernels.kernel_cases import activations, assert_same_bits


def quantize_all(
    x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Every operator once."""
    from nibble_kernels.activation_quant import (
        add_rmsnorm_nvfp4_quant,
        nvfp4_quant,
        silu_mul_nvfp4_quant,
    )
    from nibble_kernels.conversions import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode
    from nibble_kernels.quartet2.quantize import quant_fp4

    return (
        *nvfp4_quant(x, scale),
        *silu_mul_nvfp4_quant(x, scale, tiled=False),
        *add_rmsnorm_nvfp4_quant(x, residual, residual[0], scale, 1e-6),
        *quant_fp4(x, four_over_six=True),
        e2m1_decode(e2m1_encode(x)),
        e4m3_decode(e4m3_encode(x)),
    )


def inputs(device: str, rows: int) -> tuple[torch.Tensor, ...]:
    x, residual = (
        activations(rows, 96, torch.bfloat16),
        activations(rows, 96, torch.bfloat16, seed=1),
    )
    return x.to(device), residual.to(device), torch.tensor([30.0], device=device)


def test_one_graph_for_any_number_of_rows(compiled: str) -> None:
    """Traced without a break, by the fake implementations, and never again when the rows change."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    traced = torch.compile(quantize_all, backend=counter, fullgraph=True, dynamic=True)
    traced(*inputs(compiled, 4))
    graphs = counter.frame_count
    for rows in (3, 5, 131):
        args = inputs(compiled, rows)
        assert_same_bits(traced(*args), quantize_all(*args), rows)
    assert counter.frame_count == graphs


def test_operators_are_registered_soundly(compiled: str) -> None:
    """torch's own check: schema, fake implementation, autograd registration, dynamic shapes."""
    x, residual, scale = inputs(compiled, 5)
    quantize_all(x, residual, scale)
    ops = torch.ops.nibble
    for tiled in (True, False):
        samples = {
            ops.nvfp4_quant: (x, scale, tiled, True),
            ops.silu_mul_nvfp4_quant: (x, scale, tiled, True),
            ops.add_rmsnorm_nvfp4_quant: (x, residual, residual[0], scale, 1e-6, tiled, True),
            ops.quant_fp4: (x, None, True, 1.0, tiled, True),
        }
        for op, args in samples.items():
            torch.library.opcheck(op.default, args)
    torch.library.opcheck(ops.e2m1_encode.default, (x,))
    torch.library.opcheck(ops.e4m3_encode.default, (x,))


@pytest.mark.gpu
def test_a_captured_graph_replays_with_new_inputs(kernels: object) -> None:
    """Captured on a side stream; a launch on another would be refused. 100 replays give the same
    bits.
    """
    x, residual, scale = inputs("cuda", 131)
    quantize_all(x, residual, scale)  # the conversions are chosen before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = quantize_all(x, residual, scale)
    x.copy_(activations(131, 96, torch.bfloat16, seed=7))
    residual.copy_(activations(131, 96, torch.bfloat16, seed=8))
    scale.fill_(77.0)
    expected = [one.cpu() for one in quantize_all(x, residual, scale)]
    for _ in range(100):
        for one in outputs:
            one.view(-1).view(torch.uint8).fill_(0xAA)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(tuple(one.cpu() for one in outputs), tuple(expected))


@pytest.mark.gpu
def test_work_is_ordered_on_the_current_stream(kernels: object) -> None:
    """On a stream that is busy for a while, results are those of the inputs that stream writes."""
    x, residual, scale = inputs("cuda", 64)
    expected = [one.cpu() for one in quantize_all(x, residual, scale)]
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        found = quantize_all(late, residual, scale)
    stream.synchronize()
    assert_same_bits(tuple(one.cpu() for one in found), tuple(expected))


@pytest.mark.gpu
def test_first_use_inside_a_capture_works(installed: object) -> None:
    """In a separate process: the conversions cannot be chosen while capturing, and the software
    does the work.
    """
    program = (
        "import torch; from nibble_kernels.activation_quant import nvfp4_quant\nx = torch.randn(64,"
        " 128, device='cuda', dtype=torch.bfloat16); s = torch.ones(1, device='cuda')\ng ="
        " torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    captured = nvfp4_quant(x,"
        " s)\ng.replay()\nassert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b"
        " in zip(captured, nvfp4_quant(x, s)))\n"
    )
    environ = os.environ | {"PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ)


def test_all_modules_load_in_one_process(installed: Path) -> None:
    """Two operators of one name would not."""
    program = (
        "import importlib, pkgutil, nibble_kernels as package\nnames = [one.name for one in"
        " pkgutil.walk_packages(package.__path__, 'nibble_kernels.')]\nwanted = [name for name in"
        " names if not name.endswith(('._cpu', '._cuda'))]\nprint(len("
        "[importlib.import_module(name) for name in wanted]))\n"
    )
    environ = os.environ | {"PYTHONPATH": str(installed)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, check=True, env=environ, capture_output=True, text=True)
    assert int(done.stdout) >= 20

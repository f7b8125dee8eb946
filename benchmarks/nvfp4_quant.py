"""Speed of nibble-kernels' quantization of activations to NVFP4, against a memcpy on the device.

    TORCH_CUDA_ARCH_LIST=9.0a pip install --no-deps --no-build-isolation ./kernels
    python benchmarks/nvfp4_quant.py --out FILE [--ncu] [--vllm-emulation nvfp4_emulation_utils.py]

Bytes are those that must move: every input read and every output written once. An operation that
first finds a maximum reads its input twice ("two-pass"). Time is the median of graph replays of 20
calls on rotating inputs that fill the L2 cache more than four times. --ncu reads the share of issue
slots that each kernel uses from hardware counters: at 100 % no order of the same instructions would
be faster.

vLLM's kernel needs the FP4 conversion instruction, and FlashInfer's is empty below compute
capability 10 (csrc/nv_internal/tensorrt_llm/kernels/quantization.cuh). On Hopper the comparison is
therefore vLLM's Triton emulation, which writes bfloat16.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import io
import json
import statistics
import subprocess
import sys
import types
from collections.abc import Callable
from csv import DictReader
from pathlib import Path
from typing import Any

import torch
from machine import machine
from nibble_kernels.activation_quant import (
    add_rmsnorm_nvfp4_quant,
    nvfp4_quant,
    silu_mul_nvfp4_quant,
)
from nibble_kernels.conversions import conversion_report
from nibble_kernels.quartet2.quantize import quant_fp4

LARGE = [(16384, 8192), (65536, 4096), (8192, 28672), (32768, 16384)]
SMALL = [(1, 4096), (16, 4096), (256, 4096), (2048, 4096)]
CALLS = 20
COPY_BYTES = 4 << 30
CODES_AND_SCALES = 1 / 2 + 1 / 16  # bytes an element

Call = Callable[[torch.Tensor], Any]


def operations(emulation: Path | None) -> dict[str, tuple[Call, float, int]]:
    """Name -> a call on an input, bytes read and written per output element, input columns per
    output column.
    """
    scale, amax, weight = torch.tensor([300.0]), torch.tensor(4.0), {}
    scale, amax = scale.cuda(), amax.cuda()

    def norm(x: torch.Tensor, exact: bool) -> Any:
        ones = weight.setdefault(
            x.shape[-1], torch.ones(x.shape[-1] // 2, dtype=x.dtype, device="cuda")
        )
        halves = x.view(2, x.shape[0], -1)
        return add_rmsnorm_nvfp4_quant(halves[0], halves[1], ones, scale, 1e-6, exact=exact)

    static = 2 + CODES_AND_SCALES
    found: dict[str, tuple[Call, float, int]] = {
        "nvfp4_quant tiled exact": (lambda x: nvfp4_quant(x, scale), static, 1),
        "nvfp4_quant tiled approximate": (lambda x: nvfp4_quant(x, scale, exact=False), static, 1),
        "nvfp4_quant linear exact": (lambda x: nvfp4_quant(x, scale, tiled=False), static, 1),
        "nvfp4_quant linear approximate": (
            lambda x: nvfp4_quant(x, scale, tiled=False, exact=False),
            static,
            1,
        ),
        "silu_mul_nvfp4_quant exact": (lambda x: silu_mul_nvfp4_quant(x, scale), 2 + static, 2),
        "silu_mul_nvfp4_quant approximate": (
            lambda x: silu_mul_nvfp4_quant(x, scale, exact=False),
            2 + static,
            2,
        ),
        "add_rmsnorm_nvfp4_quant exact": (lambda x: norm(x, True), 4 + static, 2),
        "add_rmsnorm_nvfp4_quant approximate": (lambda x: norm(x, False), 4 + static, 2),
        "quant_fp4 nearest, amax given": (lambda x: quant_fp4(x, amax, exact=False), static, 1),
        "quant_fp4 nearest, own amax (two-pass)": (
            lambda x: quant_fp4(x, exact=False),
            2 + static,
            1,
        ),
        "quant_fp4 four-over-six, amax given": (
            lambda x: quant_fp4(x, amax, four_over_six=True, exact=False),
            static,
            1,
        ),
        "quant_fp4 four-over-six, amax given, exact": (
            lambda x: quant_fp4(x, amax, four_over_six=True),
            static,
            1,
        ),
        "quant_fp4 four-over-six, own amax (two-pass)": (
            lambda x: quant_fp4(x, four_over_six=True, exact=False),
            2 + static,
            1,
        ),
    }
    if emulation:
        quantize_dequantize = vllm_emulation(emulation)
        found["vLLM 0.32.0 _triton_nvfp4_quant_dequant"] = (
            lambda x: quantize_dequantize(x, scale, 16),
            4.0,
            1,
        )
    return found


def vllm_emulation(path: Path) -> Callable[..., torch.Tensor]:
    """vLLM's Triton function, from a copy of nvfp4_emulation_utils.py without the rest of vLLM."""
    import triton
    import triton.language

    for name, contents in {
        "vllm": {},
        "vllm.platforms": {"current_platform": None},
        "vllm.scalar_type": {
            "scalar_types": types.SimpleNamespace(
                float4_e2m1f=types.SimpleNamespace(max=lambda: 6.0)
            )
        },
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **_: None},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        sys.modules.setdefault(name, module)
    spec = importlib.util.spec_from_file_location("nvfp4_emulation_utils", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._triton_nvfp4_quant_dequant


def seconds(record: Callable[[int], Any], calls: int = CALLS, replays: int = 11) -> float:
    """Median time of a call; `record(number)` enqueues one."""
    record(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [record(number) for number in range(calls)]
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    del kept
    return statistics.median(times[2:])


def copy_rates() -> dict[str, float]:
    """Bytes per second, read and written, of copies within the device."""
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '13').partition('.')[0]}")
    source, target = (
        torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
        for _ in range(2)
    )

    def copy(_: int, size: int = COPY_BYTES) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
        assert runtime.cudaMemcpyAsync(*pointers, ctypes.c_size_t(size), 3, stream) == 0

    def without_graph(record: Callable[[int], Any]) -> float:
        times = []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            record(0)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])

    rates = {"cudaMemcpyAsync in a graph": 2 * COPY_BYTES / seconds(copy, calls=5)}
    for shift in (0, 1, 3):
        size = COPY_BYTES >> shift
        rates[f"cudaMemcpyAsync of {size >> 20} MiB"] = (
            2 * size / without_graph(lambda _, size=size: copy(0, size))
        )
    rates["torch copy_"] = 2 * COPY_BYTES / without_graph(lambda _: target.copy_(source))
    rates["torch neg"] = 2 * COPY_BYTES / without_graph(lambda _: torch.neg(source, out=target))
    return rates


def inputs(rows: int, columns: int, cache_bytes: int) -> list[torch.Tensor]:
    """As many random inputs as fill the L2 cache four times, at most 64."""
    count = max(1, min(64, -(-4 * cache_bytes // (rows * columns * 2))))
    return [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def measure(
    name: str, operation: tuple[Call, float, int], shape: tuple[int, int], copy: float
) -> dict[str, Any]:
    call, bytes_per_element, wide = operation
    rows, columns = shape
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = inputs(rows, columns * wide, cache)
    time = seconds(lambda number: call(sets[number % len(sets)]))
    moved = rows * columns * bytes_per_element
    row = {
        "operation": name,
        "rows": rows,
        "columns": columns,
        "us": round(time * 1e6, 2),
        "gb_per_s": round(moved / time / 1e9, 1),
        "percent_of_memcpy": round(100 * moved / time / copy, 1),
    }
    print(
        f"{name:46} {rows:6}x{columns:<6} {row['us']:9.2f} us {row['gb_per_s']:8.1f} GB/s"
        f" {row['percent_of_memcpy']:6.1f} %"
    )
    return row


def issue_slots() -> list[dict[str, Any]]:
    """Each operation's main kernel in Nsight Compute's counters: share of issue slots used, and
    instructions per element.
    """
    metrics = "sm__inst_issued.avg.pct_of_peak_sustained_active,smsp__inst_executed.sum,gpu__time_duration.sum"  # noqa: E501
    command = [
        "ncu",
        "--csv",
        "--metrics",
        metrics,
        "--kernel-name",
        "regex:quantize",
        sys.executable,
        __file__,
        "--once",
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    table = told[told.index('"ID"') :]
    kernels: dict[str, dict[str, Any]] = {}
    for line in DictReader(io.StringIO(table)):
        kernel = kernels.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        kernel[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
    rows, columns = LARGE[0]
    return [
        {
            "kernel": kernel["kernel"],
            "percent_of_issue_slots": round(
                kernel["sm__inst_issued.avg.pct_of_peak_sustained_active"], 1
            ),
            "instructions_per_element": round(
                kernel["smsp__inst_executed.sum"] * 32 / (rows * columns), 2
            ),
        }
        for kernel in kernels.values()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--ncu", action="store_true", help="also read hardware counters with Nsight Compute"
    )
    parser.add_argument(
        "--vllm-emulation", type=Path, metavar="FILE", help="vLLM's nvfp4_emulation_utils.py"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="call each operation once and measure nothing (for --ncu)",
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    found = operations(args.vllm_emulation)
    if args.once:
        for call, _, wide in found.values():
            call(torch.randn(LARGE[0][0], LARGE[0][1] * wide, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
        return
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "conversions": conversion_report("cuda"),
    }
    rates = copy_rates()
    copy = max(rates.values())
    report["copies_gb_per_s"] = {name: round(rate / 1e9, 1) for name, rate in rates.items()}
    print(report["machine"]["gpus"], report["conversions"])
    print("copies, GB/s read + written:", report["copies_gb_per_s"])
    report["rows"] = [
        measure(name, found[name], shape, copy) for name in found for shape in (*LARGE, *SMALL)
    ]
    if args.ncu:
        report["issue_slots"] = issue_slots()
        for row in report["issue_slots"]:
            print(row)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How much of c_tmp Marlin's NVFP4 MoE GEMM writes, and whether the op allocates enough of it.

    # needs nvcc, torch's headers and jinja2, but no GPU:
    python benchmarks/marlin_moe_c_tmp.py build SDIST FOLDER
    # needs an SM90 GPU and torch 2.11 or later:
    python benchmarks/marlin_moe_c_tmp.py sweep FOLDER/clamp.so
    # also with dropped.so, halved.so and the wheel's _moe_C_stable_libtorch:
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --kernel-name kernel_substring=Marlin \\
        python benchmarks/marlin_moe_c_tmp.py op FOLDER/clamp.so

This is the probe of row N24 in docs/patches.md. `build` compiles csrc/moe/marlin_moe_wna16 of
vLLM's unpacked source archive with marlin_moe_c_tmp.cu three times: unchanged (clamp), without the
min( as #43730 proposes (dropped), and with half of c_tmp (halved), which must be found. `sweep`
gives the kernel a larger c_tmp than the op would, filled with a pattern, and finds the last float
written. `op` calls the registered op, which allocates c_tmp itself. Without torch's caching
allocator each allocation is one cudaMalloc of that size, so memcheck knows its end. Both compare
results with a float32 product. The code that chooses kernel and grid gets other GPU sizes as input.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "patches")]
from probes.n24_marlin_moe_c_tmp import (  # noqa: E402
    LARGE,
    SMALL,
    Shape,
    floats,
)  # pyright: ignore[reportMissingImports]

FE2M1F = 562949953487106  # vllm.scalar_type.scalar_types.float4_e2m1f.id
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
SCALE_BYTES = (0xD8, 0xE0, 0xE8)  # Marlin's scale format: 8 is a factor of two
# vLLM's exponent bias of NVFP4 with bfloat16 activations, less 2^13 of the scales
GLOBAL_SCALE = 2.0**113
SENTINEL = 0x7FC0DEAD
SLACK = 1 << 23  # floats of c_tmp beyond what the op would allocate
TOLERANCE = 1e-2  # bfloat16 results against float32 ones, by norm
# name: (SMs, shared memory a block in bytes)
GPUS = {
    "GB10": (48, 101376),
    "RTX A6000": (84, 101376),
    "H200": (132, 232448),
    "RTX 5090": (170, 101376),
    "RTX PRO 6000": (188, 101376),
}
# experts, top_k, hidden size, expert size
MODELS = {
    "#36889's example": (64, 8, 2560, 512),
    "DeepSeek-V4-Flash": (256, 6, 4096, 2048),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen3-235B-A22B": (128, 8, 4096, 1536),
    "Qwen3-Next-80B-A3B": (512, 10, 2048, 512),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
    "GLM-4.5-Air": (128, 8, 4096, 1408),
    "MiniMax-M2": (256, 8, 3072, 1536),
}


@dataclass(frozen=True)
class Case:
    """One GEMM of one model on one GPU."""

    model: str
    gpu: str
    tensor_parallel: int
    layer: str  # w13 or w2
    tokens: int
    block_m: int
    skew: float  # 0: tokens spread evenly over the experts
    sms: int = 0  # 0: the GPU's
    seed: int = 0

    @property
    def problem(self) -> tuple[int, int, int, int, int, int]:
        """experts, routed top_k, and m, n, k, top_k of the call, as _fused_marlin_moe makes it."""
        experts, top_k, hidden, size = MODELS[self.model]
        size //= self.tensor_parallel
        if self.layer == "w13":
            return experts, top_k, self.tokens, 2 * size, hidden, top_k
        return experts, top_k, self.tokens * top_k, hidden, size, 1


def draw(source: random.Random, count: int) -> Iterator[Case]:
    """Cases with the tokens of a decode, of a prefill, and numbers between."""
    for seed in range(count):
        model = source.choice(list(MODELS))
        experts, top_k, _, size = MODELS[model]
        tokens = source.choice(
            (1, 2, 4, source.randint(1, 64), source.randint(65, 512), source.randint(513, 4096))
        )
        # fused_marlin_moe's choice (experts/marlin_moe.py), or any
        usual = next((b for b in (8, 16, 32, 48, 64) if tokens * top_k / experts / b < 0.9), 64)
        yield Case(
            model=model,
            gpu=source.choice(list(GPUS)),
            tensor_parallel=source.choice([n for n in (1, 2, 4, 8) if size // n % 64 == 0]),
            layer=source.choice(("w13", "w2")),
            tokens=tokens,
            block_m=usual if source.random() < 0.6 else source.choice((8, 16, 32, 48, 64)),
            skew=source.choice((0.0, 0.0, 1.0, 3.0)),
            seed=seed,
        )


# ---- build


def build(source: Path, folder: Path) -> None:
    """Compile the NVFP4 kernels for bfloat16 once, and three variants of ops.cu."""
    import torch.utils.cpp_extension as extension

    work = folder / "source"
    shutil.copytree(source / "csrc", work / "csrc", dirs_exist_ok=True)
    marlin = work / "csrc/moe/marlin_moe_wna16"
    generator = work / "csrc/quantization/marlin/generate_kernels.py"
    subprocess.run([sys.executable, generator, "9.0", marlin], check=True)
    kernels = (marlin / "sm80_kernel_bfloat16_fe2m1f_bfloat16.cu").read_text()
    wanted = r"^template __global__ void Marlin<(?!.*kFE4M3fn).*\n"  # MXFP4's have other scales
    (work / "kernels.cu").write_text(re.sub(wanted, "", kernels, flags=re.MULTILINE))
    branches = re.findall(
        r"if \((.*)\)\n  kernel = (.*;)\n", (marlin / "kernel_selector.h").read_text()
    )
    ours = [
        f"if ({condition})\n  kernel = {kernel}\n"
        for condition, kernel in branches
        if "kBFloat16.id(), vllm::kFE2M1f.id(), vllm::kBFloat16.id(), vllm::kFE4M3fn.id()" in kernel
    ]
    (marlin / "kernel_selector.h").write_text("".join(ours))
    # torch_utils.h names the type only
    (work / "cublas_v2.h").write_text("typedef void* cublasHandle_t;\n")
    flags = [
        "-std=c++17",
        "-O2",
        "-lineinfo",
        "-Xcompiler",
        "-fPIC",
        "-static-global-template-stub=false",
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        "--expt-relaxed-constexpr",
        "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020B000000000000ULL",
        "-I",
        work,
        "-I",
        work / "csrc",
        *(word for path in extension.include_paths() for word in ("-I", path)),
    ]
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    subprocess.run(
        [nvcc, *flags, "-I", marlin, "-c", work / "kernels.cu", "-o", folder / "kernels.o"],
        check=True,
    )
    ops = (marlin / "ops.cu").read_text()
    clamp = re.search(
        r"min\(\s*\(long\)size_n \* sorted_token_ids.size\(0\),\s*(.*?)\);", ops, re.DOTALL
    )
    doubling = "if (moe_block_size == 8) max_c_tmp_size *= 2;"
    assert clamp and doubling in ops, "ops.cu computes the size in another way"
    variants = {
        "clamp": ops,
        "dropped": ops.replace(clamp[0], f"{clamp[1]};"),
        "halved": ops.replace(doubling, f"{doubling}\n    max_c_tmp_size /= 2;"),
    }
    for name, text in variants.items():
        (marlin / "ops.cu").write_text(text)
        harness = Path(__file__).with_suffix(".cu")
        subprocess.run(
            [nvcc, *flags, "-I", marlin, "-c", harness, "-o", folder / f"{name}.o"], check=True
        )
        objects = (folder / f"{name}.o", folder / "kernels.o")
        subprocess.run(
            [nvcc, "-shared", "-cudart", "shared", *objects, "-o", folder / f"{name}.so"],
            check=True,
        )


# ---- on the GPU

SCHEMA = (
    "moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor?"
    " b_bias_or_none, Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor?"
    " b_zeros_or_none, Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids, Tensor!"
    " num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k, bool"
    " mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k, bool use_atomic_add,"
    " bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, int blocks_per_sm) ->"
    " Tensor"
)
POINTERS = (
    "a",
    "b",
    "c",
    "c_tmp",
    "scales",
    "global_scale",
    "sorted_token_ids",
    "expert_ids",
    "padded_tokens",
    "topk_weights",
    "locks",
)


class Call(ctypes.Structure):
    """The struct of the same name in marlin_moe_c_tmp.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [
        (name, ctypes.c_int) for name in ("block_m", "experts", "top_k", "m", "n", "k")
    ]


class Launch(ctypes.Structure):
    """The struct of the same name in marlin_moe_c_tmp.cu."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("thread_k", "thread_n", "threads", "blocks_per_sm", "resident_per_sm")
    ]


class Gpu:
    """The compiled library, and tensors of a case on the device."""

    def __init__(self, library: Path) -> None:
        import torch

        self.torch = torch
        for name in ("libc10.so", "libtorch_cpu.so", "libtorch_cuda.so"):
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))
        # The wheel's library, with the op's schema
        self.shipped = not hasattr(self.library, "pretend")
        if not self.shipped:
            self.definition = torch.library.Library("_moe_C", "DEF")
            self.definition.define(SCHEMA)
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        # Lane by lane of a warp: two rows, their neighbours eight down, and the same eight columns
        # on; then interleaved.
        order = [
            256 * tile + 16 * row + lane // 4 + 8 * half
            for lane in range(32)
            for tile in range(4)
            for half in (0, 1)
            for row in (lane % 4 * 2, lane % 4 * 2 + 1, lane % 4 * 2 + 8, lane % 4 * 2 + 9)
        ]
        self.order = (
            torch.tensor(order, device="cuda").view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
        )

    def pack(self, codes: Any) -> Any:
        """FP4 codes [experts, k, n] in Marlin's layout, int32 [experts, k / 16, 2 n]."""
        torch = self.torch
        experts, k, n = codes.shape
        tiles = (
            codes.view(experts, k // 16, 16, n // 16, 16)
            .transpose(2, 3)
            .reshape(experts, k // 16, n // 64, 1024)
        )
        nibbles = tiles[..., self.order].view(experts, k // 16, 2 * n, 4, 2)
        return (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32).squeeze(-1)

    def tensors(self, case: Case, exact: bool) -> dict[str, Any]:
        """Inputs of a call; weights are random bits unless the result is to be compared."""
        torch = self.torch
        torch.manual_seed(case.seed)
        experts, routed, m, n, k, _ = case.problem
        put: dict[str, Any] = {"device": "cuda"}
        scale_steps = torch.randint(0, 3, (experts, k // 16, 1), **put)
        weights = {"steps": scale_steps}
        if exact:
            weights["codes"] = torch.randint(0, 16, (experts, k, n), dtype=torch.uint8, **put)
            packed = self.pack(weights["codes"])
        else:
            packed = torch.randint(
                -(2**31), 2**31, (experts, k // 16, 2 * n), dtype=torch.int32, **put
            )
        bytes_ = torch.tensor(SCALE_BYTES, dtype=torch.uint8, **put)[scale_steps]
        popularity = torch.exp(case.skew * torch.randn(experts, **put))
        ids = torch.multinomial(popularity.expand(case.tokens, experts), routed).view(-1)
        return weights | {
            "a": torch.randn(m, k, dtype=torch.bfloat16, **put),
            "b": packed,
            "c": torch.full((case.tokens * routed, n), float("nan"), dtype=torch.bfloat16, **put),
            "scales": bytes_.expand(-1, -1, n).contiguous().view(torch.float8_e4m3fn),
            "global_scale": torch.full((experts,), GLOBAL_SCALE, **put),
            "topk_weights": torch.ones(case.tokens, routed, **put),
            "locks": torch.zeros(4 * max(self.sms, 188), dtype=torch.int32, **put),
            "ids": ids,
            **self.align(ids, experts, case.block_m),
        }

    def align(self, ids: Any, experts: int, block_m: int) -> dict[str, Any]:
        """vLLM's moe_align_block_size, with its buffer sizes."""
        torch = self.torch
        counts = torch.bincount(ids, minlength=experts)
        blocks = (counts + block_m - 1) // block_m
        begins = (blocks.cumsum(0) - blocks) * block_m
        order = ids.argsort(stable=True)
        ranks = torch.arange(len(ids), device="cuda") - (counts.cumsum(0) - counts)[ids[order]]
        size = len(ids) + experts * (block_m - 1)
        size = min(len(ids) * block_m, size) if len(ids) < experts else size
        tokens = torch.full((size,), len(ids), dtype=torch.int32, device="cuda")
        tokens[begins[ids[order]] + ranks] = order.int()
        of_block = torch.zeros(-(-size // block_m), dtype=torch.int32, device="cuda")
        listed = torch.arange(experts, dtype=torch.int32, device="cuda").repeat_interleave(blocks)
        of_block[: len(listed)] = listed
        padded = (blocks.sum() * block_m).int().view(1)
        return {"sorted_token_ids": tokens, "expert_ids": of_block, "padded_tokens": padded}

    def call(self, case: Case, tensors: dict[str, Any]) -> tuple[Call, Launch | None]:
        """The C structs of a call; no launch if the op has no kernel, or if its grid does not fit
        on this GPU.
        """
        experts, _, m, n, k, top_k = case.problem
        sms, shared = GPUS[case.gpu]
        sms = case.sms or sms
        self.library.pretend(sms, shared)
        call = Call(**{name: tensors[name].data_ptr() for name in POINTERS if name in tensors})
        call.block_m, call.experts, call.top_k, call.m, call.n, call.k = (
            case.block_m,
            experts,
            top_k,
            m,
            n,
            k,
        )
        launch = Launch()
        found = self.library.plan(ctypes.byref(call), ctypes.byref(launch))
        fits = launch.blocks_per_sm * sms <= launch.resident_per_sm * self.sms
        return call, launch if found and fits else None

    def error(self, case: Case, tensors: dict[str, Any], result: Any) -> float:
        """Distance from the float32 product, relative to its norm; nan if an element was not
        written.
        """
        torch = self.torch
        _, _, _, n, k, top_k = case.problem
        expected = torch.empty_like(result, dtype=torch.float32)
        values = torch.tensor(FP4, device="cuda")
        for expert in tensors["ids"].unique().tolist():
            rows = (tensors["ids"] == expert).nonzero().view(-1)
            scales = 2.0 ** (tensors["steps"][expert] - 1.0)
            weight = values[tensors["codes"][expert].int()].view(k // 16, 16, n) * scales.view(
                -1, 1, 1
            )
            expected[rows] = tensors["a"][rows // top_k].float() @ weight.view(k, n)
        return ((result.float() - expected).norm() / expected.norm()).item()


def shape_of(case: Case, launch: Launch) -> Shape:
    """The probe's view of a case."""
    experts, routed, _, n, k, _ = case.problem
    return Shape(
        case.tokens, routed, experts, n, k, case.block_m, launch.thread_k, launch.thread_n,
        case.sms or GPUS[case.gpu][0], launch.blocks_per_sm,
    )  # fmt: skip


def allocation(case: Case, sorted_tokens: int) -> int:
    """Floats of c_tmp that the op of vLLM 0.32 allocates (ops.cu:558)."""
    n, sms = case.problem[3], case.sms or GPUS[case.gpu][0]
    size = min(n * sorted_tokens, sms * 4 * case.block_m * 256)
    return size * 2 if case.block_m == 8 else size


def sweep(library: Path, count: int, out: Path | None) -> None:
    """Measure the last float of c_tmp that is written."""
    gpu = Gpu(library)
    torch = gpu.torch
    buffer = torch.empty(188 * 4 * 64 * 256 + SLACK, dtype=torch.int32, device="cuda")
    places = torch.arange(1, buffer.numel() + 1, dtype=torch.int32, device="cuda")
    rows, skipped, errors = [], 0, []
    for case in draw(random.Random(24), count):
        experts, _, _, n, k, _ = case.problem
        exact = case.seed % 8 == 0 and experts * n * k <= 1 << 28
        tensors = gpu.tensors(case, exact)
        tensors["c_tmp"] = buffer
        call, launch = gpu.call(case, tensors)
        if launch is None:
            skipped += 1
            continue
        size = allocation(case, tensors["sorted_token_ids"].numel())
        seen = slice(0, size + SLACK)
        buffer[seen] = SENTINEL
        ran = gpu.library.gemm(
            ctypes.byref(call), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        )
        torch.cuda.synchronize()
        assert ran, case
        assert not tensors["locks"].any(), f"a lock was left behind: {case}"
        written = torch.where(buffer[seen] != SENTINEL, places[seen], 0).max().item()
        bound = floats(shape_of(case, launch), tensors["padded_tokens"].item() // case.block_m)
        rows.append(
            {"written": written, "bound": bound, "allocated": size} | asdict(shape_of(case, launch))
        )
        rows[-1] |= {
            "token_blocks": tensors["padded_tokens"].item() // case.block_m,
            "gpu": case.gpu,
        }
        if exact:
            errors.append(gpu.error(case, tensors, tensors["c"]))
        del tensors
    report = {
        "calls": len(rows),
        "skipped_grid_too_large_or_no_kernel": skipped,
        "calls_that_use_c_tmp": sum(row["written"] > 0 for row in rows),
        "calls_written_past_the_allocation": sum(row["written"] > row["allocated"] for row in rows),
        "calls_written_past_the_bound": sum(row["written"] > row["bound"] for row in rows),
        "largest_share_of_the_bound": max(
            row["written"] / row["bound"] for row in rows if row["bound"]
        ),
        "largest_share_of_the_allocation": max(row["written"] / row["allocated"] for row in rows),
        "calls_limited_by_the_sorted_tokens": sum(
            row["allocated"] < row["sms"] * 4 * max(row["block_m"], 16) * 256 for row in rows
        ),
        "results_compared": len(errors),
        "largest_relative_error": max(errors),
        "results_beyond_tolerance": sum(not error < TOLERANCE for error in errors),
    }
    print(json.dumps(report, indent=2), flush=True)
    if out:
        out.write_text(json.dumps(report | {"rows": rows}))


def op(library: Path, count: int, own_grid: bool) -> None:
    """Call the registered op, which allocates c_tmp; for compute-sanitizer."""
    gpu = Gpu(library)
    torch = gpu.torch
    done = compared = wrong = 0
    for case in draw(random.Random(36889), count):
        experts, _, m, n, k, top_k = case.problem
        exact = case.seed % 4 == 0 and experts <= 128 and experts * n * k <= 1 << 28
        tensors = gpu.tensors(case, exact)
        config = (-1, -1, -1) if own_grid else one_block_per_sm(gpu, case, tensors)
        if config is None:
            continue
        if own_grid and not gpu.shipped:
            gpu.library.pretend(0, 0)
        names = ("locks", "sorted_token_ids", "expert_ids", "padded_tokens", "topk_weights")
        result = torch.ops._moe_C.moe_wna16_marlin_gemm(
            tensors["a"],
            tensors["c"],
            tensors["b"],
            None,
            tensors["scales"],
            None,
            tensors["global_scale"],
            None,
            *(tensors[name] for name in names),
            case.block_m,
            top_k,
            False,
            FE2M1F,
            m,
            n,
            k,
            False,
            True,
            False,
            *config,
        )
        torch.cuda.synchronize()
        done += 1
        print(case, config, flush=True)
        if exact:
            compared += 1
            wrong += not gpu.error(case, tensors, result) < TOLERANCE
    print(f"{done} calls, {compared} compared, {wrong} beyond {TOLERANCE}", flush=True)


def one_block_per_sm(gpu: Gpu, case: Case, tensors: dict[str, Any]) -> tuple[int, int, int] | None:
    """The op's last three arguments. The sanitizer takes registers, and a block that waits for one
    without room hangs forever.

    If the op chooses the grid itself, the library reports a GPU small enough for one block per SM.
    The wheel's library gets the arguments instead.
    """
    if gpu.shipped:
        _, _, _, n, k, _ = case.problem
        configs = SMALL if case.block_m <= 16 else LARGE
        return next(((tk, tn, 1) for tk, tn in configs if k % tk == n % tn == 0), None)
    for share in (1, 2, 4):
        small = replace(case, sms=gpu.sms // share)
        _, launch = gpu.call(small, tensors)
        if launch is None or launch.blocks_per_sm <= share:
            return launch and (-1, -1, -1)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, paths in (
        ("build", ("source", "folder")),
        ("sweep", ("library",)),
        ("op", ("library",)),
    ):
        verb = verbs.add_parser(name)
        for path in paths:
            verb.add_argument(path, type=Path)
        if name != "build":
            verb.add_argument("--count", type=int, default=16_000 if name == "sweep" else 400)
        if name == "sweep":
            verb.add_argument("--out", type=Path)
        if name == "op":
            verb.add_argument(
                "--own-grid", action="store_true", help="the GPU as it is, and the op's own choice"
            )
    args = vars(parser.parse_args())
    {"build": build, "sweep": sweep, "op": op}[args.pop("verb")](**args)


if __name__ == "__main__":
    main()

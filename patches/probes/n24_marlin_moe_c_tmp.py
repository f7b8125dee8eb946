"""Marlin's MoE GEMM must allocate as much c_tmp, its float32 buffer for partial sums, as its kernel
can write.

What the kernel can write, read off marlin_template.h (vLLM 0.32; `slots` below is the same in
Python):

- The output is cut into tiles of block_m x thread_n. If there are more tiles than thread blocks,
  whole waves of them are worked
  off without c_tmp; `part2` tiles remain, fewer than the grid or at most 4/3 of it (:371-375).
  Their k_tiles * part2 steps are
  dealt out in runs of `iters`, one a block (:377). Only a tile with a run's end inside it has
  partial sums and a place in c_tmp.
- That place is `locks_off` times one tile (:1514). With fewer tiles than blocks locks_off is the
  tile's number (:431, :561);
  else a tile is shared by at most two blocks, and locks_off is the second one's number (:429,
  :558).
- So locks_off < min(tiles, grid), tiles = padded_tokens / block_m * N / thread_n, and a place is
  max(block_m, 16) * thread_n
  floats (:1503-1506). The first bound gives padded_tokens * N, which `size_n *
  sorted_token_ids.size(0)` covers, the second
  grid * block_m * thread_n, which `sms * 4 * moe_block_size * max_thread_n` covers; either doubles
  for blocks of 8 tokens.

The smaller of two bounds is a bound: the clamp is sound. The example of an overflow in #36889,
which #43730 files again, counts 256 active threads in a tile 128 columns wide; there are 64 (`32 *
tb_n_warps`, :1508). The probe evaluates the tree's formula.
"""

import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="N24",
    title=(
        "Marlin MoE: c_tmp is clamped to the smaller of two sizes; reported to overflow on SM120"
        " under load"
    ),
    how="numeric",
    expect={"0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "Both sizes are upper bounds of what the kernel writes; the reported overflow counts 256"
        " active threads where there are 64. In 11,818 calls on an H200 nothing was written past"
        " the end. The crash on SM120 is not tried."
    ),
    instead=(
        "no patch; the crash reported stays a known risk of Marlin MoE on SM120, its cause unknown"
    ),
    references=(
        "vllm-project/vllm#43730",
        "vllm-project/vllm#36889",
        "vllm 0.32 csrc/moe/marlin_moe_wna16/ops.cu:558",
        "vllm 0.32 csrc/moe/marlin_moe_wna16/marlin_template.h:1514",
        "benchmarks/results/marlin_moe_c_tmp.json",
    ),
)

FOLDERS = ("csrc/moe/marlin_moe_wna16", "csrc/libtorch_stable/moe/marlin_moe_wna16")
# The lines that `slots` and `floats` restate; a kernel without one of them is another kernel.
PREMISES = (
    (
        "part2_mn_tiles = global_mn_tiles % gridDim.x; if (part2_mn_tiles * 3 <= gridDim.x)"
        " part2_mn_tiles += gridDim.x;"
    ),
    "int iters = div_ceil(k_tiles * part2_mn_tiles, gridDim.x);",
    "locks_off = blockIdx.x; } else { locks_off = (iters * blockIdx.x) / k_tiles - 1; }",
    "if (slice_count > 1 && slice_idx == slice_count - 1) { locks_off++; } } else { locks_off++; }",
    "constexpr int tb_m = thread_m_blocks * 16; constexpr int tb_n = thread_n_blocks * 16;",
    "constexpr int c_size = tb_m * tb_n * sizeof(float) / 16;",
    "int c_cur_offset = locks_off * c_size;",
    "C_tmp[c_cur_offset + active_threads * k + threadIdx.x] = frag_c_ptr[k];",
)
SMS = (
    48,
    84,
    108,
    128,
    132,
    148,
    170,
    188,
)  # GB10, A6000, A100, RTX 4090, H200, B200, RTX 5090, RTX PRO 6000
# (thread_k, thread_n): ops.cu's small_batch_thread_configs (blocks of 8 or 16 tokens) and
# large_batch_thread_configs
SMALL, LARGE = ((128, 128), (64, 128), (128, 64)), ((64, 256), (64, 128), (128, 64))
SHAPES = 30_000
MAIN = """
#include <algorithm>
#include <cstdio>
using std::max; using std::min;
namespace MARLIN_NAMESPACE_NAME {{ {constant} }}
struct Tokens {{ long count; long size(int) const {{ return count; }} }};
int main() {{
  long size_n, count, sms, moe_block_size;
  while (std::scanf("%ld %ld %ld %ld", &size_n, &count, &sms, &moe_block_size) == 4) {{
    Tokens sorted_token_ids{{count}};
    {formula}
    std::printf("%ld\\n", (long)max_c_tmp_size);
  }}
}}
"""


@dataclass(frozen=True)
class Shape:
    """One call of the GEMM on one GPU."""

    tokens: int
    top_k: int
    experts: int
    n: int
    k: int
    block_m: int
    thread_k: int
    thread_n: int
    sms: int
    blocks_per_sm: int  # determine_exec_config allows 4 at most
    # runs are multiples of it: scale group / thread_k, where a group is the larger of the two
    step: int = 1

    @property
    def sorted_tokens(self) -> int:
        """The length of sorted_token_ids;
        vllm/model_executor/layers/fused_moe/moe_align_block_size.py.
        """
        routed = self.tokens * self.top_k
        size = routed + self.experts * (self.block_m - 1)
        return min(routed * self.block_m, size) if routed < self.experts else size

    @property
    def most_blocks(self) -> int:
        """Token blocks of the routing that needs most of them: as many experts as possible with
        one token.
        """
        routed = self.tokens * self.top_k
        hit = min(self.experts, routed)
        return hit + (routed - hit) // self.block_m


def slots(tiles: int, k_tiles: int, grid: int, step: int = 1) -> int:
    """Places in c_tmp up to the last one that the kernel uses for this many output tiles; 0: it
    uses none.
    """
    part2 = tiles
    if tiles > grid:
        part2 = tiles % grid
        if part2 * 3 <= grid:
            part2 += grid
    iters = -(-(k_tiles * part2) // grid)
    iters = -(-iters // step) * step
    for block in range(
        (k_tiles * part2 - 1) // iters, 0, -1
    ):  # a run begins here; the last that splits a tile
        if block * iters % k_tiles:
            return 1 + (block if part2 >= grid else block * iters // k_tiles)
    return 0


def floats(shape: Shape, token_blocks: int) -> int:
    """Floats of c_tmp up to the end of the last place that the kernel uses."""
    tiles = token_blocks * (shape.n // shape.thread_n)
    used = slots(tiles, shape.k // shape.thread_k, shape.sms * shape.blocks_per_sm, shape.step)
    return used * max(shape.block_m, 16) * shape.thread_n


def probe(tree: Tree) -> Finding:
    """Compile the tree's formula and compare it with what the kernel writes, over shapes of all
    kinds.
    """
    folder = next((name for name in FOLDERS if tree.has(f"{name}/ops.cu")), None)
    if folder is None:
        return not_applicable("no csrc in this layout")
    missing = _missing_premises(tree.text(f"{folder}/marlin_template.h"))
    if missing:
        return not_applicable(
            f"the kernel is another than the bound is derived from: no line {missing[0]!r}"
        )
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        return not_applicable("no C++ compiler")
    formula = _formula(tree.text(f"{folder}/ops.cu"))
    constant = re.search(
        r"static constexpr int max_thread_n = \d+;",
        tree.text("csrc/quantization/marlin/marlin.cuh"),
    )
    if formula is None or constant is None:
        return not_applicable("the size of c_tmp is computed in another way")
    calls = list(_calls(random.Random(43730)))
    allocated = _evaluate(compiler, MAIN.format(constant=constant[0], formula=formula), calls)
    used = [floats(*call) for call in calls]
    over = sum(need > size for need, size in zip(used, allocated, strict=True))
    worst = max(range(len(calls)), key=lambda number: used[number] / max(allocated[number], 1))
    share = f"{used[worst]:,} of {allocated[worst]:,} floats"
    detail = f"{over} of {len(calls)} shapes overflow; the worst uses {share}: {calls[worst][0]}"
    return defect(detail) if over else sound(detail)


def _missing_premises(template: str) -> list[str]:
    # Comments and line breaks aside; clang-format moves both.
    plain = " ".join(re.sub(r"//[^\n]*|#pragma unroll", " ", template).split())
    return [line for line in PREMISES if line not in plain]


def _formula(ops: str) -> str | None:
    """The statements that compute max_c_tmp_size, up to the allocation."""
    found = re.search(
        r"(?:const )?(?:long|int64_t) max_c_tmp_size =.*?;(?=\s*c_tmp = )", ops, re.DOTALL
    )
    return found and found[0]


def _calls(source: random.Random) -> Iterator[tuple[Shape, int]]:
    """Shapes, each with a number of token blocks: half the most that a routing can need, half
    fewer.
    """
    for number in range(SHAPES):
        shape = _draw(source)
        yield shape, shape.most_blocks if number % 2 else source.randint(1, shape.most_blocks)


def _draw(source: random.Random) -> Shape:
    block_m = source.choice((8, 16, 32, 48, 64))
    thread_k, thread_n = source.choice(SMALL if block_m <= 16 else LARGE)
    k_tiles = source.randint(1, 64)
    return Shape(
        tokens=source.choice((1, 2, 3, 4, 8, source.randint(1, 64), source.randint(1, 4096))),
        top_k=source.randint(1, 10),
        experts=source.choice((8, 16, 32, 64, 128, 256, 512)),
        n=thread_n * source.randint(1, 8192 // thread_n),
        k=thread_k * k_tiles,
        block_m=block_m,
        thread_k=thread_k,
        thread_n=thread_n,
        sms=source.choice(SMS),
        blocks_per_sm=source.randint(1, 4),
        step=2 if k_tiles % 2 == 0 and thread_k == 64 and source.random() < 0.25 else 1,
    )


def _evaluate(compiler: str, program: str, calls: list[tuple[Shape, int]]) -> list[int]:
    lines = "".join(f"{s.n} {s.sorted_tokens} {s.sms} {s.block_m}\n" for s, _ in calls)
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "size.cpp"), Path(folder, "size")
        source.write_text(program)
        subprocess.run(
            [compiler, "-std=c++17", "-o", binary, source], check=True, capture_output=True
        )
        answer = subprocess.run([binary], input=lines, text=True, check=True, capture_output=True)
    return [int(word) for word in answer.stdout.split()]

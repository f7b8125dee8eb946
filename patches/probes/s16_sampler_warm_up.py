"""The sampler's warm-up takes more memory than was set aside: it sorts the logits of every sequence
of the default batch.

glm47-nvfp4-sm120 lowered --gpu-memory-utilization after `CUDA out of memory occurred when warming
up sampler with 1024 dummy requests`.
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.batch import server_defaults
from probes.support.fake_cuda import SM120
from probes.support.syntax import Sources

GIB = 1 << 30
VOCABULARY = 151_552  # GLM-4.7
SORTED_BYTES = 4 + 8  # an fp32 value and the int64 index that torch.sort gives with it
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
ENVS = "vllm.envs.environment_variables"
GRAPHS = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"

ROW = Row(
    id="16",
    title="CUDA out of memory when the sampler warms up",
    how="the tree's own top-k/top-p on small logits, and the arithmetic of its default batch",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "sound"},
    verdict=(
        "1024 sequences by default on a 95 GiB card: sorting their logits takes 1.73 GiB, and"
        " releases up to 0.16.0 do not count the memory of CUDA graphs. 0.32.0 uses a Triton"
        " kernel without a sort, and counts graphs."
    ),
    instead=(
        "Nothing to change; targets/ keep the sequences low for other reasons (N13, Mamba blocks)."
    ),
    references=(
        "vllm 0.15.1 v1/sample/ops/topk_topp_sampler.py:262",
        "vllm 0.32 v1/sample/ops/topk_topp_sampler.py:466",
        "vllm 0.32 envs.py:328",
    ),
)


def probe(tree: Tree) -> Finding:
    """Does the path a GPU takes sort, for how many sequences, and are CUDA graphs counted?"""
    defaults = server_defaults(tree, SM120)
    if defaults is None or not tree.has(f"{SAMPLER.replace('.', '/')}.py"):
        return not_applicable("no V1 sampler or no batch defaults")
    sequences = defaults[1]
    gib = sequences * VOCABULARY * SORTED_BYTES / GIB
    sorts, counted = _sorts(tree), GRAPHS in Sources(tree).load(ENVS)
    detail = f"{sequences} sequences by default; " + (
        f"sorts their logits, {gib:.2f} GiB" if sorts else "no sort"
    )
    detail += f"; memory of CUDA graphs {'counted' if counted else 'not counted'}"
    return defect(detail) if sorts or not counted else sound(detail)


def _sorts(tree: Tree) -> bool:
    """Whether apply_top_k_top_p reaches torch.sort where Triton is installed, as on every GPU."""
    import torch

    given = {
        f"{SAMPLER}.HAS_TRITON": True,
        f"{SAMPLER}.apply_top_k_top_p_triton": lambda logits, *_, **__: logits,
    }
    sort, calls = torch.Tensor.sort, []
    torch.Tensor.sort = lambda *arguments, **more: calls.append(1) or sort(*arguments, **more)
    logits, k, p = (
        torch.rand(2, 16),
        torch.tensor([15, 15]),
        torch.tensor([0.9, 0.9]),
    )  # as _dummy_sampler_run asks
    Sources(tree, given).load(f"{SAMPLER}.apply_top_k_top_p")(logits, k, p)
    return bool(calls)

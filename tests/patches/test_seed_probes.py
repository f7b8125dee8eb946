"""Probes of Python and numbers: they can fail and pass, and what published patches would have
done.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.patching import run
from nibble.engine.patching.probe import Finding
from nibble.engine.patching.tree import Tree, open_tree
from tests.support.changes import PATCHING
from tests.support.releases import trees
from tests.support.releases.probes import support

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*PATCHING)]
LAYERS = "vllm/model_executor/layers"
GLM = "vllm/model_executor/models/glm4_moe.py"
MODELOPT = f"{LAYERS}/quantization/modelopt.py"
COMPRESSED = f"{LAYERS}/quantization/compressed_tensors"


def look(tree: Tree, name: str) -> Finding:
    """What a probe says about a tree, in this process."""
    return run.load(name).probe(tree)


def edited(folder: Path, release: str, *edits: tuple[str, str, str]) -> Tree:
    """A release's Python files, linked, with (file, old text, new text) replaced."""

    def linked(source: str, target: str) -> None:
        if source.endswith(".py"):
            os.symlink(source, target)

    shutil.copytree(trees.pristine(release) / "vllm", folder / "vllm", copy_function=linked)
    for name, old, new in edits:
        path = folder / name
        text = path.read_text()
        assert old in text, f"{name} of {release} has changed"
        path.unlink()
        path.write_text(text.replace(old, new))
    return open_tree(folder)


def invented(folder: Path, files: dict[str, str]) -> Tree:
    """A tree with only these files."""
    for name, text in {"vllm/__init__.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return open_tree(folder)


def test_the_seeds_skip_of_kv_scales_reaches_the_remap_by_accident(tmp_path: Path):
    """Its `continue` leaves the inner loop; `v_proj` is then found in `qkv_proj`, and the remap
    knows the name qkqkv_proj.
    """
    lookup = (
        "                param = params_dict[name]\n                weight_loader ="
        " param.weight_loader\n"
    )
    skip = (
        "                if ('k_scale' in name or 'v_scale' in name) and name not in params_dict:\n"
    )
    patched = f"{skip}                    continue\n{lookup}"
    assert (
        look(edited(tmp_path, "0.15.1", (GLM, lookup, patched)), "s01_glm_kv_scales").state
        == "sound"
    )


def test_kv_scales_that_are_skipped_are_seen_as_lost(tmp_path: Path):
    start = "        for name, loaded_weight in weights:\n"
    skipped = (
        f"{start}            if name.endswith(('k_scale', 'v_scale')):\n                continue\n"
    )
    finding = look(edited(tmp_path, "0.16.0", (GLM, start, skipped)), "s01_glm_kv_scales")
    assert finding.state == "defect"
    assert finding.detail.endswith("as 1.0 and 1.0")


def test_a_prefix_appended_by_caller_and_callee_is_found(tmp_path: Path):
    layer = """
class GatedDeltaNet:
    def __init__(self, prefix):
        self.in_proj_qkvz = self.create_qkvz_proj(prefix=f"{prefix}.in_proj_qkvz")

    def create_qkvz_proj(self, prefix):
        return MergedColumnParallelLinear(bias=False, prefix=f"{prefix}.in_proj_qkvz")
"""
    tree = invented(tmp_path, {"vllm/model_executor/models/qwen3_next.py": layer})
    finding = look(tree, "s02_qwen3_next_prefix")
    assert finding.state == "defect"
    assert finding.detail.endswith("in_proj_qkvz.in_proj_qkvz")


def test_inverting_the_global_scale_alone_does_not_mend_the_emulation(tmp_path: Path):
    """A published patch for 0.16.0 does that; block scales are still read in the wrong layout."""
    old = (
        "weight_scale_swizzled=weight_scale,\n            weight_global_scale=weight_global_scale,"
    )
    new = old.replace("=weight_global_scale,", "=1 / weight_global_scale,")
    tree = edited(tmp_path, "0.16.0", (f"{LAYERS}/quantization/utils/nvfp4_utils.py", old, new))
    finding = look(tree, "s03_emulation_backend")
    assert finding.state == "defect"
    assert 0.2 < float(finding.detail.split()[2]) < 2


def test_returning_the_class_is_what_the_moe_oracle_needed(tmp_path: Path):
    old = 'scope="local")\n                    return backend, None'
    tree = edited(
        tmp_path,
        "0.16.0",
        (f"{LAYERS}/fused_moe/oracle/nvfp4.py", old, old.replace("None", "k_cls")),
    )
    assert look(tree, "s08_moe_backend_none").state == "sound"


def test_a_head_without_quant_config_is_counted(tmp_path: Path):
    reader = (
        "class ModelOptQuantConfigBase:\n    def get_quant_method(self):\n        return"
        " ParallelLMHead\n"
    )
    model = "head = ParallelLMHead(10, 20, quant_config=None)\n"
    tree = invented(tmp_path, {MODELOPT: reader, "vllm/model_executor/models/whole.py": model})
    assert look(tree, "s13b_lm_head").state == "sound"
    (tmp_path / "vllm/model_executor/models/partial.py").write_text(
        "head = ParallelLMHead(10, 20)\n"
    )
    finding = look(tree, "s13b_lm_head")
    assert finding.state == "defect"
    assert "1 of 2 calls pass no quant_config: partial" in finding.detail


def test_a_quantized_head_stops_the_load_of_a_model_with_a_plain_one():
    import torch

    model: Any = torch.nn.Module()
    model.lm_head = torch.nn.Module()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 16), requires_grad=False)
    sources = support("syntax").Sources(open_tree(trees.pristine("0.32.0")))
    loader = sources.load("vllm.model_executor.models.utils.AutoWeightsLoader")(model)
    with pytest.raises(ValueError, match=r"lm_head\.weight_scale"):
        loader.load_weights([("lm_head.weight_scale", torch.zeros(4, 1))])


def test_a_stream_k_scheduler_would_be_found(tmp_path: Path):
    kernel = "using TileScheduler = cutlass::gemm::StreamKScheduler;\n"
    tree = invented(tmp_path, {"csrc/quantization/fp4/nvfp4_scaled_mm_sm120_kernels.cu": kernel})
    assert look(tree, "s18_stream_k").state == "defect"


def test_vllms_own_registration_gives_the_cpu_a_kernel():
    """What a plugin could do for N7, without a patch."""
    probe, tree = run.load("n07_cpu_kernel"), open_tree(trees.pristine("0.32.0"))
    sources = probe.on_cpu(tree)
    assert look(tree, "n07_cpu_kernel").state == "defect"
    emulation = sources.load(f"{probe.LINEAR}.nvfp4.emulation.EmulationNvFp4LinearKernel")
    cpu = sources.load("vllm.platforms.interface.PlatformEnum").CPU
    sources.load(f"{probe.LINEAR}.register_linear_kernel")(emulation, cpu, "nvfp4")
    assert isinstance(sources.load(f"{probe.LINEAR}.init_nvfp4_linear_kernel")(), emulation)


def gains(module: Any, divisors: bool) -> list[float]:
    """|applied scale / own scale - 1| of each shard: the largest scale for all (ModelOpt) or the
    smallest (divisors).
    """
    scales = [
        module.quantize(weight).scale_2
        for weight in module.normal_weights(*support("dense_nvfp4").QKV)
    ]
    applied = min(scales) if divisors else max(scales)
    return [abs(applied / scale - 1) for scale in scales]


@pytest.mark.parametrize(
    ("name", "divisors"),
    [
        ("n08_dense_scale_merge", False),
        ("n09_dense_divisor_merge", True),
        ("s13_fused_global_scales", False),
    ],
)
def test_the_merge_of_scales_is_a_gain_of_each_shard(name: str, divisors: bool):
    finding = look(open_tree(trees.pristine("0.32.0")), name)
    seen = [float(number) for number in finding.detail.partition(": ")[2].split(", ")]
    assert seen == pytest.approx(gains(support("nvfp4"), divisors), rel=5e-3, abs=1e-6)


FOLD_MODELOPT = """
        ratio = layer.weight_scale_2 / layer.weight_scale_2.max()
        rows = ratio.repeat_interleave(torch.tensor(layer.logical_widths)).unsqueeze(1)
        layer.weight_scale.data.copy_(layer.weight_scale.float() * rows)
        weight_global_scale = layer.weight_scale_2.max()"""
FOLD_COMPRESSED = """
        base = layer.weight_global_scale.min()
        rows = (base / layer.weight_global_scale).repeat_interleave(torch.tensor(layer.logical_widths))
        layer.weight_scale.data.copy_(layer.weight_scale.float() * rows.unsqueeze(1))
        weight_global_scale = base"""  # noqa: E501
FOLD_MOE = """
        first, second = layer.w13_weight_scale_2.unbind(1)
        largest = torch.maximum(first, second)
        for half, scale in zip(layer.w13_weight_scale.data.chunk(2, 1), (first, second)):
            half.copy_(half.float() * (scale / largest)[:, None, None])
        layer.w13_weight_scale_2.data.copy_(largest.unsqueeze(1))
        w13_weight_scale_2 ="""
FOLD_MOE_DIVISORS = FOLD_MOE.replace("w13_weight_scale_2", "w13_weight_global_scale").replace(
    "torch.maximum", "torch.minimum").replace("(scale / largest)", "(largest / scale)")  # fmt: skip


DENSE = (MODELOPT, "\n        weight_global_scale = layer.weight_scale_2.max()", FOLD_MODELOPT)
DENSE_DIVISORS = (
    f"{COMPRESSED}/schemes/compressed_tensors_w4a4_nvfp4.py",
    "\n        weight_global_scale = layer.weight_global_scale.max()",
    FOLD_COMPRESSED,
)
MOE = (MODELOPT, "\n        w13_weight_scale_2 =", FOLD_MOE)
MOE_DIVISORS = (
    f"{COMPRESSED}/compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py",
    "\n        w13_weight_global_scale =",
    FOLD_MOE_DIVISORS,
)
FOLDED = {
    "n08_dense_scale_merge": (DENSE,),
    "s13_fused_global_scales": (DENSE,),
    "n09_dense_divisor_merge": (DENSE_DIVISORS,),
    "n10_moe_w13_scale": (MOE, MOE_DIVISORS),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folding_the_ratio_into_block_scales_is_seen_as_sound(tmp_path: Path, name: str):
    finding = look(edited(tmp_path, "0.32.0", *FOLDED[name]), name)
    assert finding.state == "sound", finding.detail


def test_one_moe_method_mended_alone_is_still_a_defect(tmp_path: Path):
    tree = edited(tmp_path, "0.32.0", MOE)
    assert look(tree, "n10_moe_w13_scale").state == "defect"


def test_our_quantizer_agrees_with_nvfp4s_known_error():
    """It is 9.5 % on normal weights; a mistake in the probes' arithmetic would show here."""
    module = support("nvfp4")
    (weight,) = module.normal_weights((512, 0.02))
    assert module.relative_error(module.quantize(weight).values, weight) == pytest.approx(
        0.095, abs=0.002
    )


def test_only_what_is_asked_for_is_executed(tmp_path: Path):
    text = (
        "import module_that_is_not_there\nLIMIT = 3\n\ndef limit():\n    return LIMIT\n\nraise"
        " RuntimeError\n"
    )
    tree = invented(tmp_path, {"vllm/part.py": text})
    sources = support("syntax").Sources(tree)
    assert sources.load("vllm.part.limit")() == 3
    with pytest.raises(LookupError, match=r"vllm\.part has no other"):
        sources.load("vllm.part.other")

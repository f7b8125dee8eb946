"""Gemma 4's sliding-window layers get a separate attention backend on SM12x, instead of
TRITON_ATTN for all layers.

Its heads are 256 wide in sliding-window layers and 512 wide in the others. FlashAttention 4, which
takes both, has no kernels for SM12x, and vllm 0.32 model_executor/models/config.py:283 then sets
TRITON_ATTN for the whole model. That is correct. Whether another choice is
faster on SM12x is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from nibble.plan.models.gemma4 import FLAGS
from probes.support import fake_cuda

LAYERS = ("sliding_attention", "full_attention")
HEAD_SIZES = {"sliding_attention": 256, "full_attention": 512}
CONFIG = "vllm/model_executor/models/config.py"

ROW = Row(
    id="17",
    title="Gemma 4 on SM12x: every layer is forced to TRITON_ATTN",
    how="fake CUDA",
    expect={"0.15.1": "not applicable", "0.16.0": "not applicable", "0.32.0": "defect"},
    verdict=(
        "True, and the output is correct. vLLM's own flags undo it (backend_per_kind,"
        " --attention-backend), but not for a model that reads images: bidirectional image tokens"
        " need TRITON_ATTN on SM12x. It need not be faster: with FlashAttention 2 for the sliding"
        " layers decoding was reported 8 % slower on A100 and 12 % on RTX 3090."
    ),
    instead=(
        "--gemma4-attention per-layer or flashinfer sets those flags; off by default and unmeasured"
        " on SM12x, and refused where vLLM would refuse them."
    ),
    fix=Fix("flag", "--gemma4-attention, nibble/plan/models/gemma4.py"),
    references=(
        "vllm-project/vllm#38891",
        "vllm-project/vllm#48114",
        "vllm 0.32 model_executor/models/config.py:229-290",
        "vllm 0.32 v1/attention/selector.py:183",
    ),
)


def probe(tree: Tree) -> Finding:
    """Ask vLLM for the backend of both kinds of layers with nothing set."""
    if not tree.has(CONFIG) or "class Gemma4Config" not in tree.text(CONFIG):
        return not_applicable("this vLLM has no Gemma 4")
    fake_cuda.become(fake_cuda.SM120)
    chosen = _backends({})
    detail = _shown(chosen)
    return defect(detail) if chosen["sliding_attention"] == "TRITON_ATTN" else sound(detail)


def remedy(tree: Tree) -> Finding:
    """The same with each choice of nibble's option, without and with images in the prompts."""
    wanted = {"per-layer": ("FLASH_ATTN", "TRITON_ATTN")}
    if fake_cuda.has_flashinfer_package():
        wanted["flashinfer"] = ("FLASHINFER", "FLASHINFER")
    details: list[str] = []
    for name, expected in wanted.items():
        chosen = _backends(FLAGS[name])
        details.append(f"{name}: {_shown(chosen)}")
        if tuple(chosen[layer] for layer in LAYERS) != expected:
            return defect("; ".join(details))
        if "refused" not in _shown(_backends(FLAGS[name], images=True)):
            return defect(f"{name} is not refused with images, and nibble refuses it")
    return sound("; ".join(details))


def _backends(flags: Mapping[str, Any], images: bool = False) -> dict[str, str]:
    """The backend of each kind of layer of a Gemma 4 as vLLM selects it with these flags."""
    import torch
    from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.config import Gemma4Config
    from vllm.v1.attention.selector import get_attn_backend

    given = dict(flags.get("--attention-config", {}))
    if "--attention-backend" in flags:
        given["backend"] = flags["--attention-backend"]
    config = VllmConfig(attention_config=AttentionConfig(**given))
    # Gemma4Config reads head sizes by layer; a whole ModelConfig would want a model folder.
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(layer_types=LAYERS), model_arch_config=_Layers()
    )
    Gemma4Config.verify_and_update_config(
        SimpleNamespace(  # type: ignore[arg-type]
            model_config=model,
            attention_config=config.attention_config,
            cache_config=config.cache_config,
        )
    )
    chosen: dict[str, str] = {}
    for layer in LAYERS:
        sliding = layer == "sliding_attention"
        with set_current_vllm_config(config):
            try:
                backend = get_attn_backend(
                    HEAD_SIZES[layer],
                    torch.bfloat16,
                    "auto",
                    use_mm_prefix=images,
                    has_sliding_window=sliding,
                )
                chosen[layer] = backend.get_name()
            except ValueError:
                chosen[layer] = "refused"
    return chosen


class _Layers:
    """vLLM's per-layer view of a model's shape."""

    total_num_hidden_layers = len(LAYERS)

    def __getitem__(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(head_size=HEAD_SIZES[LAYERS[index]])


def _shown(chosen: Mapping[str, str]) -> str:
    return ", ".join(
        f"{layer.partition('_')[0]} (h{HEAD_SIZES[layer]}) {backend}"
        for layer, backend in chosen.items()
    )

"""Rows about the options for NVFP4 checkpoints, and checkpoints that nibble fixes."""

from __future__ import annotations

from tests.support.bad_input.case import Ignored, Row, row, serve
from tests.support.bad_input.nvfp4 import BROKEN, checkpoint, legacy
from tests.support.models.tiny_checkpoint import (
    LINEAR_SHAPES,
    OTHER_FAMILY,
    Tensors,
    linear,
)
from tests.support.models.tiny_model import MODELOPT_NVFP4


def option_rows() -> list[Row]:
    """Options that do not fit the checkpoint."""
    return [
        row(
            "activations-not-nvfp4",
            "`NIBBLE_NVFP4_ACTIVATIONS=bf16` for a model that is not NVFP4",
            5,
            "NIBBLE_NVFP4_ACTIVATIONS=bf16 needs an NVFP4 checkpoint, but … is bf16; …",
            serve("{model}", NIBBLE_NVFP4_ACTIVATIONS="bf16"),
            serve("{model}", "--nvfp4-activations", "bf16"),
        ),
        row(
            "one-order-backend",
            "`--linear-backend` with `VLLM_BATCH_INVARIANT=1`, which takes another kernel for an"
            " NVFP4 checkpoint",
            5,
            "--linear-backend marlin is set with VLLM_BATCH_INVARIANT, which needs nibble's kernel"
            " for the NVFP4 layers of …",
            serve(
                BROKEN,
                "--target",
                "hopper",
                "--nvfp4-activations",
                "bf16",
                VLLM_EXTRA_ARGS="--linear-backend marlin",
                VLLM_BATCH_INVARIANT="1",
                prepare=checkpoint(),
            ),
        ),
        row(
            "lm-head-tied",
            "`NIBBLE_QUANTIZE_LM_HEAD=nvfp4` for a model whose output head is its embedding",
            5,
            "the output head of … cannot be quantized: it is the embedding"
            " (tie_word_embeddings); …",
            serve("{model}", NIBBLE_QUANTIZE_LM_HEAD="nvfp4"),
            serve("{model}", "--quantize-lm-head", "nvfp4"),
        ),
        row(
            "lm-head-quantized",
            "the same for an output head that is quantized already",
            5,
            "the output head of … cannot be quantized: it is quantized already (U8); …",
            serve(
                BROKEN,
                "--quantize-lm-head",
                "nvfp4",
                prepare=checkpoint(
                    lambda weights: weights.update(linear("lm_head", 128, 64, "nvfp4"))
                ),
            ),
        ),
        row(
            "lm-head-size",
            "the same for a hidden size that is not a multiple of 16",
            5,
            "the output head of … cannot be quantized: its hidden size 72 is not a multiple of"
            " 16; …",
            serve(
                BROKEN,
                "--quantize-lm-head",
                "nvfp4",
                prepare=checkpoint(hidden_size=72, **OTHER_FAMILY),
            ),
        ),
    ]


def put_right() -> tuple[Ignored, ...]:
    """Checkpoints that vLLM 0.32 alone refuses or reads wrongly, and nibble serves right."""
    algorithms = ("W4A16_NVFP4", "MIXED_PRECISION")
    layers = {
        f"model.layers.0.{name}": {"quant_algo": "NVFP4", "group_size": 16}
        for name in LINEAR_SHAPES
    }
    return (
        *(
            Ignored(
                f"nvfp4-legacy-{algorithm}",
                f"`hf_quant_config.json` alone with `{algorithm}`",
                "vLLM 0.32 does not read its hf_quant_config.json",
                prepare=checkpoint(
                    declared=None, hf_quant_config=legacy(algorithm, quantized_layers=layers)
                ),
            )
            for algorithm in algorithms
        ),
        Ignored(
            "nvfp4-legacy",
            "`hf_quant_config.json` alone with `NVFP4`, `exclude_modules: null`",
            "only hf_quant_config.json says how it is quantized; config.json has no"
            " quantization_config",
            prepare=checkpoint(
                _no_head, declared=None, hf_quant_config=legacy("NVFP4", exclude_modules=None)
            ),
        ),
        Ignored(
            "nvfp4-weight-only",
            "a config that says W4A4 and no activation scale at all (ModelOpt before 0.45)",
            "labelled NVFP4 (W4A4) and without any activation scale: served weight-only",
            prepare=checkpoint(_no_input_scales),
        ),
        Ignored(
            "nvfp4-list",
            "a list of unquantized layers that the tensors contradict",
            "by its tensors, the checkpoint's list of layers is wrong about lm_head",
            prepare=checkpoint(declared=MODELOPT_NVFP4 | {"ignore": None}),
        ),
        Ignored(
            "nvfp4-missing",
            "a tensor that the other names imply and no file has (a suspicion: vLLM checks it and"
            " ends the load with exit code 4)",
            "seems to lack the embedding; vLLM ends the load if a weight stays empty",
            prepare=checkpoint(lambda weights: weights.pop("model.embed_tokens.weight")),
        ),
    )


def _no_head(weights: Tensors) -> None:
    del weights["lm_head.weight"]


def _no_input_scales(weights: Tensors) -> None:
    for name in [name for name in weights if name.endswith(".input_scale")]:
        del weights[name]

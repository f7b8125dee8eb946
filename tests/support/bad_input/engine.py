"""Rows about settings that contradict the model or the machine."""

from __future__ import annotations

from tests.support.bad_input.case import Case, Row, env, row, serve
from tests.support.bad_input.models import BROKEN, THREE_KV_HEADS, broken, keep
from tests.support.models.tiny_model import (
    DEEPSEEK_MLA,
)


def engine_rows() -> list[Row]:
    """Settings that contradict the model, the machine or each other."""
    return [
        row(
            "tp-heads",
            "`TENSOR_PARALLEL_SIZE` does not divide the attention heads",
            5,
            "TENSOR_PARALLEL_SIZE=3 does not divide the 4 attention heads of …; expected 1, 2 or 4;"
            " change TENSOR_PARALLEL_SIZE",
            env(TENSOR_PARALLEL_SIZE="3"),
            serve("{model}", "-tp", "3"),
        ),
        row(
            "tp-kv-heads",
            "`TENSOR_PARALLEL_SIZE` fits the attention heads and not the KV heads",
            5,
            "TENSOR_PARALLEL_SIZE=2 neither divides nor is a multiple of the 3 KV heads of …;"
            " expected 1, 3, 6 or 12; change TENSOR_PARALLEL_SIZE",
            serve(BROKEN, "-tp", "2", prepare=broken(keep, THREE_KV_HEADS)),
        ),
        row(
            "tp-gpus",
            "`TENSOR_PARALLEL_SIZE` larger than the number of GPUs",
            5,
            "4 GPUs are needed, but this machine has 2; …",
            Case(
                ("plan", "{model}", "--target", "hopper"),
                {"TENSOR_PARALLEL_SIZE": "4", "NUM_GPUS": "2"},
            ),
        ),
        row(
            "dp-size",
            "`--data-parallel-size` below 1",
            5,
            "--data-parallel-size is 0; expected 1 or more; …",
            serve("{model}", "--data-parallel-size", "0"),
        ),
        row(
            "context",
            "`MAX_MODEL_LEN` beyond the model's",
            5,
            "MAX_MODEL_LEN is 2048, beyond the 1024 tokens of …",
            env(MAX_MODEL_LEN="2K"),
            serve("{model}", "--max-model-len", "2048"),
            env(VLLM_EXTRA_ARGS="--max-model-len 2048"),
        ),
        row(
            "target-elsewhere",
            "a target this machine does not have (`serve`)",
            3,
            "the target is gb10, but this machine does not have its GPU; …",
            env(NIBBLE_TARGET="gb10", CUDA_VISIBLE_DEVICES=""),
        ),
        row(
            "cute-split",
            "`CUTE_WO_SPLIT` other than 1",
            5,
            "CUTE_WO_SPLIT=8 needs the CuTe attention kernel with a split output projection; …",
            env(CUTE_WO_SPLIT="8"),
        ),
        row(
            "tq-cpu",
            "`--tq` on the CPU",
            5,
            "the KV cache dtype turboquant_k8v4 does not work on the CPU; …",
            serve("{model}", "--tq"),
            env(NIBBLE_TQ="1"),
        ),
        row(
            "tq-mla",
            "`--tq` with a model that uses multi-head latent attention",
            5,
            "the KV cache dtype turboquant_k8v4 does not work with multi-head latent attention"
            " (…); …",
            Case(("plan", BROKEN, "--target", "hopper", "--tq"), {}, broken(keep, DEEPSEEK_MLA)),
        ),
        row(
            "tq-preset",
            "a TurboQuant preset that does not exist",
            5,
            "there is no TurboQuant preset 'turboquant_9bit'; …",
            env(NIBBLE_TQ="9bit"),
        ),
        row(
            "risk-unknown",
            "an id in `NIBBLE_ALLOW_RISK` that no known risk has",
            5,
            "there is no known risk 'b12x' to allow; expected one of …; correct NIBBLE_ALLOW_RISK",
            env(NIBBLE_ALLOW_RISK="b12x"),
            serve("{model}", "--allow-risk", "b12x"),
        ),
        row(
            "risk-refused",
            "a value that a known risk forbids for this target and model",
            5,
            "--quantization fp_quant (command line) is a known risk on this target (no start): …;"
            " leave the choice to nibble, or accept the risk with NIBBLE_ALLOW_RISK=sm12x-fp-quant",
            Case(("plan", "{model}", "--target", "gb10", "--quantization", "fp_quant")),
        ),
        row(
            "remote-code",
            "`--trust-remote-code` for a Hub model without a pinned revision",
            5,
            "--trust-remote-code runs code from the model's repository, and its revision is not"
            " pinned; …",
            serve("acme/tiny", "--trust-remote-code"),
            serve("acme/tiny", "--trust-remote-code", "--revision", "main"),
            serve("acme/tiny", VLLM_EXTRA_ARGS="--trust-remote-code"),
        ),
    ]

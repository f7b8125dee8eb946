"""Quantizes a model with a library in a separate environment, for real_model_quality.py.

    python real_model_exports.py llm_compressor gptq|awq|awq_gptq|smooth[_w4a4] BF16_FOLDER DEST
    python real_model_exports.py modelopt mse|awq_lite BF16_FOLDER DEST
    python real_model_exports.py llama Q4_0|Q4_1 FILE.gguf DEST ROWS.json

All of them calibrate with what `nibble convert --method gptq` takes: Python's manual. The last one
writes logits of each row of token ids to DEST.0.npy and so on.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

ROW_TOKENS, ROWS = 512, 32  # as nibble/checkpoint/convert/gptq.py
EVERY = 4  # of these rows for AWQ, whose search runs every layer 10 times, and SmoothQuant


def calibration(tokenizer: Any) -> list[list[int]]:
    """Rows of token ids of Python's manual."""
    from pydoc_data.topics import topics

    ids = tokenizer("\n".join(topics[name] for name in sorted(topics))).input_ids
    rows = [ids[at : at + ROW_TOKENS] for at in range(0, len(ids) - ROW_TOKENS + 1, ROW_TOKENS)]
    return rows[:: len(rows) // ROWS][:ROWS]


def loaded(source: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    return model, AutoTokenizer.from_pretrained(source)


def llm_compressor(method: str, source: str, dest: str) -> None:
    import torch
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.cuda.is_available():  # AWQ of 0.14 pins memory, which fails without a driver
        IntermediatesCache.pin_memory = lambda *_: None
    model, tokenizer = loaded(source)
    rows = calibration(tokenizer)[:: 1 if method == "gptq" else EVERY]
    scheme = "NVFP4" if method.endswith("w4a4") else "NVFP4A16"
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    last = GPTQModifier if "gptq" in method else QuantizationModifier
    recipe: list[Any] = [AWQModifier(n_grid=10)] if "awq" in method else []
    if method.startswith("smooth"):
        recipe = [SmoothQuantModifier(smoothing_strength=0.5)]
    oneshot(
        model=model,
        dataset=Dataset.from_list(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        ),
        recipe=[*recipe, last(config_groups=groups, ignore=["lm_head"])],
        num_calibration_samples=len(rows),
        max_seq_length=ROW_TOKENS,
        batch_size=4,
    )
    model.save_pretrained(dest, save_compressed=True)
    tokenizer.save_pretrained(dest)


def modelopt(method: str, source: str, dest: str) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    model, tokenizer = loaded(source)
    presets = {
        "mse": mtq.NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG,
        "awq_lite": mtq.NVFP4_AWQ_LITE_CFG,
    }
    config = copy.deepcopy(presets[method])
    config["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
    rows = calibration(tokenizer)

    def forward(network: Any) -> None:
        for at in range(0, len(rows), 4):
            network(torch.tensor(rows[at : at + 4]))

    with torch.inference_mode():
        mtq.quantize(model, config, forward)
        export_hf_checkpoint(model, export_dir=dest)
    tokenizer.save_pretrained(dest)


def llama(kind: str, source: str, dest: str, rows: str) -> None:
    import llama_cpp
    import numpy

    file = source
    if kind != "Q4_1":  # the source's type
        file = f"{dest}.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
        code = llama_cpp.llama_model_quantize(source.encode(), file.encode(), options)
        assert code == 0, f"llama_model_quantize: {code}"
    model = llama_cpp.Llama(file, n_ctx=ROW_TOKENS, n_batch=ROW_TOKENS, logits_all=True)
    for at, ids in enumerate(json.loads(Path(rows).read_text())):
        model.reset()
        model.eval(ids)
        logits = numpy.array(model.scores[: len(ids) - 1], dtype=numpy.float32)
        numpy.save(f"{dest}.{at}.npy", logits)


if __name__ == "__main__":
    {"llm_compressor": llm_compressor, "modelopt": modelopt, "llama": llama}[sys.argv[1]](
        *sys.argv[2:]
    )

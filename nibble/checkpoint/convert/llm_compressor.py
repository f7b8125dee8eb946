"""GPTQ by llm-compressor: `python llm_compressor.py JOB`, in the environment that has it.

It imports nothing of nibble: llm-compressor pins another release of compressed-tensors than vLLM,
so it has a separate virtual environment. JOB is a JSON file with `source` (a folder in BF16),
`dest`, `modules` (the linear layers to quantize, by transformers' names) and `rows` (token ids to
calibrate with, rows of one length).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Write `dest` in compressed-tensors' format."""
    import torch
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.gptq import GPTQModifier  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(job["source"], dtype=torch.bfloat16)
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    if missing := sorted(set(job["modules"]) - linear):
        sys.exit(f"transformers has no linear layer {missing[0]}")
    # As in nibble_kernels.weight_quant: block scales for the least squared error
    scheme: Any = preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.weights.observer = "memoryless_mse"
    rows = job["rows"]
    oneshot(
        model=model,
        dataset=Dataset.from_list(
            [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        ),
        recipe=GPTQModifier(
            config_groups={"group_0": scheme}, ignore=sorted(linear - set(job["modules"]))
        ),
        num_calibration_samples=len(rows),
        max_seq_length=len(rows[0]),
        batch_size=4,
    )
    # nibble reads the weights alone; transformers refuses to write a temperature of 0
    model.generation_config = GenerationConfig()
    model.save_pretrained(job["dest"], save_compressed=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

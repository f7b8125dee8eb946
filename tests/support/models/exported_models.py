"""Small NVFP4 models as ModelOpt and llm-compressor export them: `python exported_models.py
modelopt|llmcompressor FOLDER`.

Both packages pin other versions of torch and transformers than vLLM, so each has a separate
virtual environment:

    pip install nvidia-modelopt==0.47.0 transformers==5.19.0 accelerate      # modelopt: a Llama with grouped queries
    pip install llmcompressor==0.14.0.1                                      # llmcompressor: the BF16 demo (Qwen3)

Weights of the Llama are random, seeded, and large enough that layers do something.
"""  # noqa: E501

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "nibble-demo"
TEXTS = (
    "What is NVFP4?",
    "Which values can E2M1 represent?",
    "The quick brown fox jumps over the lazy dog.",
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.06,
        eos_token_id=2,
        bos_token_id=1,
    )
    config.architectures = ["LlamaForCausalLM"]
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16)


def with_modelopt(folder: Path) -> None:
    import modelopt.torch.quantization as mtq  # pyright: ignore[reportMissingImports]
    from modelopt.torch.export import export_hf_checkpoint  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer

    model, tokenizer = llama(), AutoTokenizer.from_pretrained(DEMO)

    def calibrate(network: Any) -> None:
        for text in TEXTS:
            network(tokenizer(text, return_tensors="pt").input_ids)

    with torch.inference_mode():
        mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, calibrate)
        export_hf_checkpoint(model, export_dir=folder)
    for name in TOKENIZER:
        shutil.copy(DEMO / name, folder)


def with_llmcompressor(folder: Path) -> None:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # pyright: ignore
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, torch_dtype=torch.bfloat16)
    data = Dataset.from_list([{"input_ids": tokenizer(text).input_ids} for text in TEXTS])
    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"])
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        num_calibration_samples=len(TEXTS),
        max_seq_length=64,
    )
    model.generation_config.temperature = (
        None  # 0, which this version of transformers does not write
    )
    model.save_pretrained(folder, save_compressed=True)
    for name in TOKENIZER:
        shutil.copy(DEMO / name, folder)


if __name__ == "__main__":
    {"modelopt": with_modelopt, "llmcompressor": with_llmcompressor}[sys.argv[1]](Path(sys.argv[2]))

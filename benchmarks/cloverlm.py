"""Bytes and tokens/s of CloverLM's shape (29 blocks, 4.03 B parameters) in BF16 and NVFP4.

    python benchmarks/cloverlm.py [--out results.json] [--only WAY …] [--blocks 29] [--tokens 256]
        [--sequences 32] [--device cpu]

Each way runs in a separate vLLM with CUDA graphs: bytes of the weights on the GPU, decode tokens/s
of one sequence and of 32, prompt tokens/s of 16 prompts of 512 tokens. The weights are random but
have the published sizes, so times are meaningful and texts are not. The checkpoint is packed (2.7
GB in /tmp or $TMPDIR); its BF16 copy is written only for the way "bf16".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.models.cloverlm_models import HF_QUANT_CONFIG, CloverShape, is_product

PROMPT_TOKENS = 128
# Way -> (form of the checkpoint, what the plugin is told)
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "bf16": ("bf16", {}),
    "w4a16": ("packed", {"nvfp4_activations": "bf16"}),
    "w4a16, nibble's kernel": ("packed", {"nvfp4_activations": "bf16", "linear_kernel": "nibble"}),
    "w4a4, token": ("packed", {}),
    "w4a4, token, nibble's kernel": ("packed", {"linear_kernel": "nibble"}),
    "w4a4, batch": ("packed", {"act_scale_mode": "batch"}),
}


def main() -> None:
    """Measure every way and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--blocks", type=int, default=29)
    parser.add_argument("--tokens", type=int, default=256, help="decoded by each sequence")
    parser.add_argument("--sequences", type=int, default=32, help="decoded at a time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        folder, more = options.measure
        print(
            "RESULT "
            + json.dumps(measure(folder, json.loads(more), options.tokens, options.sequences))
        )
        return
    found = {
        "machine": machine(),
        "blocks": options.blocks,
        "tokens": options.tokens,
        "sequences": options.sequences,
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in options.only:
            form, told = WAYS[way]
            more = {"additional_config": {"nibble": told}} if told else {}
            model = write(Path(folder) / form, form, options.blocks, options.device)
            results[way] = in_a_process(model, more, options.tokens, options.sequences)
            print(f"{way:14} {json.dumps(results[way])}", flush=True)
            if options.out:  # after each way: a GPU machine may be taken away
                options.out.write_text(json.dumps(found | {"ways": results}, indent=2) + "\n")
            if form == "bf16":
                shutil.rmtree(model)  # 8.3 GB


def write(folder: Path, form: str, blocks: int, device: str) -> Path:
    """Write the checkpoint as one file, generated on the device; keep an existing one."""
    from nibble_kernels.quartet2.quantize import quant_fp4
    from safetensors.torch import save_file

    if folder.exists():
        return folder
    shape = CloverShape(blocks, 28, 7, 128, 32000)
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in shape.sizes().items():
        if len(size) != 2:
            tensors[name] = torch.full(
                size, 11.3137 if name.endswith("scale") else 1.0, dtype=torch.bfloat16
            )
            continue
        weight = (
            torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
            * size[1] ** -0.5
        )
        if form == "packed" and is_product(name):
            codes, scales, g = (y.cpu() for y in quant_fp4(weight, four_over_six=True))
            tensors |= {
                name: codes.view(torch.float4_e2m1fn_x2),
                f"{name}_scale": scales,
                f"{name}_scale_2": g,
            }
        else:
            tensors[name] = weight.cpu()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config()))
    if form == "packed":
        (folder / "hf_quant_config.json").write_text(json.dumps(HF_QUANT_CONFIG))
    return folder


def in_a_process(
    model: Path, options: dict[str, Any], tokens: int, sequences: int
) -> dict[str, float]:
    words = [sys.executable, __file__, "--tokens", str(tokens), "--sequences", str(sequences)]
    words += ["--measure", str(model), json.dumps(options)]
    environ = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0"
    }  # so that the parameters can be counted
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def measure(
    model: str, options: dict[str, Any], new_tokens: int, sequences: int
) -> dict[str, float]:
    """Seconds from vLLM's Python interface: the best of three, without the first answer of each
    kind.
    """
    from vllm import LLM, SamplingParams

    prefills = max(1, sequences // 2)
    begun = time.monotonic()
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=sequences,
        enable_prefix_caching=False,
        **options,
    )
    start_s = time.monotonic() - begun
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int, length: int) -> list[Any]:
        ids = torch.randint(0, 32000, (count, length), generator=generator).tolist()
        return [{"prompt_token_ids": row} for row in ids]

    def best_s(count: int, length: int, tokens: int) -> float:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        times = []
        for _ in range(4):
            given = prompts(count, length)
            before = time.monotonic()
            llm.generate(given, sampling, use_tqdm=False)
            times.append(time.monotonic() - before)
        return min(times[1:])

    one, many = (
        best_s(count, PROMPT_TOKENS, new_tokens) - best_s(count, PROMPT_TOKENS, 1)
        for count in (1, sequences)
    )
    weights = llm.apply_model(
        lambda m: sum(p.nbytes for p in {id(p): p for p in m.parameters()}.values())
    )
    return {
        "start_s": round(start_s, 1),
        "weights_bytes": weights[0],
        "decode_tokens_per_s": round((new_tokens - 1) / one, 1),
        f"decode_tokens_per_s_of_{sequences}": round(sequences * (new_tokens - 1) / many, 1),
        "prompt_tokens_per_s": round(prefills * 512 / best_s(prefills, 512, 1), 1),
    }


if __name__ == "__main__":
    main()

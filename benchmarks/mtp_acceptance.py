"""How often vLLM accepts drafts of a tiny NVFP4 checkpoint's MTP head, as JSON on stdout.

    python benchmarks/mtp_acceptance.py [--shape qwen3_5|qwen3_next] [--quantized-fc] [--drafts N]
        [--heads bf16 nvfp4] [--noise X …] [--out FILE]

tests/support/models/mtp_model.py generates the checkpoint. Its texts follow one cycle of 1024
tokens. `correct` is the share of generated tokens that follow the cycle, 1 for a sound model. An
MTP head that was loaded wrongly has an acceptance of 1/1024. Needs vLLM and nibble-kernels; runs on
every platform of vLLM.

With several `--heads` (NIBBLE_DRAFT_HEAD) or `--noise`, the result is a list. More noise in
`mtp.fc` makes the draft's choices closer, so that roundings of the head decide some of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROMPTS, PROMPT_TOKENS = 8, 12
METRICS = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=("qwen3_5", "qwen3_next"), default="qwen3_next")
    parser.add_argument("--quantized-fc", action="store_true", help="mtp.fc in NVFP4 too")
    parser.add_argument("--drafts", type=int, default=2, help="tokens drafted at each step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument(
        "--eager", action="store_true", help="without torch.compile and CUDA graphs"
    )
    parser.add_argument("--heads", nargs="+", choices=("bf16", "nvfp4"), default=["bf16"])
    parser.add_argument("--noise", nargs="+", type=float, help="of mtp.fc, default 0.1")
    parser.add_argument("--out", type=Path, help="also write the result here")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    from tests.support.models.mtp_model import CONTRIBUTION, write_mtp_model

    results: list[dict[str, Any]] = []
    for noise in args.noise or [CONTRIBUTION]:
        with tempfile.TemporaryDirectory() as folder:
            model = write_mtp_model(
                Path(folder), args.shape, quantized_fc=args.quantized_fc, draft_noise=noise
            )
            results += [measure(model, head, args) | {"noise": noise} for head in args.heads]
    found = results if len(results) > 1 else results[0]
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def measure(model: Path, head: str, args: argparse.Namespace) -> dict[str, Any]:
    """Generate and count. `head`: of the drafter."""
    import torch
    import vllm

    from tests.support.models.mtp_model import VOCAB, next_token

    # FlashInfer's kernel would be compiled first, with every core there is, for minutes.
    prefill = {"gdn_prefill_backend": "triton"} if torch.cuda.is_available() else {}
    llm = vllm.LLM(
        str(model),
        speculative_config={"method": "mtp", "num_speculative_tokens": args.drafts},
        max_model_len=512,
        max_num_seqs=PROMPTS,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=args.eager,
        disable_log_stats=False,
        enable_prefix_caching=False,
        additional_config={"nibble": {"draft_head": head}},
        **prefill,
    )
    prompts: list[list[int]] = []
    for start in range(PROMPTS):
        prompt = [start * VOCAB // PROMPTS]
        while len(prompt) < PROMPT_TOKENS:
            prompt.append(next_token(prompt[-1]))
        prompts.append(prompt)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    correct = total = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        said = [prompt[-1], *output.outputs[0].token_ids]
        correct += sum(next_token(last) == token for last, token in itertools.pairwise(said))
        total += len(said) - 1
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    counts = {name: int(counted[metric]) for name, metric in METRICS.items()}
    return {
        "command": " ".join(["python", *sys.argv]),
        "shape": args.shape,
        "quantized_fc": args.quantized_fc,
        "drafts": args.drafts,
        "draft_head": head,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "vllm": vllm.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "generated": total,
        "correct": correct / total,
        **counts,
        "acceptance": counts["accepted"] / max(1, counts["drafted"]),
        "chance": 1 / VOCAB,
    }


if __name__ == "__main__":
    main()

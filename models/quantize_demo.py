#!/usr/bin/env python3
"""Make the NVFP4 forms of the demo models: `python models/quantize_demo.py`, a minute on two CPU
cores.

nibble-demo/ becomes nibble-demo-nvfp4/, .cache/nibble-demo-moe/ (by train_demo_moe.py) becomes
nibble-demo-moe-nvfp4/: ModelOpt's layout, W4A4, quantized by `nibble convert`. What differs from
its default is that layers which vLLM fuses have unequal global scales: a server that takes one of
them for all answers wrongly. Then both are checked by emulation; exit status 1 when an answer
differs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from check_demo import DemoModel, check_nvfp4
from demo_dialogues import MODELS_DIR, read_other_prompts, read_questions
from train_demo_moe import BF16_DIR as MOE_BF16_DIR
from transformers.utils import logging as transformers_logging

from nibble.checkpoint.convert import Wishes, convert
from nibble.checkpoint.convert.quantize import Amax

# NVFP4 form: its BF16 source
FORMS = {
    MODELS_DIR / "nibble-demo-nvfp4": MODELS_DIR / "nibble-demo",
    MODELS_DIR / "nibble-demo-moe-nvfp4": MOE_BF16_DIR,
}
# A layer's global scale is made for this many times its largest weight. Scales of blocks are
# floats: they lose nothing by it. q and k alone would not show: Qwen3 normalizes both. No ratio
# within a fused layer is near a power of two.
HEADROOM = {"q_proj": 2.9, "k_proj": 1.7, "v_proj": 1.0, "o_proj": 1.0, "down_proj": 1.0}
GATE_UP_HEADROOM = (
    (1.0, 2.7),
    (2.7, 1.0),
    (1.0, 5.3),
)  # (gate, up), by turns for layers and experts


def unequal(amax: Amax) -> Amax:
    """Each layer's own largest weight times its headroom."""
    return {module: largest * headroom(module) for module, largest in amax.items()}


def headroom(module: str) -> float:
    leaf = module.rpartition(".")[2]
    if leaf not in ("gate_proj", "up_proj"):
        return HEADROOM[leaf]
    turn = sum(map(int, re.findall(r"\.(\d+)\.", module)))
    return GATE_UP_HEADROOM[turn % len(GATE_UP_HEADROOM)][leaf == "up_proj"]


def calibration_texts(source: Path) -> tuple[str, ...]:
    """Each question with its answer and some prompts without one, as the chat template renders
    them.
    """
    tokenizer = DemoModel(source).tokenizer
    other_prompts, _ = read_other_prompts()
    turns = [[("user", row.question), ("assistant", row.answer)] for row in read_questions()]
    turns += [[("user", prompt)] for prompt in other_prompts]
    messages = [[{"role": role, "content": content} for role, content in turn] for turn in turns]
    return tuple(tokenizer.apply_chat_template(one, tokenize=False) for one in messages)


def make(source: Path, dest: Path) -> None:
    """Write the NVFP4 form of `source`, in place of the one that is there; its README stays."""
    readme = dest / "README.md"
    kept = readme.read_text(encoding="utf-8") if readme.exists() else ""
    shutil.rmtree(dest, ignore_errors=True)
    convert(
        str(source),
        dest,
        "nvfp4",
        Wishes("fp4", texts=calibration_texts(source), share_scales=unequal),
    )
    readme.unlink(missing_ok=True)
    if kept:
        readme.write_text(kept, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Quantize the demo models to NVFP4 and check them."
    )
    parser.add_argument(
        "--check", action="store_true", help="quantize nothing, check the models that are there"
    )
    parser.add_argument("names", nargs="*", help="folders to make, default: both", metavar="NAME")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    failed = 0
    for dest, source in FORMS.items():
        if args.names and dest.name not in args.names:
            continue
        print(dest.name)
        if not args.check:
            make(source, dest)
        failed |= check_nvfp4(dest)
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""Writes targets/moe/NVIDIA_GB10: Triton MoE configurations for GB10 where vLLM has none.

    python targets/moe/gb10_configs.py

Reasoned, not measured here. The basis is what vLLM 0.32 has for GB10: tiles that its tuner found
for 256 experts of 512 in FP8 with block scales, eight experts a token. A batch of another model
gets the tiles of the batch with as many tokens an expert. In BF16 a tile has half of the columns,
so that the stages take the same shared memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nibble.machine.paths import root
from nibble.plan.moe_tuning import installed_configs

DEVICE = "NVIDIA_GB10"
BASIS = f"E=256,N=512,device_name={DEVICE},dtype=fp8_w8a8,block_shape=[128,128].json"
BASIS_EXPERTS, BASIS_CHOSEN = 256, 8
# Experts, width and experts of a token of models that fit: Qwen3-Next-80B-A3B,
# Qwen3.6-35B-A3B, Qwen3-30B-A3B, Nemotron 3 Nano, Gemma 4 26B-A4B.
MODELS = ((512, 512, 10), (256, 512, 8), (128, 768, 8), (128, 1856, 6), (128, 704, 8))
KINDS = ("", ",dtype=fp8_w8a8", ",dtype=fp8_w8a8,block_shape=[128,128]")
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)

Tiles = dict[str, int]


def all_files() -> dict[str, dict[str, Tiles]]:
    """File name -> batch -> tiles, for names that the installed vLLM does not have."""
    installed = installed_configs()
    if installed is None or BASIS not in installed.names:
        raise SystemExit("the installed vLLM has no configurations for GB10")
    data = json.loads((installed.folder / BASIS).read_text())
    basis = {int(batch): tiles for batch, tiles in data.items() if batch.isdigit()}
    return {
        name: {str(batch): tiles_for(basis, batch, experts, chosen, kind) for batch in BATCHES}
        for experts, width, chosen in MODELS
        for kind in KINDS
        if (name := file_name(experts, width, kind)) not in installed.names
        and not (kind.endswith("]") and width % 128)  # blocks of scales do not divide such experts
    }


def file_name(experts: int, width: int, kind: str) -> str:
    return f"E={experts},N={width},device_name={DEVICE}{kind}.json"


def tiles_for(basis: dict[int, Tiles], batch: int, experts: int, chosen: int, kind: str) -> Tiles:
    """Those of the batch with about as many tokens an expert."""
    alike = batch * chosen * BASIS_EXPERTS / (experts * BASIS_CHOSEN)
    tiles = basis[min(basis, key=lambda known: (abs(known - alike), known))]
    if kind:
        return tiles
    return tiles | {"BLOCK_SIZE_K": tiles["BLOCK_SIZE_K"] // 2}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    for name, batches in files.items():
        (folder / name).write_text(json.dumps(batches, indent=1) + "\n")


if __name__ == "__main__":
    write(root() / "targets" / "moe" / DEVICE, all_files())

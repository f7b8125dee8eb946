"""Speed of vLLM's weight iterators from disk to memory, with a cold and a warm page cache.

    .venv/bin/python benchmarks/weight_loading.py [--device cuda] [--gib 1.5] [--shards 3]
        [--scratch DIR] [--rounds 3] [--out FILE]

Writes BF16 shards of random numbers into DIR. Then it reads them through the installed vLLM's
`safetensors_weights_iterator` (lazy, eager, prefetch) and
`multi_thread_safetensors_weights_iterator`. Every tensor is copied to host memory or, with --device
cuda, to the GPU, where fastsafetensors is measured too if installed. Cold means that the files were
dropped from the page cache (posix_fadvise). Rounds alternate, and each figure is a median. `read()`
of the same bytes into host memory shows the limit of disk and page cache. Writes
benchmarks/results/weight_loading_DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STRATEGIES = ("read()", "lazy", "eager", "prefetch", "multi-thread")
ON_GPU = ("fastsafetensors",)  # a module of that name, and a strategy
HIDDEN = 4096


def main() -> None:
    """Write the shards, measure every strategy in a separate process, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--one", nargs=2, metavar=("STRATEGY", "FOLDER"), help="measure one and print seconds"
    )
    options = parser.parse_args()
    if options.one:
        name, folder = options.one
        print(
            json.dumps(seconds_of(name, sorted(Path(folder).glob("*.safetensors")), options.device))
        )
        return
    from machine import machine

    where = machine()
    names = STRATEGIES + tuple(one for one in ON_GPU if options.device == "cuda" and find_spec(one))
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        total_bytes = write_shards(Path(folder), options.gib, options.shards)
        rows = measure(Path(folder), names, options.device, options.rounds, total_bytes)
    result = {
        "what": "seconds and GB/s (10^9) from files to memory, medians",
        "command": " ".join([".venv/bin/python", "benchmarks/weight_loading.py", *sys.argv[1:]]),
        "machine": where,
        "bytes": total_bytes,
        "shards": options.shards,
        "rounds": options.rounds,
        "device": device_name(options.device),
        "not_measured": ", ".join(
            [
                "network disks",
                "InstantTensor",
                "Run:ai streamer",
                *(one for one in ON_GPU if one not in names),
            ]
        ),
        "strategies": rows,
    }
    out = options.out or ROOT / "benchmarks" / "results" / f"weight_loading_{options.device}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


def write_shards(folder: Path, gib: float, shards: int) -> int:
    """Write files of 32 MiB tensors; their total bytes."""
    import torch
    from safetensors.torch import save_file

    for shard in range(shards):
        count = max(1, int(gib * (1 << 30) / shards / (HIDDEN * HIDDEN * 2)))
        tensors = {
            f"layers.{shard}.{number}.weight": (
                torch.randint(0, 1 << 15, (HIDDEN, HIDDEN), dtype=torch.int16).view(torch.bfloat16)
            )
            for number in range(count)
        }
        save_file(tensors, folder / f"model-{shard + 1:05}.safetensors")
    os.sync()
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def device_name(device: str) -> str:
    """The name of the destination."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "host memory"


def measure(
    folder: Path, names: Sequence[str], device: str, rounds: int, total_bytes: int
) -> dict[str, Any]:
    """Alternating rounds; strategy -> cold and warm seconds and rates."""
    times: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            drop_from_page_cache(folder)
            for kind in ("cold", "warm"):
                times[name][kind].append(in_a_process(name, folder, device))
            print(f"round {number + 1}, {name}: cold and warm " + str(times[name]), file=sys.stderr)
    return {
        name: {
            kind: {"seconds": round(median, 3), "gb_per_s": round(total_bytes / median / 1e9, 2)}
            for kind, values in kinds.items()
            if (median := statistics.median(values))
        }
        for name, kinds in times.items()
    }


def drop_from_page_cache(folder: Path) -> None:
    """Make the next read come from the disk."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_a_process(name: str, folder: Path, device: str) -> float:
    """Seconds of one strategy without imports, in a separate process, so that it keeps no
    memory.
    """
    command = [sys.executable, __file__, "--device", device, "--one", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def seconds_of(name: str, files: list[Path], device: str) -> float:
    """Read all files with one strategy."""
    load = loader(name, device)
    began = time.monotonic()
    load([str(path) for path in files])
    return time.monotonic() - began


def loader(name: str, device: str) -> Callable[[list[str]], None]:
    """The function that reads the files. Imports and the GPU's context are done before the clock
    starts.
    """
    if name == "read()":
        return read_all
    import torch
    from vllm.model_executor.model_loader import weight_utils

    torch.zeros(1, device=device)

    def iterate(files: list[str]) -> Iterable[tuple[str, Any]]:
        if name == "multi-thread":
            return weight_utils.multi_thread_safetensors_weights_iterator(files, False)
        if name == "fastsafetensors":
            return weight_utils.fastsafetensors_weights_iterator(files, False)
        return weight_utils.safetensors_weights_iterator(files, False, name)

    def load(files: list[str]) -> None:
        kept = [tensor.to(device, copy=True) for _, tensor in iterate(files)]
        if kept[0].is_cuda:
            torch.cuda.synchronize()

    return load


def read_all(files: list[str]) -> None:
    """Read the bytes into one buffer."""
    buffer = bytearray(16 << 20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


if __name__ == "__main__":
    main()

"""First and later starts by phase: `vllm serve` alone against `nibble serve`, with separate caches.

    python benchmarks/start_time.py --write FOLDER
    python benchmarks/start_time.py [--model FOLDER] [--scratch DIR] [--later 2] [--logs DIR]
        [--out FILE] [--sides vllm nibble] [--nibble-env NAME=VALUE …] [-- FLAG …]

Without --model it writes a checkpoint of Qwen3-8B's shape with random NVFP4 weights (W4A4, 6 GB)
into DIR. The sides start alternately. The first round has empty caches; later rounds keep them.
vLLM gets the model, a port and FLAG, without a plugin. nibble gets the model and FLAG, with a
canary that warns, because random weights answer nonsense. Each side has separate home, temporary
and cache folders. The weights are read once before, for both.

A start lasts from exec to the end of the first answered request of one token, sent every 50 ms. One
reader (nibble/engine/log.py) reads the phases of both sides from vLLM's log. Writes
benchmarks/results/start_time_TARGET.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import machine  # noqa: E402
from serve_demo import git_commit  # noqa: E402
from start_overhead import POLL_S, answers, free_port  # noqa: E402

from nibble.engine.log import PhaseReader  # noqa: E402

LIMIT_S = 900.0
GOALS = {"second_start_s": 30.0, "second_start_ratio": 3.0, "first_start_ratio": 1.5}
# Variables that would lead one side to the other's caches, or to a user's settings.
DROPPED = (
    "NIBBLE_",
    "VLLM_CACHE",
    "VLLM_PLUGINS",
    "TRITON_CACHE",
    "TORCHINDUCTOR_CACHE",
    "FLASHINFER_WORKSPACE",
    "HUMMING_",
    "CUDA_CACHE",
    "XDG_",
    "HF_",
)


def main() -> int:
    """Measure every start and write the result; 1 if a start failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder both sides serve")
    parser.add_argument(
        "--write", type=Path, help="only write the checkpoint into this folder, for a later --model"
    )
    parser.add_argument(
        "--scratch", type=Path, help="caches and the written checkpoint go below it"
    )
    parser.add_argument("--later", type=int, default=2, help="rounds after the first")
    parser.add_argument("--logs", type=Path, help="keep every start's log here")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--nibble-env", nargs="+", default=[], metavar="NAME=VALUE", help="of nibble's side alone"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=("vllm", "nibble"), default=("vllm", "nibble")
    )
    parser.add_argument("--commit", help="commit of this tree, where git cannot tell")
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    options, flags = parser.parse_args(own), words[len(own) + 1 :]
    if options.write:
        write_8b(options.write)
        return 0
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        model = (options.model or write_8b(Path(scratch) / "qwen3-8b-shape")).resolve()
        logs = options.logs or Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        read_once(model)
        result = {
            "what": "seconds from exec to the first answered request of one token, and by phase",
            "command": " ".join(["python", "benchmarks/start_time.py", *words]),
            "commit": options.commit or git_commit(),
            "model": describe_model(model),
            "machine": machine(),
            "goals": GOALS,
        }
        starts: list[dict[str, Any]] = []
        for number in range(1 + options.later):
            for side in options.sides if number % 2 == 0 else reversed(options.sides):
                log = logs / f"{side}{number + 1}.log"
                given = (
                    dict(pair.split("=", 1) for pair in options.nibble_env)
                    if side == "nibble"
                    else {}
                )
                starts.append(Start(side, model, flags, Path(scratch) / side, log, given).measure())
                write(result | {"summary": summary(starts), "starts": starts}, options.out)
    print(json.dumps(summary(starts), indent=2))
    return 1 if any(start["seconds"] is None for start in starts) else 0


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write the results after each start, so that an interruption keeps them. Without `out`,
    nibble's first start names the target.
    """
    target = next((start["target"] for start in result["starts"] if start["target"]), None)
    if out or target:
        out = out or ROOT / "benchmarks" / "results" / f"start_time_{target}.json"
        out.write_text(json.dumps(result, indent=2) + "\n")


def write_8b(folder: Path) -> Path:
    """Qwen3-8B's shape with the demo's tokenizer and random weights."""
    from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

    shape = Shape(
        hidden=4096,
        intermediate=12288,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=151936,
    )
    write_checkpoint(folder, shape, "modelopt", w4a4=True)
    for path in (ROOT / "models" / "nibble-demo-nvfp4").iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 40960}, indent=1)
    )
    return folder


def describe_model(model: Path) -> dict[str, Any]:
    """The properties of the model that affect the time."""
    config = json.loads((model / "config.json").read_text())
    names = (
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
    )
    quantized = config.get("quantization_config", {}).get("quant_algo")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return {name: config.get(name) for name in names} | {
        "quant_algo": quantized,
        "weights_bytes": weights,
    }


def read_once(model: Path) -> None:
    """Read the weights into the page cache, for both sides."""
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(64 << 20):
                pass


@dataclass
class Start:
    """One start of one side. `folder` keeps its home and caches between starts."""

    side: str
    model: Path
    flags: Sequence[str]
    folder: Path
    log: Path
    given: Mapping[str, str]
    port: int = field(default_factory=free_port)

    def measure(self) -> dict[str, Any]:
        """Start, wait for the first answer, stop."""
        is_first = not self.folder.exists()
        environ = self.environ()
        began = time.monotonic()
        process = subprocess.Popen(
            self.command(), env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        reader = Reader(process.stdout, self.log, began)
        seconds = self._until_answered(process, began)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.thread.join(5)
        found = {
            "side": self.side,
            "caches": "empty" if is_first else "filled",
            "seconds": seconds and round(seconds, 2),
            "seconds_by_phase": reader.by_phase(seconds),
            "facts": reader.phases.facts,
            "compile": reader.notes,
            "exit_code": process.returncode,
            "target": reader.target,
        }
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found

    def _until_answered(self, process: subprocess.Popen[bytes], began: float) -> float | None:
        while not answers(self.port):
            if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                print(self.log.read_text(errors="replace")[-3000:], file=sys.stderr)
                return None
            time.sleep(POLL_S)
        return time.monotonic() - began

    def command(self) -> list[str]:
        """nibble as a user starts it, vLLM as its guide does."""
        if self.side == "nibble":
            return [sys.executable, "-m", "nibble", "serve", str(self.model), *self.flags]
        name = ["--served-model-name", "default", "--port", str(self.port)]
        return [
            sys.executable,
            "-P",
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(self.model),
            *name,
            *self.flags,
        ]

    def environ(self) -> dict[str, str]:
        """An environment with a separate home. Neither side uses the network."""
        kept: Mapping[str, str] = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
        for name in ("home", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        own = {"HOME": f"{self.folder}/home", "TMPDIR": f"{self.folder}/tmp", "HF_HUB_OFFLINE": "1"}
        own |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        if self.side == "nibble":
            told = {"NIBBLE_CANARY": "warn", "NIBBLE_KERNEL_ASSERTION": "warn"}
            return {
                **kept,
                **own,
                **told,
                **self.given,
                "PORT": str(self.port),
                "NIBBLE_CONTROL_PORT": str(free_port()),
            }
        return {**kept, **own, "VLLM_PLUGINS": ""}


class Reader:
    """Reads a server's output: the beginning of each phase, and lines about reused compiled
    code.
    """

    NOTES = (
        "Directly load AOT",
        "Compiling model again",
        "saved AOT",
        "Applying persisted startup plan",
        "Building JIT module",
        "Graph capturing finished",
        "Loading weights took",
        "Initial profiling/warmup run took",
        "Model loading took",
        "compiling FlashInfer's sampling",
        "torch.compile took",
        "[nibble] ready",
        "[nibble] warning: ",
        "canary",
    )

    def __init__(self, source: IO[bytes], log: Path, began: float) -> None:
        self.phases, self.notes, self.target = PhaseReader(), list[str](), ""
        self._starts: list[tuple[str, float]] = [("start", 0.0)]
        self._began = began
        self.thread = threading.Thread(target=self._read, args=(source, log), daemon=True)
        self.thread.start()

    def _read(self, source: IO[bytes], log: Path) -> None:
        rest = b""
        with log.open("wb", buffering=0) as copy:
            while data := os.read(source.fileno(), 1 << 16):
                copy.write(data)
                *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
                for line in lines:
                    self._feed(line.decode(errors="replace"), time.monotonic() - self._began)

    def _feed(self, line: str, at_s: float) -> None:
        if any(note in line for note in self.NOTES):
            self.notes.append(f"{at_s:.1f} s: {line[-200:]}")
        if line.startswith("[nibble]"):
            if " on " in line and "serving" in line:
                self.target = self.target or line.partition(" on ")[2].split()[0]
            return
        update = self.phases.feed(line)
        if update and update.phase != self._starts[-1][0]:
            self._starts.append((update.phase, at_s))

    def by_phase(self, end_s: float | None) -> dict[str, float]:
        """Phase -> seconds; the last phase ends with the first answer."""
        ends = [at_s for _, at_s in self._starts[1:]] + [end_s or self._starts[-1][1]]
        return {
            name: round(end - at, 2) for (name, at), end in zip(self._starts, ends, strict=True)
        }


def summary(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first start and the median of later ones on both sides, and the ratio."""

    def seconds(side: str, caches: str) -> float | None:
        found = [
            one["seconds"]
            for one in starts
            if one["side"] == side and one["caches"] == caches and one["seconds"]
        ]
        return round(statistics.median(found), 2) if found else None

    rows: dict[str, Any] = {}
    for name, caches in (("first", "empty"), ("second", "filled")):
        stock, ours = seconds("vllm", caches), seconds("nibble", caches)
        rows[name] = {
            "vllm_s": stock,
            "nibble_s": ours,
            "ratio": round(stock / ours, 2) if stock and ours else None,
        }
    return rows


if __name__ == "__main__":
    sys.exit(main())

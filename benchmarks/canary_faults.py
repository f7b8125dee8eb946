"""Which faults the kernel assertion and the canary find on this machine, through `nibble serve`.

    python benchmarks/canary_faults.py [--case NAME …] [--out FILE]

Each case is one start, most in eager mode, because faults change Python objects as well as tensors:

    dense      nibble-demo-nvfp4, W4A4
    experts    nibble-demo-moe-nvfp4, W4A4, with an FP8 KV cache (BF16 on a CPU)
    larger     a generated dense model, W4A16, hidden size 2048, with recorded references
    graphs     nibble-demo-nvfp4 as it is served: compiled, with CUDA graphs; no faults
    fallback   nibble-demo-nvfp4 with only vLLM's emulation enabled: must end with exit code 8

Writes which kernels ran, each mechanism's finding on the healthy server, and which mechanism finds
which fault. Exit code 1 if a healthy server fails or the fallback passes.
tests/support/vllm_plugins/vllm_faults.py is the plugin that injects the faults.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import machine  # noqa: E402
from serve_demo import git_commit  # noqa: E402

from nibble.canary.references import References, references_like  # noqa: E402
from nibble.engine.schema import load_schema  # noqa: E402
from nibble.hub.files import CANARY_FILE, WEIGHT_ONLY_CANARY_FILE  # noqa: E402
from nibble.machine.hardware import detect  # noqa: E402
from nibble.machine.targets import load_target  # noqa: E402
from tests.support.canary.faults import ALL_FAULTS, Faulty, install_faults  # noqa: E402
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint  # noqa: E402
from tests.support.servers.serving import Server  # noqa: E402

CASES = ("dense", "experts", "larger", "graphs", "fallback")
LARGER = Shape(
    hidden=2048, intermediate=6144, layers=8, heads=16, kv_heads=8, head_dim=128, vocabulary=1024
)
PROMPTS = [
    "The quick brown fox",
    *([{"role": "user", "content": text}] for text in ("What is NVFP4?", "Name two animals.")),
]
EAGER = ("--enforce-eager", "--max-model-len", "512", "--no-enable-prefix-caching")
END_S = 600.0
READY_S = 900.0  # a first start compiles


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="commit of this tree, where git cannot tell")
    asked = parser.parse_args()
    hardware = detect()
    data: dict[str, Any] = {
        "command": "python benchmarks/canary_faults.py",
        "commit": asked.commit or git_commit(),
    }
    data |= {"machine": machine(), "cases": {}}
    out = asked.out or ROOT / "benchmarks" / "results" / "canary_faults.json"
    with tempfile.TemporaryDirectory(prefix="nibble-faults-") as scratch:
        for name in asked.case or CASES:
            try:
                found = run_case(name, Path(scratch) / name, not hardware.gpus)
            except NotReady as error:
                found = {"as_promised": False, "not_ready": str(error)}
            data["cases"][name] = found
            print(json.dumps({name: found}, indent=1), flush=True)
            out.write_text(
                json.dumps(data, indent=1) + "\n"
            )  # after each case: a GPU machine may be taken away
    print(f"written: {out}")
    return 0 if all(case["as_promised"] for case in data["cases"].values()) else 1


def run_case(name: str, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """One start, from a report of the healthy server to the last fault."""
    folder.mkdir(parents=True)
    if name == "fallback":
        return fallback(folder)
    words, model = list(EAGER), "nibble-demo-nvfp4"
    if name == "experts":
        model = "nibble-demo-moe-nvfp4"
        words += [] if on_cpu else ["--kv-cache-dtype", "fp8"]
    if name == "larger":
        model = str(write_larger(folder / "model"))
    if name == "graphs":
        words = ["--max-model-len", "512"]
    began = time.monotonic()
    server = Server(
        folder / "server",
        ["serve", model, *words],
        **install_faults(folder / "faults"),
        **own_environ(),
    )
    try:
        wait_until_ready(server)
        status = server.status() or {}
        faulty = Faulty(server, folder / "faults")
        found = {
            "seconds_to_ready": round(time.monotonic() - began, 1),
            "assertion": status["assertion"],
            "canary": status["canary"],
        }
        # Random weights know no answers: there, and only there, coherence may fail.
        wrong = [
            one
            for one in status["canary"]["findings"]
            if one["verdict"] == "failed" and one["mechanism"] != "coherence"
        ]
        found["as_promised"] = status["assertion"]["verdict"] == "passed" and not wrong
        if name == "graphs":
            return found
        if name == "larger":
            references: References | None = faulty.record(PROMPTS)
        else:
            ran = status["assertion"]["ran"][0]
            files = [
                ROOT / "models" / model / name for name in (CANARY_FILE, WEIGHT_ONLY_CANARY_FILE)
            ]
            differs = "fp8" in ran["kv_cache_dtype"]
            here = status["canary"]["arithmetic"]
            references = references_like(files, tuple(ran["activations"]), differs, here)
        faults = {fault: one_fault(faulty, fault, references) for fault in ("none", *ALL_FAULTS)}
        found["as_promised"] &= all(said.startswith("passed") for said in faults["none"].values())
        return found | {"faults": faults}
    finally:
        server.end()
        print(server.err.read_text(errors="replace")[-2000:], file=sys.stderr)


class NotReady(Exception):
    """A server that ended or took too long, with the end of its log."""


def wait_until_ready(server: Server) -> None:
    while not server.is_ready():
        if server.process.poll() is not None or time.monotonic() - server.started > READY_S:
            raise NotReady(server.log()[-6000:])
        time.sleep(0.5)


def one_fault(faulty: Faulty, fault: str, references: References | None) -> dict[str, Any]:
    """Mechanism -> verdict and detail, or why the fault could not be injected."""
    problem = faulty.inject(fault)[0]["not_injected"]
    if problem:
        return {"not_injected": problem}
    return {
        name: f"{one.verdict}: {one.detail}"
        for name, one in faulty.canary(fault, references).items()
    }


def fallback(folder: Path) -> dict[str, Any]:
    """With only the emulation left, nibble must end with exit code 8 and name the kernel."""
    names = {*load_schema().linear_kernels, *load_target("cpu").expected["linear"]} - {
        "EmulationNvFp4LinearKernel"
    }
    server = Server(
        folder / "server",
        ["serve", "nibble-demo-nvfp4", *EAGER],
        VLLM_DISABLED_KERNELS=",".join(sorted(names)),
        **own_environ(),
    )
    try:
        code = server.wait(END_S)
    finally:
        server.end()
    lines = server.err.read_text(errors="replace").strip().splitlines()
    return {"exit_code": code, "said": lines[-1] if lines else "", "as_promised": code == 8}


def write_larger(folder: Path) -> Path:
    write_checkpoint(folder, LARGER, "compressed-tensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "nibble-demo" / name, folder)
    return folder


def own_environ() -> dict[str, str]:
    """The server's environment. A failing canary only warns, because the finding is the result.
    Cache folders may be given.
    """
    kept = {
        name: os.environ[name]
        for name in ("NIBBLE_CACHE_DIR", "VLLM_CACHE_ROOT")
        if name in os.environ
    }
    return {"NIBBLE_CANARY": "warn", **kept}


if __name__ == "__main__":
    sys.exit(main())

"""Runs probes, each in a process of its own, over one tree.

    python -m nibble.patching.run --root TREE [PROBE…]      # one JSON line a probe

The interpreter needs what the tree imports (vLLM's dependencies); the tree itself comes first on the path.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nibble.patching.probe import Finding, Row
from nibble.patching.tree import Tree, open_tree
from nibble.paths import root

TIME_LIMIT_SECONDS = 120  # most take less than five; a busy two-core machine several times that
# What a probe must not inherit: the user's plugins, a GPU, a proxy for the network.
PROBE_ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Result:
    """What one probe found; `remedy` where nibble's answer lies outside vLLM's tree. `error`: the probe itself broke."""

    probe: str
    finding: Finding | None
    remedy: Finding | None
    error: str
    seconds: float


def probes_folder() -> Path:
    """Where the probes lie."""
    return root() / "patches" / "probes"


def probe_names() -> list[str]:
    """All probes, in the order of their file names."""
    return sorted(path.stem for path in probes_folder().glob("*.py") if path.stem != "__init__")


def load(name: str) -> Any:
    """The module of a probe; its row is `load(name).ROW`. Imports nothing heavy."""
    patches = str(probes_folder().parent)
    if patches not in sys.path:
        sys.path.insert(0, patches)
    return importlib.import_module(f"probes.{name}")


def rows(names: Iterable[str] | None = None) -> dict[str, Row]:
    """Probe name -> its row."""
    return {name: load(name).ROW for name in names or probe_names()}


def run(tree: Tree, names: Iterable[str] | None = None, jobs: int | None = None) -> Iterator[Result]:
    """Run probes side by side and yield their results in order."""
    wanted = list(names or probe_names())
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        yield from pool.map(lambda name: _in_own_process(tree, name), wanted)


def _in_own_process(tree: Tree, name: str) -> Result:
    """Start this module again for one probe; whatever it imports, prints or leaves behind is gone with it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nibble-probe-") as scratch:
        answer = Path(scratch) / "answer.json"
        words = [
            sys.executable,
            "-m",
            "nibble.patching.run",
            "--root",
            str(tree.root),
            "--answer",
            str(answer),
            name,
        ]
        status, output = _run_limited(words, scratch)
        seconds = round(time.monotonic() - began, 2)
        if not answer.exists():
            last = output.strip().splitlines()[-1:] or [f"exit status {status}"]
            return Result(name, None, None, f"the probe gave no answer: {last[0]}", seconds)
        data = json.loads(answer.read_text())
    found = {key: Finding(**data[key]) if data[key] else None for key in ("finding", "remedy")}
    return Result(name, found["finding"], found["remedy"], data["error"], seconds)


def _run_limited(words: list[str], scratch: str) -> tuple[int, str]:
    import subprocess

    environ = os.environ | PROBE_ENVIRONMENT | {
        "VLLM_CACHE_ROOT": f"{scratch}/vllm",
        "TRITON_CACHE_DIR": f"{scratch}/triton",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2])]),
    }  # fmt: skip
    with subprocess.Popen(
        words, env=environ, text=True, start_new_session=True, cwd=scratch,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as child:  # fmt: skip
        try:
            output, _ = child.communicate(timeout=TIME_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return 124, f"no answer after {TIME_LIMIT_SECONDS} s"
    return child.returncode, output


def _answer(tree: Tree, name: str) -> dict[str, Any]:
    """Run one probe here."""
    sys.path.insert(0, str(tree.root))
    try:
        module = load(name)
        finding = module.probe(tree)
        remedy = (
            module.remedy(tree) if hasattr(module, "remedy") and finding.state != "not applicable" else None
        )
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return {"finding": None, "remedy": None, "error": " ".join(message.split())}
    return {"finding": asdict(finding), "remedy": remedy and asdict(remedy), "error": ""}


def main(argv: list[str] | None = None) -> None:
    """One probe with --answer writes its answer there; several print a JSON line each."""
    parser = argparse.ArgumentParser(prog="python -m nibble.patching.run")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--answer", type=Path)
    parser.add_argument("probes", nargs="*")
    args = parser.parse_args(argv)
    tree = open_tree(args.root)
    if args.answer:
        args.answer.write_text(json.dumps(_answer(tree, args.probes[0])))
        return
    for result in run(tree, args.probes):
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()

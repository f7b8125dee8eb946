"""Runs probes on one tree, each in a separate process.

    python -m nibble.engine.patching.run --root TREE [PROBE…]      # one JSON line per probe

The interpreter needs vLLM's dependencies; the tree itself comes first on the path. One process (the
nursery) imports the packages that every vLLM imports and forks a child for each probe, because most
of a probe's time would be these imports.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nibble.engine.patching.probe import Finding, Row
from nibble.engine.patching.tree import Tree, open_tree
from nibble.machine.paths import cache_dir, root

# Most probes take less than five seconds, and several times as long on a busy machine. The imports
# below show how slow this one is: they take some seconds, and minutes where QEMU runs them.
TIME_LIMIT_SECONDS = 120
TIME_LIMIT_IN_IMPORTS = 10
# A probe runs without the user's plugins, without a GPU and without requests to the Hub.
PROBE_ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    # Humming, which a CUDA build of vLLM imports, else compiles in two processes that outlive the
    # probe: humming 0.1.17 ops/utils.py:248, utils/nvrtc.py:126.
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",
}
# Imported before the fork, as far as installed. None of them is part of the tree, and none
# initializes a GPU.
NURSERY = (
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "compressed_tensors",
    "numba",
    "openai.types.responses",
    "aiohttp",
    "fastapi",
    "xgrammar",
    "openai_harmony",
    "prometheus_client",
    "opentelemetry.sdk.trace",
    "tvm_ffi",
    "cv2",
)


@dataclass(frozen=True)
class Result:
    """The result of one probe.

    remedy: of the probe's `remedy`, if it has one; error: why the probe itself failed, or "".
    """

    probe: str
    finding: Finding | None
    remedy: Finding | None
    error: str
    seconds: float


def probes_folder() -> Path:
    """The folder of the probes."""
    return root() / "patches" / "probes"


def probe_names() -> list[str]:
    """All probes, in the order of their file names."""
    return sorted(path.stem for path in probes_folder().glob("*.py") if path.stem != "__init__")


def load(name: str) -> Any:
    """The module of a probe, which has its row as `ROW`. Does not import vLLM or torch."""
    patches = str(probes_folder().parent)
    if patches not in sys.path:
        sys.path.insert(0, patches)
    return importlib.import_module(f"probes.{name}")


def rows(names: Iterable[str] | None = None) -> dict[str, Row]:
    """Probe name -> its row."""
    return {name: load(name).ROW for name in names or probe_names()}


def run(tree: Tree, names: Iterable[str] | None = None, jobs: int | None = None) -> list[Result]:
    """Run probes, `jobs` at a time. Returns the results in the order of `names`."""
    wanted = list(probe_names() if names is None else names)
    with tempfile.TemporaryDirectory(
        prefix="nibble-probes-", ignore_cleanup_errors=True
    ) as scratch:
        command = [sys.executable, "-m", "nibble.engine.patching.run", "--root", str(tree.root)]
        command += ["--answers", scratch, "--jobs", str(jobs or os.cpu_count() or 1), *wanted]
        nursery = subprocess.run(
            command, check=False, env=_environ(scratch), cwd=scratch, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return [_read_answer(Path(scratch), name, nursery.stdout) for name in wanted]


def _environ(scratch: str) -> dict[str, str]:
    """The environment of the nursery.

    Imports create folders; without another HOME, an image build would leave folders of root in the
    cache volume of another user.
    """
    folders = {
        "HOME": scratch,
        "TMPDIR": scratch,
        "FLASHINFER_WORKSPACE_BASE": scratch,
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
        "NIBBLE_CACHE_DIR": str(cache_dir()),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }
    return {**os.environ, **PROBE_ENVIRONMENT, **folders}


def _read_answer(folder: Path, name: str, output: str) -> Result:
    try:
        data = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return Result(name, None, None, f"the probe did not run: {_last_line(output)}", 0.0)
    finding, remedy = (Finding(**data[key]) if data[key] else None for key in ("finding", "remedy"))
    return Result(name, finding, remedy, data["error"], data["seconds"])


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


def _nursery(tree: Tree, names: Sequence[str], folder: Path, jobs: int) -> None:
    """Import NURSERY, then run the probes as forked children, `jobs` at a time.

    Kills a probe after TIME_LIMIT_SECONDS, on a slow machine after TIME_LIMIT_IN_IMPORTS times as
    long as the imports took.
    """
    started = time.monotonic()
    for module in NURSERY:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    limit = max(TIME_LIMIT_SECONDS, TIME_LIMIT_IN_IMPORTS * (time.monotonic() - started))
    waiting, running = list(names), dict[int, tuple[str, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[_fork(tree, name, folder)] = (name, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            name, began = running.pop(pid)
            _finish(folder, name, status, time.monotonic() - began, limit)
        elif not pid:
            for child, (_, began) in running.items():
                if time.monotonic() - began > limit:
                    os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)


def _fork(tree: Tree, name: str, folder: Path) -> int:
    """Fork a child that runs one probe and writes its answer. Returns the child's pid."""
    if child := os.fork():
        return child
    os.setsid()
    with (folder / f"{name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        scratch = folder / f"{name}.scratch"
        scratch.mkdir()
        os.chdir(scratch)
        os.environ |= {
            "VLLM_CACHE_ROOT": f"{scratch}/vllm",
            "TRITON_CACHE_DIR": f"{scratch}/triton",
        }
        (folder / f"{name}.json").write_text(json.dumps(_answer(tree, name)))
        sys.stdout.flush()
    os._exit(0)


def _finish(folder: Path, name: str, status: int, seconds: float, limit: float) -> None:
    """Add the time to a probe's answer, or write an error if the probe did not answer."""
    path = folder / f"{name}.json"
    data: dict[str, Any] = {"finding": None, "remedy": None}
    if path.exists():
        data |= json.loads(path.read_text())
    elif seconds > limit:
        data["error"] = f"no answer after {limit:.0f} s"
    else:
        last = _last_line((folder / f"{name}.log").read_text(errors="replace"))
        data["error"] = f"the probe ended without an answer (wait status {status}): {last}"
    path.write_text(json.dumps(data | {"seconds": round(seconds, 2)}))


def _answer(tree: Tree, name: str) -> dict[str, Any]:
    """Run one probe in this process."""
    sys.path.insert(0, str(tree.root))
    if not (tree.root / "vllm" / "__pycache__").exists():
        # An unpacked tree has no bytecode, and Python would take half of a probe's time to compile
        # it. The bytecode is cached outside the tree, which stays unchanged.
        sys.pycache_prefix = str(cache_dir() / "probes" / "bytecode")
    try:
        module = load(name)
        finding = module.probe(tree)
        has_remedy = hasattr(module, "remedy") and finding.state == "defect"
        remedy = module.remedy(tree) if has_remedy else None
    except BaseException as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return {"finding": None, "remedy": None, "error": " ".join(message.split())}
    return {"finding": asdict(finding), "remedy": remedy and asdict(remedy), "error": ""}


def main(argv: list[str] | None = None) -> None:
    """Print one JSON line per probe. With --answers FOLDER: be the nursery, and write a file per
    probe into that folder.
    """
    parser = argparse.ArgumentParser(prog="python -m nibble.engine.patching.run")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("probes", nargs="*")
    args = parser.parse_args(argv)
    tree = open_tree(args.root)
    if args.answers:
        _nursery(tree, args.probes, args.answers, args.jobs)
        return
    for result in run(tree, args.probes or None, args.jobs):
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()

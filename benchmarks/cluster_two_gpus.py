"""Two GPUs of one host as one machine and as two nodes: tokens/s of each arrangement.

    sudo .venv/bin/python benchmarks/cluster_two_gpus.py --only one tp2
        --out benchmarks/results/cluster_two_gpus.json
    sudo .venv/bin/python benchmarks/cluster_two_gpus.py --only mp ray
        --out benchmarks/results/cluster_two_gpus.json

The arrangements are one GPU, TP 2 in one machine, and two "nodes" of one GPU each in separate
network namespaces, with and without Ray. They use the first two GPUs of CUDA_VISIBLE_DEVICES. A
server outside of the namespaces listens on PORT and PORT + 1. It needs root and `ip` (iproute2).
The results give the reason for an arrangement that cannot run. Each takes two to three minutes;
--out is written after each and keeps earlier results.

Nodes have separate host names, so NCCL takes them for two machines and their traffic uses the
virtual network. The figures show what works and what a slow network costs, not the speed of RoCE.
NVLink multicast is off. `--cpu` runs the same with two processes on a CPU, to test changes of this
file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUBNET = "10.91.3"
PORT = (
    18710  # and the next for /ready: below the range the kernel chooses from, away from vLLM's 8000
)
START_S = 300.0
# A bridge's traffic goes through iptables where Docker has loaded br_netfilter; a plain pair of
# interfaces does not.
PAIR = f"""
set -e
mkdir -p /tmp/ray
ip netns add nib1; ip netns add nib2
ip link add eth0 netns nib1 type veth peer name eth0 netns nib2
for n in 1 2; do ip -n nib$n addr add {SUBNET}.$n/24 dev eth0; ip -n nib$n link set eth0 up; ip -n nib$n link set lo up; done
"""  # noqa: E501
# Two machines share neither /dev/shm nor Ray's folder.
ENTER = """
echo nib$0 > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs -o size=8g tmpfs /dev/shm
exec "$@"
"""
# Multicast in NCCL, PyTorch and NVSHMEM, and those all-reduces of vLLM and FlashInfer that would
# use it (vllm 0.32 envs.py:1966, flashinfer_all_reduce.py:211; the fused one is FUSED below).
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
# A virtual machine's memory may grow as it is used, which watchdogs (nibble's, Ray's) take for a
# shortage.
ON_GPUS = {"NIBBLE_KV_CACHE_BYTES": str(4 << 30), "NIBBLE_MEMORY_RESERVE_GIB": "0"}
FOR_RAY = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',  # Ray starts as many idle workers
}
FUSED = ("--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}')
# What vLLM's CPU platform lacks for this, as in tests/cluster; a "GPU" is then a name for Ray to
# count.
ON_CPU = {
    "PYTHONPATH": str(ROOT / "tests/support/vllm_plugins/cluster_platform"),
    "NIBBLE_KV_CACHE_BYTES": str(64 << 20),
    "NIBBLE_MEMORY_RESERVE_GIB": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
ASK = """
import concurrent.futures, json, sys, time, urllib.request
tokens, port = map(int, sys.argv[1:])
def ask(_):
    body = {"model": "default", "prompt": "What is NVFP4?", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    url, kind = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    answer = json.load(urllib.request.urlopen(request, timeout=300))
    return answer["usage"]["completion_tokens"], answer["choices"][0]["text"]
found = {}
for streams in (1, 8):
    ask(0)
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        done = list(pool.map(ask, range(3 * streams)))
    found[streams] = round(sum(tokens for tokens, _ in done) / (time.perf_counter() - began), 1)
print(json.dumps({"tokens_per_s": found, "text": ask(0)[1][:80]}))
"""  # noqa: E501
IS_READY = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT + 1}/ready', timeout=3)"


class Host:
    """Where processes run: the host itself (0) or one of the two namespaces."""

    def __init__(self, number: int, folder: Path, environ: dict[str, str]) -> None:
        self.number, self.folder = number, folder
        own = {
            "NIBBLE_CACHE_DIR": f"{folder}/cache{number}",
            "VLLM_CONFIG_ROOT": f"{folder}/config{number}",
        }
        places = (os.path.dirname(sys.executable), os.environ["PATH"], str(_command(folder)))
        own |= {
            "PATH": ":".join(places),
            "NIBBLE_ALLOW_ANONYMOUS": "1",
            "HOST": "127.0.0.1",
            **NO_MULTICAST,
        }
        own |= {"PORT": str(PORT), "NIBBLE_CONTROL_PORT": str(PORT + 1)}
        own |= {
            "NIBBLE_CANARY": "warn"
        }  # its references are of one GPU; what it found is in the result
        self.environ = {**os.environ, **own, **environ}
        importable = [self.environ.get("PYTHONPATH", ""), str(ROOT)]
        self.environ["PYTHONPATH"] = ":".join(filter(None, importable))

    def command(self, words: Sequence[str], inside: int | None = None) -> list[str]:
        """`words` in the namespace, with the mounts of process `inside` or separate ones."""
        if not self.number:
            return list(words)
        if inside is not None:
            return ["nsenter", "-t", str(inside), "-m", "-n", "-u", *words]
        enter = [
            "ip",
            "netns",
            "exec",
            f"nib{self.number}",
            "unshare",
            "-m",
            "-u",
            "bash",
            "-e",
            "-c",
            ENTER,
        ]
        return [*enter, str(self.number), *words]

    def start(
        self, log: str, *words: str, inside: int | None = None, **environ: str
    ) -> subprocess.Popen[bytes]:
        """Start the entry point with `words`; its output goes to `log`."""
        with (self.folder / log).open("wb") as out:
            return subprocess.Popen(
                self.command([str(ROOT / "entrypoint.sh"), *words], inside),
                env={**self.environ, **environ},
                cwd=ROOT,
                stdout=out,
                stderr=out,
            )

    def python(
        self, inside: int | None, code: str, *words: str
    ) -> subprocess.CompletedProcess[str]:
        command = self.command([sys.executable, "-c", code, *words], inside)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)

    def wait_said(self, log: str, words: str, process: subprocess.Popen[bytes]) -> None:
        """Wait until `log` contains `words`. Raises RuntimeError with the log's end if the process
        ends first or START_S is over.
        """
        began = time.monotonic()
        while words not in (said := (self.folder / log).read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() - began > START_S:
                raise RuntimeError(f"{log}: {said[-500:]}")
            time.sleep(0.5)


def _command(folder: Path) -> Path:
    """A folder with a `nibble` command, for environments that have only the package."""
    file = folder / "bin" / "nibble"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -m nibble "$@"\n')
        file.chmod(0o755)
    return file.parent


@contextlib.contextmanager
def ended(*running: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the processes, in this order."""
    try:
        yield
    finally:
        for one in running:
            one.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(60)
            one.kill()
            one.wait()


def measure(host: Host, server: subprocess.Popen[bytes], log: str, tokens: int) -> dict[str, Any]:
    """Seconds until ready, tokens/s and the beginning of an answer, or why there is none."""
    began = time.monotonic()
    inside = server.pid if host.number else None
    while host.python(inside, IS_READY).returncode:
        if server.poll() is not None or time.monotonic() - began > START_S:
            said = (host.folder / log).read_text(errors="replace").splitlines()
            return {
                "error": [line for line in said if "nibble" in line][-3:],
                "exit_code": server.poll(),
            }
        time.sleep(1)
    seconds = round(time.monotonic() - began, 1)
    done = host.python(inside, ASK, str(tokens), str(PORT))
    if done.returncode:
        return {"error": done.stderr[-500:]}
    said = (host.folder / log).read_text(errors="replace").splitlines()
    checks = {
        name: [line for line in said if f"{name}:" in line] for name in ("preflight", "canary")
    }
    last = {name: lines[-2:] for name, lines in checks.items() if lines}
    return {"ready_s": seconds, **json.loads(done.stdout), **last}


class Bench:
    """The arrangements, each a method that returns its result."""

    def __init__(self, model: str, folder: Path, devices: Sequence[str], cpu: bool) -> None:
        self.words = ("serve", model, "--max-model-len", "1024", *(() if cpu else FUSED))
        self.folder, self.devices, self.cpu, self.tokens = folder, devices, cpu, 16 if cpu else 256
        self.common = ON_CPU if cpu else ON_GPUS

    def one(self) -> dict[str, Any]:
        return self._machine("one", 1)

    def tp2(self) -> dict[str, Any]:
        return self._machine("tp2", 2)

    def mp(self) -> dict[str, Any]:
        first, second = self._nodes()
        with pair():
            server = first.start("mp0.log", *self.words, NIBBLE_NNODES="2", NIBBLE_NODE_RANK="0")
            rank1 = second.start("mp1.log", *self.words, NIBBLE_NNODES="2", NIBBLE_NODE_RANK="1")
            with ended(server, rank1):
                return measure(first, server, "mp0.log", self.tokens)

    def ray(self) -> dict[str, Any]:
        if importlib.util.find_spec("ray") is None:
            raise RuntimeError("ray is not installed")
        first, second = self._nodes()
        offered = "1" if self.cpu else ""
        with pair():
            head = first.start("head.log", "ray-head", NUM_GPUS=offered)
            with ended(head):
                first.wait_said("head.log", "Ray head is up", head)
                worker = second.start("worker.log", "ray-worker", NUM_GPUS=offered)
                server = first.start("ray.log", *self.words, inside=head.pid, NIBBLE_CLUSTER="ray")
                with ended(server, worker):
                    return measure(first, server, "ray.log", self.tokens)

    def _machine(self, name: str, size: int) -> dict[str, Any]:
        here = Host(
            0, self.folder, {**self.common, "CUDA_VISIBLE_DEVICES": ",".join(self.devices[:size])}
        )
        server = here.start(f"{name}.log", *self.words, TENSOR_PARALLEL_SIZE=str(size))
        with ended(server):
            return measure(here, server, f"{name}.log", self.tokens)

    def _nodes(self) -> tuple[Host, Host]:
        environ = {
            **self.common,
            "HEAD_IP": f"{SUBNET}.1",
            "NIBBLE_CLUSTER_TOKEN": secrets.token_hex(32),
            "TENSOR_PARALLEL_SIZE": "2",
            "NIBBLE_CLUSTER_MIN_GB_PER_S": "0.01",  # a virtual network
            "NCCL_IB_DISABLE": "1",
            **FOR_RAY,
        }
        first, second = ({**environ, "CUDA_VISIBLE_DEVICES": one} for one in self.devices)
        return Host(1, self.folder, first), Host(2, self.folder, second)


@contextlib.contextmanager
def pair() -> Iterator[None]:
    """Two namespaces with a network between them. Raises RuntimeError if this machine cannot create
    them.
    """
    if shutil.which("ip") is None:
        raise RuntimeError("`ip` is not installed (iproute2)")
    remove = ["bash", "-c", "ip netns del nib1; ip netns del nib2"]
    subprocess.run(remove, capture_output=True, check=False)
    try:
        made = subprocess.run(["bash", "-c", PAIR], capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"no network namespaces: {made.stderr.strip()}")
        yield
    finally:
        subprocess.run(remove, capture_output=True, check=False)


def gpus(devices: Sequence[str]) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--id={','.join(devices)}", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nibble-demo-nvfp4")
    parser.add_argument("--only", nargs="+", choices=("one", "tp2", "mp", "ray"))
    parser.add_argument(
        "--folder", type=Path, help="keeps caches and logs; default: removed at the end"
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[:2]
    if len(devices) < 2:
        parser.error("CUDA_VISIBLE_DEVICES names one GPU and two are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    about = {"model": options.model, "gpus": gpus(devices), "date": time.strftime("%Y-%m-%d")}
    results = dict(kept.get("results", {}))
    with contextlib.ExitStack() as stack:
        if options.folder:
            folder = options.folder.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            made = tempfile.TemporaryDirectory(prefix="nibble-two-gpus-", dir="/var/tmp")
            folder = Path(stack.enter_context(made))
        bench = Bench(options.model, folder, devices, options.cpu)
        arrangements: dict[str, Callable[[], dict[str, Any]]] = {
            "one": bench.one,
            "tp2": bench.tp2,
            "mp": bench.mp,
            "ray": bench.ray,
        }
        for name in options.only or arrangements:
            try:
                results[name] = arrangements[name]()
            except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
                results[name] = {"error": str(error)}
            print(name, json.dumps(results[name]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
        for log in sorted(folder.glob("*.log")):
            print(
                f"--- {log.name}",
                *log.read_text(errors="replace").splitlines()[-15:],
                sep="\n",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Two GPUs of one host as one machine and as two: tokens/s of one GPU, TP 2 in the machine, and two "nodes" of one GPU each
in network namespaces of their own, without Ray and with it.

    sudo .venv/bin/python benchmarks/cluster_two_gpus.py [--model MODEL] [--out benchmarks/results/cluster_two_gpus.json]

Needs root, `ip` and `unshare`. Nodes have their own host names, so that NCCL takes them for two machines and their traffic goes
through the virtual network between them: the figures show what works and what a slow network costs, not what RoCE gives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUBNET = "10.91.3"
START_S = 600.0
# A bridge's traffic goes through iptables where Docker has loaded br_netfilter; a plain pair of interfaces does not.
PAIR = f"""
set -e
ip netns add nib1; ip netns add nib2
ip link add eth0 netns nib1 type veth peer name eth0 netns nib2
for n in 1 2; do ip -n nib$n addr add {SUBNET}.$n/24 dev eth0; ip -n nib$n link set eth0 up; ip -n nib$n link set lo up; done
"""
# /dev/shm and /tmp of their own too: two machines share neither.
ENTER = 'hostname nib$0; mount -t tmpfs tmpfs /tmp; mount -t tmpfs -o size=8g tmpfs /dev/shm; exec "$@"'
ASK = """
import concurrent.futures, json, sys, time, urllib.request
def ask(_):
    body = {"model": "default", "prompt": "What is NVFP4?", "max_tokens": 256, "ignore_eos": True, "temperature": 0}
    url, kind = "http://127.0.0.1:8000/v1/completions", {"content-type": "application/json"}
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
"""
IS_READY = "import urllib.request as u; u.urlopen('http://127.0.0.1:8001/ready', timeout=3)"


class Host:
    """Where processes run: the host itself (0) or one of the two namespaces."""

    def __init__(self, number: int, folder: Path, environ: dict[str, str]) -> None:
        self.number, self.folder = number, folder
        own = {"NIBBLE_CACHE_DIR": f"{folder}/cache{number}", "VLLM_CONFIG_ROOT": f"{folder}/config{number}"}
        self.environ = {**os.environ, **own, "NIBBLE_ALLOW_ANONYMOUS": "1", "HOST": "127.0.0.1", **environ}

    def command(self, words: Sequence[str], inside: int | None = None) -> list[str]:
        """`words` in the namespace, beside process `inside` where it is given, else in mounts of its own."""
        if not self.number:
            return list(words)
        if inside is not None:
            return ["nsenter", "-t", str(inside), "-m", "-n", "-u", *words]
        return [
            "ip",
            "netns",
            "exec",
            f"nib{self.number}",
            "unshare",
            "-m",
            "-u",
            "bash",
            "-c",
            ENTER,
            str(self.number),
            *words,
        ]

    def start(
        self, log: str, *words: str, inside: int | None = None, **environ: str
    ) -> subprocess.Popen[bytes]:
        """The entry point with `words`; its output in `log`."""
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                self.command([str(ROOT / "entrypoint.sh"), *words], inside),
                env={**self.environ, **environ},
                cwd=ROOT,
                stdout=out,
                stderr=out,
            )

    def python(self, code: str, inside: int | None) -> subprocess.CompletedProcess[str]:
        command = self.command([sys.executable, "-c", code], inside)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


@contextlib.contextmanager
def ended(*running: subprocess.Popen[bytes]) -> Iterator[None]:
    """The processes, ended in order."""
    try:
        yield
    finally:
        for one in running:
            one.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(60)
            one.kill()
            one.wait()


def measure(host: Host, server: subprocess.Popen[bytes], log: str) -> dict[str, Any]:
    """Seconds until ready, tokens/s, the beginning of an answer; or why there is none."""
    began = time.monotonic()
    inside = server.pid if host.number else None
    while host.python(IS_READY, inside).returncode:
        if server.poll() is not None or time.monotonic() - began > START_S:
            said = (host.folder / log).read_text(errors="replace").splitlines()
            return {"error": [line for line in said if "nibble" in line][-3:], "exit_code": server.poll()}
        time.sleep(1)
    seconds = round(time.monotonic() - began, 1)
    done = host.python(ASK, inside)
    if done.returncode:
        return {"error": done.stderr[-500:]}
    said = (host.folder / log).read_text(errors="replace").splitlines()
    checks = [line for line in said if "preflight:" in line]
    return {"ready_s": seconds, **json.loads(done.stdout), **({"preflight": checks[-1]} if checks else {})}


def run(model: str, folder: Path) -> dict[str, Any]:
    """Every arrangement in turn."""
    found: dict[str, Any] = {}
    here = Host(0, folder, {})
    words = ("serve", model, "--max-model-len", "1024")
    for name, gpus, size in (("one GPU", "0", "1"), ("TP 2 in one machine", "0,1", "2")):
        log = f"{size}.log"
        server = here.start(log, *words, CUDA_VISIBLE_DEVICES=gpus, TENSOR_PARALLEL_SIZE=size)
        with ended(server):
            found[name] = measure(here, server, log)
        print(name, json.dumps(found[name]), flush=True)
    common = {
        "HEAD_IP": f"{SUBNET}.1",
        "NIBBLE_CLUSTER_TOKEN": secrets.token_hex(32),
        "TENSOR_PARALLEL_SIZE": "2",
    }
    common["NIBBLE_CLUSTER_MIN_GB_PER_S"] = "0.05"  # a virtual network
    one = Host(1, folder, {**common, "CUDA_VISIBLE_DEVICES": "0"})
    two = Host(2, folder, {**common, "CUDA_VISIBLE_DEVICES": "1"})
    server = one.start("mp0.log", *words, NIBBLE_NNODES="2", NIBBLE_NODE_RANK="0")
    rank1 = two.start("mp1.log", *words, NIBBLE_NNODES="2", NIBBLE_NODE_RANK="1")
    with ended(server, rank1):
        found["two nodes without Ray"] = measure(one, server, "mp0.log")
    print("mp", json.dumps(found["two nodes without Ray"]), flush=True)
    head = one.start("head.log", "ray-head")
    time.sleep(15)
    worker = two.start("worker.log", "ray-worker")
    server = one.start("ray.log", *words, inside=head.pid, NIBBLE_CLUSTER="ray")
    with ended(server, worker, head):
        found["two nodes with Ray"] = measure(one, server, "ray.log")
    print("ray", json.dumps(found["two nodes with Ray"]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nibble-demo-nvfp4")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    subprocess.run(["bash", "-c", PAIR], check=True)
    try:
        with tempfile.TemporaryDirectory(prefix="nibble-two-gpus-", dir="/var/tmp") as folder:
            found = run(options.model, Path(folder))
            for log in sorted(Path(folder).glob("*.log")):
                print(
                    f"--- {log.name}",
                    *log.read_text(errors="replace").splitlines()[-15:],
                    sep="\n",
                    flush=True,
                )
    finally:
        subprocess.run("ip netns del nib1; ip netns del nib2", shell=True, check=False)
    if options.out:
        gpus = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        about = {
            "model": options.model,
            "gpus": gpus.stdout.split("\n")[:-1],
            "date": time.strftime("%Y-%m-%d"),
        }
        options.out.write_text(json.dumps(about | {"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

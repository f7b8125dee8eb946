"""Time between tokens where the GPU needs little: the host's cost of a decode step.

    python benchmarks/host_floor.py --write /tmp/shapes [--shapes dense2 …]    write checkpoints
    python benchmarks/host_floor.py --models /tmp/shapes [--shapes dense2 …] [--streams 1 8 …]
        [--gpus 2] [--drafts N] [--method mtp] [--arrivals] [--sides nibble]
        [--out benchmarks/results/host_floor_h200.json]

Shapes: `dense2` is Qwen3-8B's with two layers, `moe2` a mixture of 64 experts with two layers,
`hybrid2` a layer of linear and one of full attention in BF16, `0.6b`, `4b` and `8b` are Qwen3's,
`bf16` is a small one without NVFP4, `mtp` a tiny Qwen3-Next with an MTP head that is almost always
right (tests/support/models/mtp_model.py).

`vllm serve` and `nibble serve` with default settings run at the same time on one GPU (`--gpus`: on
several, each layer divided) and answer in turns: 16 tokens in, 768 out. The time is the median over
the streams of (last - first token) / (tokens - 1), the better of two rounds. `steady_share` is the
share of nibble's steps that ran from CUDA graphs as a whole, from its /metrics. `--sides nibble`
starts no stock server, which takes minutes on a machine where nothing is compiled.

`--drafts` lets both draft N tokens. `--method ngram` (default) takes them from the text before,
`eagle` from a draft model with random weights in the folder SHAPE-eagle, which `--write` writes
with `--method eagle`, and `mtp` from the model's MTP head. nibble gets NIBBLE_STEP_GRAPH=on, its
default on Hopper for the last two. The drafts of random weights are rejected, so a step gives one
token.

`--arrivals` measures the time to the first token instead: 8 streams run, and 2 requests a second
arrive with 256 tokens in and 64 out, for 20 s on each side in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
RESULT = ROOT / "benchmarks" / "results" / "host_floor_h200.json"
# hidden, intermediate, layers, heads, KV heads, experts, and of a token (2)
SHAPES = {
    "dense2": (4096, 12288, 2, 32, 8, 0),
    "bf16": (2048, 6144, 2, 16, 8, 0),
    "moe2": (2048, 768, 2, 32, 4, 64),
    "hybrid2": (2048, 6144, 2, 16, 2, 0),
    "0.6b": (1024, 3072, 28, 16, 8, 0),
    "4b": (2560, 9728, 36, 32, 8, 0),
    "8b": (4096, 12288, 36, 32, 8, 0),
    "30b-a3b": (2048, 768, 48, 32, 4, 128, 8),
    "35b-a3b": (2048, 512, 40, 16, 2, 256, 8),
}
STREAMS = (1, 8, 16, 32, 64)
VOCABULARY = 151936
PROMPT_TOKENS = (300, 1000)  # each shape knows these
TOKENS_IN, TOKENS_OUT, ROUNDS, START_S, STOP_S = 16, 768, 2, 400.0, 4.0
RUNNING, ARRIVALS_PER_S, ARRIVAL_IN, ARRIVAL_OUT, ARRIVALS_S = 8, 2.0, 256, 64, 20.0
PORTS = {"stock": 9101, "nibble": 9102}
CONTROL_PORT = 9103


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "mtp"], default=["dense2"])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--kv-bytes", type=int, default=8 << 30)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--method", choices=("ngram", "eagle", "mtp"), default="ngram")
    parser.add_argument("--arrivals", action="store_true")
    parser.add_argument("--sides", nargs="+", choices=PORTS, default=list(PORTS))
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    for name in options.shapes if options.write else ():
        write_shape(options.write / name, name)
        if options.method == "eagle":
            write_eagle(options.write / f"{name}-eagle", options.write / name)
    if not options.models:
        return 0
    from machine import machine

    result = {
        "what": "ms between tokens, 16 tokens in and 768 out, in turns on one GPU",
        "command": " ".join(["python", "benchmarks/host_floor.py", *sys.argv[1:]]),
        "commit": options.commit,
        "machine": machine(),
        "rows": [],
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers
    for name in options.shapes:
        for found in measure(options.models / name, options):
            result["rows"].append(found)
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["rows"], indent=1))
    return 0


def write_shape(folder: Path, name: str, layers: int = 0) -> None:
    """A checkpoint of SHAPES[name] with the demo's tokenizer and random weights; layers: other than
    the shape's.
    """
    from tests.support.models.generated_hybrid import HybridShape
    from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
    from tests.support.models.mtp_model import write_mtp_model

    if name == "mtp":
        write_mtp_model(folder, "qwen3_next")
    elif name == "hybrid2":
        hidden, intermediate, _, heads, kv, _ = SHAPES[name]
        write_hybrid(folder, hidden, intermediate, heads, kv)
    else:
        hidden, intermediate, all_layers, heads, kv, experts, *chosen = SHAPES[name]
        form = "bf16" if name == "bf16" else "modelopt"
        is_hybrid = name == "35b-a3b"
        head_dim = 256 if is_hybrid else 128
        sizes = (hidden, intermediate, layers or all_layers, heads, kv, head_dim, VOCABULARY)
        shape = (
            HybridShape(*sizes, experts, *chosen, has_fp8=True)
            if is_hybrid
            else Shape(*sizes, experts, *chosen)
        )
        write_checkpoint(folder, shape, form, w4a4=form != "bf16")
    for path in (ROOT / "models" / "nibble-demo-nvfp4").iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 40960}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_eagle(folder: Path, target: Path) -> None:
    """An EAGLE draft of one layer in BF16 for a target of SHAPES: without embedding and head, which
    are the target's, and without a first and a last norm.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    query, key = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    sizes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (query, hidden),
        "layers.0.self_attn.k_proj": (key, hidden),
        "layers.0.self_attn.v_proj": (key, hidden),
        "layers.0.self_attn.o_proj": (hidden, query),
        "layers.0.mlp.gate_proj": (wide, hidden),
        "layers.0.mlp.up_proj": (wide, hidden),
        "layers.0.mlp.down_proj": (hidden, wide),
    }
    random_numbers = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": (torch.randn(*size, generator=random_numbers) * 0.02).bfloat16()
        for name, size in sizes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden).bfloat16()
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    one_layer = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    one_layer |= {"num_hidden_layers": 1, "layer_types": None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(kept | one_layer, indent=1))


def speculation(model: Path, method: str, drafts: int) -> dict[str, Any]:
    """vLLM's --speculative-config for a model that `write_shape` wrote."""
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": drafts}
    return found | ({"model": f"{model}-eagle"} if method == "eagle" else {})


def write_hybrid(folder: Path, hidden: int, intermediate: int, heads: int, kv: int) -> None:
    """Qwen3-Next's kinds of layers; vLLM expects experts in one of them."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure(model: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    servers: dict[str, subprocess.Popen[bytes]] = {}
    refuse_taken_ports()
    try:
        for side in options.sides:
            servers[side] = start(side, model, options)
        for side, server in servers.items():
            wait_until_ready(PORTS[side], server)
        if options.arrivals:
            yield arrivals_row(model.name, options.sides)
        for streams in () if options.arrivals else options.streams:
            more: dict[str, Any] = {"gpus": options.gpus, "drafts": options.drafts}
            more |= {"method": options.method} if options.drafts else {}
            yield row(model.name, streams, options.sides) | more
    finally:
        for server in servers.values():
            server.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_S
        for server in servers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(max(0.0, end - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # a lane's limit leaves a few seconds


def refuse_taken_ports() -> None:
    """A server that an earlier run left behind would be measured in place of a new one."""
    for port in (*PORTS.values(), CONTROL_PORT):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(f"port {port} is in use: stop the server there first")


def start(side: str, model: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    environ = dict(os.environ) | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    both = ["--tensor-parallel-size", str(options.gpus)] if options.gpus > 1 else []
    if options.drafts:
        drafts = speculation(model, options.method, options.drafts)
        both += ["--speculative-config", json.dumps(drafts)]
    if side == "stock":
        words = ["-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        words += ["--served-model-name", "default", "--port", str(PORTS[side])]
        words += ["--gpu-memory-utilization", "0.4"]
        words += ["--kv-cache-memory-bytes", str(options.kv_bytes), "--max-model-len", "40960"]
        if model.name in ("hybrid2", "mtp"):  # vLLM's choice compiles for minutes at each start
            words += ["--gdn-prefill-backend", "triton"]
        environ["VLLM_PLUGINS"] = ""
    else:
        words = ["-m", "nibble", "serve", str(model)]
        environ |= {
            "PORT": str(PORTS[side]),
            "NIBBLE_CONTROL_PORT": str(CONTROL_PORT),
            "NIBBLE_KV_CACHE_BYTES": str(options.kv_bytes),
            "GPU_MEMORY_UTIL": "0.4",
            "MAX_MODEL_LEN": "40960",
            "NIBBLE_KERNEL_ASSERTION": "warn",
        }
        environ |= {"NIBBLE_STEP_GRAPH": "on"} if options.drafts else {}
    words += both
    log = (options.logs / f"{side}-{model.name}.log").open("wb")
    return subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server on port {port} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"the server on port {port} is not ready after {START_S:.0f} s")


def row(model: str, streams: int, sides: list[str]) -> dict[str, Any]:
    times: dict[str, list[float]] = {side: [] for side in sides}
    for side in sides:
        asyncio.run(load(PORTS[side], streams, 64))  # compiles and captures
    before = steps() if "nibble" in sides else {}
    for number in range(ROUNDS):
        for side in sides if number % 2 == 0 else reversed(sides):
            times[side].append(asyncio.run(load(PORTS[side], streams, TOKENS_OUT)))
    ms = {side: round(min(of), 3) for side, of in times.items()}
    found: dict[str, Any] = {"model": model, "streams": streams}
    found |= {f"{side}_ms": time for side, time in ms.items()}
    if len(ms) == len(PORTS):
        found["ratio"] = round(ms["stock"] / ms["nibble"], 2)
    if "nibble" in sides:
        taken = {name: count - before.get(name, 0.0) for name, count in steps().items()}
        share = taken.get("steady", 0.0) / max(sum(taken.values()), 1.0)
        found["steady_share"] = round(share, 3)
        found["steps"] = {name: int(count) for name, count in taken.items() if count}
    print(json.dumps(found), flush=True)
    return found


def arrivals_row(model: str, sides: list[str]) -> dict[str, Any]:
    """The time to the first token of requests that arrive while others run."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for side in sides:
        asyncio.run(arrivals(PORTS[side], 4.0))  # compiles and captures
    for number in range(ROUNDS):
        for side in sides if number % 2 == 0 else reversed(sides):
            found[side] += asyncio.run(arrivals(PORTS[side], ARRIVALS_S))
    result: dict[str, Any] = {"model": model, "what": "time to the first token"}
    for side, times in found.items():
        result[f"{side}_ms"] = round(1e3 * statistics.median(times), 3)
        result[f"{side}_p90_ms"] = round(1e3 * statistics.quantiles(times, n=10)[-1], 3)
    result["requests"] = len(found[sides[0]])
    if len(sides) == len(PORTS):
        result["ratio"] = round(result["nibble_ms"] / result["stock_ms"], 3)
    print(json.dumps(result), flush=True)
    return result


async def arrivals(port: int, seconds: float) -> list[float]:
    """Seconds to the first token of each request that arrived."""
    import aiohttp

    url = f"http://127.0.0.1:{port}/v1/completions"
    rng = random.Random(1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = [
            asyncio.create_task(stream(session, url, 30000, number)) for number in range(RUNNING)
        ]
        await asyncio.sleep(1.0)
        tasks, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(rng.expovariate(ARRIVALS_PER_S))
            tasks.append(asyncio.create_task(first_token(session, url, rng)))
        times = await asyncio.gather(*tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return times


async def first_token(session: Any, url: str, rng: random.Random) -> float:
    body = body_of([rng.randrange(*PROMPT_TOKENS) for _ in range(ARRIVAL_IN)], ARRIVAL_OUT)
    began, first = time.perf_counter(), 0.0
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and not first:
                first = time.perf_counter() - began
    return first


def body_of(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": "default",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


async def load(port: int, streams: int, tokens: int) -> float:
    """The median time between tokens, in ms."""
    import aiohttp

    url = f"http://127.0.0.1:{port}/v1/completions"
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        asked = (stream(session, url, tokens, number) for number in range(streams))
        return 1e3 * statistics.median(await asyncio.gather(*asked))


async def stream(session: Any, url: str, tokens: int, seed: int) -> float:
    rng = random.Random(seed + 1000 * tokens)
    body = body_of([rng.randrange(*PROMPT_TOKENS) for _ in range(TOKENS_IN)], tokens)
    first = last = 0.0
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
    return (last - first) / (tokens - 1)


def steps() -> dict[str, float]:
    """nibble's counter of steps, by reason."""
    try:
        url = f"http://127.0.0.1:{PORTS['nibble']}/metrics"
        with urllib.request.urlopen(url, timeout=5) as page:
            lines = page.read().decode().splitlines()
    except OSError as error:
        print(f"no steps are counted: {error}", file=sys.stderr)
        return {}
    found = {}
    for line in lines:
        if line.startswith("nibble_engine_steps_total{"):
            labels, _, value = line.rpartition(" ")
            found[labels.partition('reason="')[2].partition('"')[0]] = float(value)
    return found


if __name__ == "__main__":
    sys.exit(main())

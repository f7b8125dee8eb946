"""`nibble serve` beside llama.cpp on the CPU: decode with one and four streams, prompts of 256.

    python -m venv VENV
    CMAKE_ARGS=-DGGML_NATIVE=ON VENV/bin/pip install --no-binary llama-cpp-python \
        llama-cpp-python==0.3.36
    python benchmarks/cpu_llama.py --llama-python VENV/bin/python [--out FILE] [--folder FOLDER]
        [--rounds 3] [--seconds S] [--models 1.7b 135m] [--most-busy 0.1] [--request JSON]
        [--starts [--beside NIBBLE] [--reference]]
        [--without-avx512 FOLDER [--instructions avx2]]

Writes one generated Qwen3 for each shape in four forms: GGUF with Q4_0 and with NVFP4 layers, and
checkpoints with W4A16 and W4A4. Embedding and head are BF16 in all of them. Speed depends on the
shapes, not on the values, so all layers of a GGUF have equal ones.

All four servers start at the same time, stay loaded and are idle except for the one that is
measured. One that ends has 0 from then on, and its last words are printed. They are measured in
turns, `--rounds` times; the fastest counts, because other programs only add time. No
round begins after `--seconds`, except for each model's first. A round waits until other programs
use less than `--most-busy` of the cores, for at most two minutes, or not at all with 1; `busy` is
what they used then.
Rows of other models, instructions and numbers of cores stay in the file. llama.cpp runs in its own
process with a thread for each core that nibble uses, through its batched decoding for four streams.
Both sides start with 16 tokens and decode 48. Rows have tokens per second of all streams together;
`ratio` is W4A16 to Q4_0. `read_gb_s` is what the cores read in the same run, and `read_share` the
share of it that one stream's weights make up. `computes` has each side's instructions, and the
buffers of llama.cpp's weights: those of Q4_0 are called AMX where AMX computes.

`--starts` measures instead the seconds from `nibble serve` to ready: of each model with an empty
cache, and the fastest of `--rounds` later starts; and of the NVFP4 demo. `…_cpu_s` are the
processor seconds of all its processes until then, on which other programs have less influence.
`--beside` names the command of another nibble, which starts in turns with this one; its rows have
`nibble: beside`. Without `--reference` no reference is computed at the first start.

Without `--starts`, the nibble that `--beside` names serves the W4A16 model too, in turns with the
others: `beside`, and `beside_ratio` is this one's rate to its. llama.cpp can then be left out.
`--request` is what nibble's requests have beside a prompt and a number of tokens, such as
'{"temperature": 0.6, "top_k": 20, "top_p": 0.95}'; without it, they are greedy.

`--without-avx512` measures what processors with AVX2 do, on one that has AVX-512. Both sides are
built without it first:

    CFLAGS=-DNIBBLE_WITHOUT_AVX512 CXXFLAGS=-DNIBBLE_WITHOUT_AVX512 pip install --no-deps \\
        --no-build-isolation --target FOLDER kernels/
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" \\
        VENV/bin/pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

torch, oneDNN and vLLM get neither AVX-512 nor AMX. These rows have `instructions: avx2`, or what
`--instructions` says: where the processor has AVX-VNNI, so do both builds, unless nibble's has
-DNIBBLE_WITHOUT_AVX_VNNI too and llama.cpp's lacks -DGGML_AVX_VNNI=ON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from cpu_llama_models import FORMS, SHAPES, step_bytes, write_models  # noqa: E402
from llama_answers import DECODED, START  # noqa: E402
from machine import machine  # noqa: E402

LLAMA = Path(__file__).with_name("llama_answers.py")
BEGAN = time.monotonic()
Ask = Callable[[str], float]  # "decode 4" -> tokens per second
WHAT = ("decode 1", "decode 4", "prompt 256")
START_LIMIT_S, IDLE_LIMIT_S = 300, 120
# vLLM asks torch which of its libraries to load.
WITHOUT_AVX512 = """\
import importlib.abc
import importlib.machinery
import sys


class WithoutAvx512(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            for kind in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16"):
                setattr(module, f"_is_{kind}_supported", lambda: False)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, WithoutAvx512())
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=REPO / "benchmarks/results/cpu_llama.json")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "cpu_llama")
    parser.add_argument("--llama-python", type=Path, help="Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=["1.7b", "135m"])
    parser.add_argument("--most-busy", type=float, default=0.1)
    parser.add_argument("--starts", action="store_true")
    parser.add_argument("--beside", help="the command `nibble` of another installation")
    parser.add_argument("--request", type=json.loads, default={"temperature": 0})
    parser.add_argument("--reference", action="store_true", help="as nibble's default")
    parser.add_argument("--without-avx512", type=Path, help="nibble's kernels built without it")
    parser.add_argument("--instructions", default="avx2", help="what that build has")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers too
    os.environ["NIBBLE_REFERENCE"] = "auto" if args.reference else "off"
    if args.without_avx512:
        leave_avx512_out(args.without_avx512)
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    found |= {"command": command(), "machine": machine()}
    if args.starts:
        found["starts"] = []
        for rows in start_times(args):
            found["starts"] += rows
            args.out.write_text(json.dumps(found, indent=2) + "\n")
    else:
        if args.llama_python is None and not args.beside:
            parser.error("--llama-python is missing")
        found["rounds"] = args.rounds
        for name in args.models:
            level = {"instructions": args.instructions} if args.without_avx512 else {}
            for rows in compare(name, args):
                rows = [row | level for row in rows]
                found["rows"] = rows_without(found.get("rows", []), rows[0]) + rows
                args.out.write_text(json.dumps(found, indent=2) + "\n")
    args.out.write_text(json.dumps(found, indent=2) + "\n")


def rows_without(rows: list[dict[str, Any]], replaced: dict[str, Any]) -> list[Any]:
    """Those of other models, instructions and numbers of cores."""

    def kind(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row.get("instructions"), row["cores"]

    return [row for row in rows if kind(row) != kind(replaced)]


def leave_avx512_out(kernels: Path) -> None:
    """For this process and those that it starts; `kernels` is a folder of modules."""
    (kernels / "sitecustomize.py").write_text(WITHOUT_AVX512)
    folders = [str(kernels.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(folders),
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }


def command() -> str:
    return " ".join(["python", "benchmarks/cpu_llama.py", *sys.argv[1:]])


def start_times(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of each model: first with an empty cache and then with what that start left."""
    models = {name: write_models(name, args.folder / name)["nibble_w4a16"] for name in args.models}
    models["demo"] = REPO / "models/nibble-demo-nvfp4"
    commands = {"this": "nibble"} | ({"beside": args.beside} if args.beside else {})
    for name, model in models.items():
        about = {"model": name, "reference": args.reference}
        of_model = {which: about | {"nibble": which} for which in commands}
        for number in range(1 + args.rounds):
            for which, command in commands.items():
                row, folder = of_model[which], args.folder / f"start-{which}"
                if number == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
                busy = round(wait_for_idle(args.most_busy), 2)
                row["busy"] = max(busy, row.get("busy", 0.0))
                which_start = "later" if number else "first"
                for kind, seconds in start_time(model, folder, command).items():
                    key = f"{which_start}_{kind}"
                    row[key] = min(seconds, row.get(key, seconds))
        print(*of_model.values(), sep="\n", flush=True)
        yield list(of_model.values())


def start_time(model: Path, folder: Path, command: str) -> dict[str, float]:
    """Seconds until a server is ready, and processor seconds; the server then ends."""
    row: dict[str, float] = {}
    with nibble(model, folder, row, command):
        return row


def processor_seconds(pid: int) -> float:
    """Of a process with all that it started, dead children included."""
    import psutil

    total = 0.0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])  # user, system, and both of dead children
    return total


def compare(name: str, args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of one shape, after each round."""
    from nibble.machine.cpus import compute_cores
    from nibble.machine.read_bandwidth import read_bandwidth

    cores = compute_cores().threads
    files = write_models(name, args.folder / name)
    computes = {"nibble": nibble_level()}
    forms = [form for form in FORMS if args.llama_python or not form.startswith("llama")]
    all_of_them: dict[str, contextlib.AbstractContextManager[Ask]] = {
        form: llama(args.llama_python, files[form], cores, computes)
        if form.startswith("llama")
        else nibble(files[form], args.folder, request=args.request)
        for form in forms
    }
    if args.beside:
        (args.folder / "beside").mkdir(exist_ok=True)
        model = files["nibble_w4a16"]
        all_of_them["beside"] = nibble(
            model, args.folder / "beside", command=args.beside, request=args.request
        )
    with contextlib.ExitStack() as stack:
        servers = started(stack, all_of_them)
        best = {what: dict.fromkeys(servers, 0.0) for what in WHAT}
        read_bytes_s = busy = 0.0
        for number in range(args.rounds):
            if number and time.monotonic() - BEGAN > args.seconds:
                break
            busy = max(busy, wait_for_idle(args.most_busy))
            read_bytes_s = max(read_bytes_s, read_bandwidth(cores))
            for what in WHAT:
                for form, ask in list(servers.items()):
                    try:
                        best[what][form] = max(best[what][form], ask(what))
                    except Ended as ended:
                        print(f"{name}, {form}, {what}: {ended}", flush=True)
                        del servers[form]
            print(f"{name}, round {number + 1}, busy {busy:.2f}: {best}", flush=True)
            rows = rows_of(name, best, read_bytes_s)
            rows[0] |= {"computes": computes}
            yield [
                {"cores": cores, "rounds": number + 1} | row | {"busy": round(busy, 2)}
                for row in rows
            ]


def started(
    stack: contextlib.ExitStack, servers: dict[str, contextlib.AbstractContextManager[Ask]]
) -> dict[str, Ask]:
    """Starts all at the same time; `stack` ends those that have started, also if another fails."""

    def start(server: contextlib.AbstractContextManager[Ask]) -> Ask:
        ask = server.__enter__()
        stack.push(server.__exit__)
        return ask

    with ThreadPoolExecutor(len(servers)) as pool:
        asks = {form: pool.submit(start, server) for form, server in servers.items()}
    return {form: ask.result() for form, ask in asks.items()}


def rows_of(
    name: str, best: dict[str, dict[str, float]], read_bytes_s: float
) -> list[dict[str, Any]]:
    rows = []
    for what, rates in best.items():
        row: dict[str, Any] = {"model": name, "what": what}
        row |= {form: round(rate, 1) for form, rate in rates.items()}
        for ratio, other in (("ratio", "llama_q4_0"), ("beside_ratio", "beside")):
            if rates.get(other):
                row[ratio] = round(rates["nibble_w4a16"] / rates[other], 2)
        if what == "decode 1":
            row["read_gb_s"] = round(read_bytes_s / 1e9, 1)
            row["read_share"] = {
                form: round(rate * step_bytes(name) / read_bytes_s, 2)
                for form, rate in rates.items()
            }
        rows.append(row)
    return rows


def nibble_level() -> str:
    """The instructions of nibble's products, in a process that has this one's environment."""
    code = "from nibble_kernels.nvfp4_linear import cpu_levels; print(cpu_levels()[0])"
    words = [sys.executable, "-c", code]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def wait_for_idle(most: float) -> float:
    """The share of the cores that is in use, once it is below `most`, or after IDLE_LIMIT_S."""
    until = time.monotonic() + IDLE_LIMIT_S
    while (busy := busy_share()) >= most and most < 1 and time.monotonic() < until:
        pass
    return busy


def busy_share() -> float:
    """Of the cores, over a second."""
    readings = []
    for seconds in (1, 0):
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        readings.append((numbers[3] + numbers[4], sum(numbers[:8])))
        time.sleep(seconds)
    (idle, total), (idle_later, total_later) = readings
    return 1 - (idle_later - idle) / max(1, total_later - total)


# --- llama.cpp: a process that answers a line with tokens per second ---


class Ended(Exception):
    """A process that should have answered; its rows have 0 from then on."""


@contextlib.contextmanager
def llama(python: Path, file: Path, threads: int, computes: dict[str, str]) -> Iterator[Ask]:
    words = [str(python), str(LLAMA), str(file), str(threads)]
    log = file.with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdin and process.stdout
    requests, answers = process.stdin, process.stdout
    ready, _, computes[file.stem] = answers.readline().strip().partition(" ")
    if ready != "ready":
        raise SystemExit(f"llama.cpp does not load {file}: {log.read_text()[-500:]}")

    def ask(what: str) -> float:
        with contextlib.suppress(BrokenPipeError):
            requests.write(f"{what}\n")
            requests.flush()
        if answer := answers.readline():
            return float(answer)
        raise Ended(f"llama.cpp ended with {process.wait(30)}: {log.read_text()[-500:]}")

    try:
        yield ask
    finally:
        with contextlib.suppress(BrokenPipeError):
            requests.close()
        process.wait(30)


# --- nibble: a server, and requests ---


@contextlib.contextmanager
def nibble(
    model: Path,
    folder: Path,
    row: dict[str, float] | None = None,
    command: str = "nibble",
    request: dict[str, Any] | None = None,
) -> Iterator[Ask]:
    """A server. With `row`, only its start is measured. `request`: fields of what it is asked."""
    ports = [free_port(), free_port()]
    own = {"PORT": str(ports[0]), "NIBBLE_CONTROL_PORT": str(ports[1])}
    own |= {"NIBBLE_CACHE_DIR": str(folder / "cache")}
    own["NIBBLE_CANARY"] = "warn"  # random weights answer no question
    with (folder / f"{model.name}.log").open("wb") as log:
        words = [command, "serve", str(model)]
        began = time.monotonic()
        process = subprocess.Popen(words, env=os.environ | own, stdout=log, stderr=log)
    while not is_ready(ports[1]):
        if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
            raise SystemExit(f"nibble serve {model} is not ready: see {log.name}")
        time.sleep(0.05)
    print(f"{model}: ready after {time.monotonic() - began:.1f} s", flush=True)
    if row is not None:
        row |= {"s": round(time.monotonic() - began, 1)}
        row["cpu_s"] = round(processor_seconds(process.pid), 1)
    asked = iter(range(1 << 30))

    def generate(tokens: int, prompt: list[int]) -> None:
        body = {"model": "default", "prompt": prompt, "max_tokens": tokens}
        body |= {"ignore_eos": True, **(request or {})}
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        url = f"http://127.0.0.1:{ports[0]}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=600) as reply:
            reply.read()

    def seconds(streams: int, tokens: int, length: int) -> float:
        shift = next(asked)  # no prompt twice: the prefix cache has them
        prompts = [
            [3 + (one * 31 + at * 7 + shift * 101) % 200 for at in range(length)]
            for one in range(streams)
        ]
        threads = [threading.Thread(target=generate, args=(tokens, one)) for one in prompts]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def ask(what: str) -> float:
        kind, count = what.split()
        if kind == "prompt":
            return int(count) / seconds(1, 1, int(count))
        first = seconds(int(count), 1, START)
        return int(count) * DECODED / (seconds(int(count), DECODED + 1, START) - first)

    try:
        for what in WHAT if row is None else ():
            ask(what)
        yield ask
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{port}/ready"
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()

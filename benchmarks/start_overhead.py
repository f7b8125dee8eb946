"""Time to the first answer of `vllm serve` and `./entrypoint.sh serve`, and the demo's modes.

    .venv/bin/python benchmarks/start_overhead.py [--model PATH] [--pairs 3] [--modes]

Pairs alternate (A B, B A, …), so that a machine that slows down favours neither side. Both sides
get the flags of `nibble plan`, without the gate. A start lasts from exec to the end of the first
answered chat request of one token, sent every 50 ms. `--modes` also measures eager mode, and
compilation with cold and warm caches. Writes benchmarks/results/start_overhead.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "start_overhead.json"
POLL_S = 0.05
LIMIT_S = 600.0


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nibble-demo", help="the embedded demo or a folder")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--modes", action="store_true", help="eager, compiled cold, compiled warm as well"
    )
    options = parser.parse_args()
    own = ROOT / ".venv"
    if (own / "bin" / "nibble").exists() and Path(sys.prefix).resolve() != own.resolve():
        sys.exit(
            f"run it with {own}/bin/python: the entry point uses that environment, both sides must"
            " use one"
        )
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "what": "seconds from exec to the first answered chat request of one token",
            "command": " ".join(
                [".venv/bin/python", "benchmarks/start_overhead.py", *sys.argv[1:]]
            ),
            "model": options.model,
            "machine": machine(),
            "overhead": measure_overhead(options.model, options.pairs, Path(folder)),
        }
        if options.modes:
            result["modes"] = measure_modes(options.model, Path(folder))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def measure_overhead(model: str, pairs: int, folder: Path) -> dict[str, Any]:
    """Alternating starts in eager mode; the difference is taken within each pair."""
    environ = child_environ(folder / "shared")
    flags = ["--enforce-eager"]
    plain = plain_command(model, flags, environ)
    ours = nibble_command(model, flags)
    time_to_answer(plain, environ)  # file caches and byte code, for both sides
    times: dict[str, list[float]] = {"vllm": [], "nibble": []}
    for number in range(pairs):
        sides = [("vllm", plain), ("nibble", ours)]
        for name, command in sides if number % 2 == 0 else reversed(sides):
            times[name].append(time_to_answer(command, environ))
            print(f"pair {number + 1}, {name}: {times[name][-1]:.2f} s", file=sys.stderr)
    differences = [b - a for a, b in zip(times["vllm"], times["nibble"], strict=True)]
    return {
        "vllm_s": rounded(times["vllm"]),
        "nibble_s": rounded(times["nibble"]),
        "difference_s": rounded(differences),
        "median_difference_s": round(statistics.median(differences), 2),
        "vllm_command": ["vllm", *plain[4:]],
        "nibble_command": ours,
    }


def measure_modes(model: str, folder: Path) -> dict[str, float]:
    """The model through nibble: eager, and compiled with empty and with filled caches. One start
    each.
    """
    cold = child_environ(folder / "compiled")
    found = {
        "eager_s": time_to_answer(
            nibble_command(model, ["--enforce-eager"]), child_environ(folder / "shared")
        )
    }
    compiled = nibble_command(model, ["--no-enforce-eager"])
    found["compiled_cold_s"] = time_to_answer(compiled, cold)
    found["compiled_warm_s"] = time_to_answer(compiled, cold)
    return {name: round(value, 2) for name, value in found.items()}


def nibble_command(model: str, flags: Sequence[str]) -> list[str]:
    """nibble's entry point."""
    return [str(ROOT / "entrypoint.sh"), "serve", model, *flags]


def plain_command(model: str, flags: Sequence[str], environ: dict[str, str]) -> list[str]:
    """`vllm serve` with the plan's flags, without the gate."""
    planned = subprocess.run(
        [str(ROOT / "entrypoint.sh"), "nibble", "plan", model, *flags, "--json"],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    words = json.loads(planned.stdout)["command"][1:]
    gate = words.index("--middleware")
    return [
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.cli.main",
        *words[:gate],
        *words[gate + 2 :],
    ]


def time_to_answer(command: Sequence[str], environ: dict[str, str]) -> float:
    """Seconds from exec to the first 200; the server is stopped afterwards."""
    port = int(environ["PORT"])
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=environ, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not answers(port):
                if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                    log.seek(0)
                    sys.exit(
                        f"{command[0]} did not"
                        f" answer:\n{log.read().decode(errors='replace')[-3000:]}"
                    )
                time.sleep(POLL_S)
            return time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def answers(port: int) -> bool:
    """Whether a chat request gets status 200."""
    body = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def child_environ(cache: Path) -> dict[str, str]:
    """The environment of both sides: free ports, caches in `cache`, none of the user's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NIBBLE_", "VLLM_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    ports = {"PORT": str(free_port()), "NIBBLE_CONTROL_PORT": str(free_port())}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    caches = {"VLLM_CACHE_ROOT": f"{cache}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    return kept | ports | quiet | caches | {"PATH": path, "NIBBLE_CACHE_DIR": f"{cache}/nibble"}


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rounded(values: Sequence[float]) -> list[float]:
    """Rounded to hundredths of a second."""
    return [round(value, 2) for value in values]


if __name__ == "__main__":
    main()

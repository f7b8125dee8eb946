"""Record what a server that is known to be right answers to fixed prompts, for later starts to be held against.

    python models/record_canary.py [NAME ...]                              # demo models, served here by nibble; all of them
    python models/record_canary.py --url http://127.0.0.1:8000 --out FILE  # a running server without a key
    python models/record_canary.py --url ... --out FILE --prompts FILE     # one prompt a line, in place of eight of its own

FILE is `nibble-canary.json` in a model's folder, or `recipes/ORG/NAME.nibble-canary.json`. A W4A4 model has a second one,
`nibble-canary.weight-only.json`, for GPUs without FP4 products: `--nvfp4-activations bf16` serves it so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from nibble.canary.asking import Asker
from nibble.canary.references import FILE, WEIGHT_ONLY_FILE, record, write_references
from nibble.paths import demo_models
from nibble.readiness import Api

ROOT = Path(__file__).resolve().parents[1]
PORT, CONTROL_PORT = 18730, 18731
START_S = 300.0
TOKENS = 16
# Questions that the demo models were made for, one that they were not, and a text without a chat around it.
DEMO_PROMPTS = (
    "What is NVFP4?",
    "Which values can E2M1 represent?",
    "How is the global scale computed?",
    "How does NVFP4 differ from MXFP4?",
    "What is the capital of France?",
)
# Arithmetic, copying, code, another script, a list: where quantization and kernels go wrong, they go wrong in some of these.
GENERAL_PROMPTS = (
    "What is 17 + 25? Answer with the number only.",
    "Repeat exactly these words and nothing else: copper lantern seventeen rivers",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name the planets of the solar system in order of distance from the sun.",
    "Translate to French: The train leaves at noon from the second platform.",
    "用一句话解释为什么天空是蓝色的。",
    'Answer with one JSON object: the keys are "city" and "country", the city is Lisbon.',
    "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies? Explain briefly.",
)
PLAIN_TEXT = "The quick brown fox jumps over the lazy dog"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("demos", nargs="*", choices=[*demo_models(), []], metavar="NAME", help="a demo model")
    parser.add_argument("--url", help="a running server; without it the demo models are served and recorded")
    parser.add_argument("--model", default="default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--control", default="http://127.0.0.1:8001", help="the server's control port")
    asked = parser.parse_args()
    if asked.url:
        if asked.out is None:
            parser.error("--url needs --out")
        prompts = asked.prompts.read_text().splitlines() if asked.prompts else GENERAL_PROMPTS
        record_from(asked.url, asked.control, asked.model, asked.out, tuple(filter(None, prompts)), asked.url)
        return 0
    for name in asked.demos or demo_models():
        folder = demo_models()[name]
        record_demo(folder, FILE)
        if name.endswith("-nvfp4"):
            record_demo(folder, WEIGHT_ONLY_FILE, "--nvfp4-activations", "bf16")
    return 0


def record_demo(folder: Path, file: str, *flags: str) -> None:
    words = [folder.name, "--enforce-eager", *flags]
    with served(words) as (url, control):
        record_from(
            url, control, "default", folder / file, DEMO_PROMPTS, f"nibble serve {' '.join(words)}, on a CPU"
        )


def record_from(url: str, control: str, model: str, out: Path, prompts: tuple[str, ...], source: str) -> None:
    """Conversations of one question each, and a plain text."""
    address = urlsplit(url)
    api = Api(address.hostname or "127.0.0.1", address.port or 80, "", address.scheme == "https")
    asker = Asker(api, model, START_S)
    questions = (
        [[{"role": "user", "content": prompt}] for prompt in prompts] if asker.has_chat() else list(prompts)
    )
    cases = [record(asker, prompt, TOKENS) for prompt in [*questions, PLAIN_TEXT]]
    with urllib.request.urlopen(f"{control}/status", timeout=5) as response:
        ran = json.load(response)["assertion"]["ran"]
    activations = sorted({form for one in ran for form in one["activations"]})
    write_references(out, cases, {"recorded": source, "activations": activations})
    print(f"{out}: {len(cases)} prompts, {sum(len(case.logprobs) for case in cases)} log-probs")


@contextmanager
def served(words: list[str]) -> Iterator[tuple[str, str]]:
    """The base URLs of a server and its control port, which end with the block."""
    environ = {
        **os.environ,
        "PORT": str(PORT),
        "NIBBLE_CONTROL_PORT": str(CONTROL_PORT),
        "NIBBLE_CANARY": "warn",
    }
    process = subprocess.Popen([str(ROOT / "entrypoint.sh"), "serve", *words], env=environ)
    try:
        until = time.monotonic() + START_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"{words[0]} is not ready: see above")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{PORT}", f"http://127.0.0.1:{CONTROL_PORT}"
    finally:
        process.terminate()
        process.wait()


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{CONTROL_PORT}/ready", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())

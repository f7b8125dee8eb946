"""Record what a server that is known to be right answers to fixed prompts, for later starts to be
held against.

    python models/record_canary.py [NAME ...]                              # demo models, served here by nibble; all of them
    python models/record_canary.py --url http://127.0.0.1:8000 --recipe ORG/NAME    # a running server without a key
    python models/record_canary.py --url ... --out FILE                    # elsewhere, as in a model's own folder
    python models/record_canary.py --url ... --prompts FILE                # one prompt a line, in place of eight general ones

--recipe writes `recipes/ORG/NAME.nibble-canary.json`, which every start of that model finds; in a
model's own folder the file is
`nibble-canary.json`. A W4A4 model has a second one, `nibble-canary.weight-only.json`, for GPUs
without FP4 products
(`--nvfp4-activations bf16` serves it so); which of the two --recipe writes follows from what the
server ran.
"""  # noqa: E501

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
from typing import Any
from urllib.parse import urlsplit

from nibble.canary.client import Asker
from nibble.canary.references import record, write_references
from nibble.engine.api import Api
from nibble.hub.files import CANARY_FILE, WEIGHT_ONLY_CANARY_FILE
from nibble.machine.paths import demo_models, root
from nibble.recipes.recipe import recipe_path

ROOT = Path(__file__).resolve().parents[1]
PORT, CONTROL_PORT = 18730, 18731
START_S = 300.0
TOKENS = 16
# Questions that the demo models were made for, one that they were not, and a text without a chat
# around it.
DEMO_PROMPTS = (
    "What is NVFP4?",
    "Which values can E2M1 represent?",
    "How is the global scale computed?",
    "How does NVFP4 differ from MXFP4?",
    "What is the capital of France?",
)
# Arithmetic, copying, code, another script, a list: where quantization and kernels go wrong, they
# go wrong in some of these.
GENERAL_PROMPTS = (
    "What is 17 + 25? Answer with the number only.",
    "Repeat exactly these words and nothing else: copper lantern seventeen rivers",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name the planets of the solar system in order of distance from the sun.",
    "Translate to French: The train leaves at noon from the second platform.",
    "用一句话解释为什么天空是蓝色的。",
    'Answer with one JSON object: the keys are "city" and "country", the city is Lisbon.',
    (
        "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies? Explain"
        " briefly."
    ),
)
PLAIN_TEXT = "The quick brown fox jumps over the lazy dog"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "demos", nargs="*", choices=[*demo_models(), []], metavar="NAME", help="a demo model"
    )
    parser.add_argument(
        "--url", help="a running server; without it the demo models are served and recorded"
    )
    parser.add_argument("--model", default="default")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--recipe", metavar="ORG/NAME", help="write beside the recipe of this Hugging Face id"
    )
    place.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument(
        "--control", default="http://127.0.0.1:8001", help="the server's control port"
    )
    asked = parser.parse_args()
    if asked.url:
        if asked.out is None and asked.recipe is None:
            parser.error("--url needs --recipe or --out")
        if asked.recipe and recipe_path(asked.recipe, root()) is None:
            parser.error(f"{asked.recipe} is not ORG/NAME")
        prompts = asked.prompts.read_text().splitlines() if asked.prompts else GENERAL_PROMPTS
        status = read_status(asked.control)
        out = asked.out or recipe_file(asked.recipe, status)
        record_from(asked.url, status, asked.model, out, tuple(filter(None, prompts)), asked.url)
        return 0
    for name in asked.demos or demo_models():
        folder = demo_models()[name]
        record_demo(folder, CANARY_FILE)
        if name.endswith("-nvfp4"):
            record_demo(folder, WEIGHT_ONLY_CANARY_FILE, "--nvfp4-activations", "bf16")
    return 0


def record_demo(folder: Path, file: str, *flags: str) -> None:
    words = [folder.name, "--enforce-eager", *flags]
    with served(words) as (url, control):
        source = f"nibble serve {' '.join(words)}, on a CPU"
        record_from(url, read_status(control), "default", folder / file, DEMO_PROMPTS, source)


def read_status(control: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{control}/status", timeout=5) as response:
        return json.load(response)


def activations_in(status: dict[str, Any]) -> list[str]:
    """In which formats the NVFP4 layers of all workers took their activations."""
    return sorted({form for one in status["assertion"]["ran"] for form in one["activations"]})


def recipe_file(model: str, status: dict[str, Any]) -> Path:
    """The file of a recipe for what the server ran: its own where W4A4 layers were served
    weight-only.
    """
    beside = recipe_path(model, root())
    assert beside is not None
    is_w4a4 = "NVFP4" in str(status["plan"]["checkpoint"].get("scheme")).split("+")
    name = (
        WEIGHT_ONLY_CANARY_FILE if is_w4a4 and activations_in(status) == ["bf16"] else CANARY_FILE
    )
    beside.parent.mkdir(parents=True, exist_ok=True)
    return beside.with_suffix(f".{name}")


def record_from(
    url: str, status: dict[str, Any], model: str, out: Path, prompts: tuple[str, ...], source: str
) -> None:
    """Conversations of one question each, and a plain text."""
    address = urlsplit(url)
    api = Api(address.hostname or "127.0.0.1", address.port or 80, "", address.scheme == "https")
    asker = Asker(api, model, START_S)
    questions = (
        [[{"role": "user", "content": prompt}] for prompt in prompts]
        if asker.has_chat()
        else list(prompts)
    )
    cases = [record(asker, prompt, TOKENS) for prompt in [*questions, PLAIN_TEXT]]
    about = {"activations": activations_in(status), "arithmetic": status["canary"]["arithmetic"]}
    write_references(out, cases, {"recorded": source, **about})
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
        with urllib.request.urlopen(
            f"http://127.0.0.1:{CONTROL_PORT}/ready", timeout=5
        ) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())

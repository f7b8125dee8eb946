"""A results file from what the lane `real_model` (offline_gpu/run_real_model.sh) measured.

    python benchmarks/real_model_gpu.py XML_FOLDER --machine RESULT.json --commit COMMIT --out FILE

XML_FOLDER has real_model_KERNEL_PART.xml, pytest's reports of each step. RESULT.json is a result
of a program that ran on the same machine at that time: its "machine" is taken, without the load
and which GPU it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from real_model_server import Comparison

KERNELS = ("nibble", "vllm")
NUMBER = re.compile(r"(\w+)=([-+.\w]+)")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    machine = json.loads(options.machine.read_text())["machine"]
    machine.pop("load_average", None)
    for gpu in machine["gpus"]:
        gpu.pop("uuid", None)
    result = {
        "what": "SmolLM2-135M-Instruct in NVFP4 (four-over-six, W4A16) in vLLM on a GPU: log-probs "
        "against float32 arithmetic on the same numbers, by linear kernel",
        "command": "benchmarks/offline_gpu/run_real_model.sh, then real_model_gpu.py",
        "commit": options.commit,
        "machine": machine,
        "results": {kernel: measured(options.folder, kernel) for kernel in KERNELS},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(folder: Path, kernel: str) -> dict[str, Any]:
    """By test: passed or not, and what it recorded."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob(f"real_model_{kernel}_*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            found[case.attrib["name"]] = {"outcome": outcome(case)} | recorded(case)
    return found


def outcome(case: ElementTree.Element) -> str:
    """Of one test, as pytest names it."""
    kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return next((kinds[child.tag] for child in case if child.tag in kinds), "passed")


def recorded(case: ElementTree.Element) -> dict[str, Any]:
    """A test's properties; a list where one was recorded twice."""
    found: dict[str, list[Any]] = {}
    for each in case.iter("property"):
        found.setdefault(each.attrib["name"], []).append(value(each.attrib["value"]))
    return {name: many[0] if len(many) == 1 else many for name, many in found.items()}


def value(text: str) -> Any:
    """A number, a dictionary or a Comparison from how Python writes it."""
    if text.startswith(Comparison.__name__):
        return {name: ast.literal_eval(number) for name, number in NUMBER.findall(text)}
    return ast.literal_eval(text)


if __name__ == "__main__":
    main()

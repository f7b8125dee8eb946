"""Which faults a computed reference finds: each is injected into one vLLM, then removed.

    python benchmarks/reference_faults.py MODEL … [--kv-cache-dtype fp8] [--out FILE]

`nibble reference` runs first for each model. For each fault the result has the findings of the
worker's layers, and the distance of the canary's texts in log-probabilities.
tests/e2e/test_canary.py has the faults of requests and sampling.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from nibble.recipes.rules import NESTED  # noqa: E402

ERROR_LINE = re.compile(r"(?:^|\]:? )((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$")
NOT_OF_THE_MODEL = ("sampler: second best instead of best", "sampler: top_k ignored")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        reference, proof = asked.one
        one_model(asked.models[0], reference, proof, asked.kv_cache_dtype)
        return 0
    from machine import machine

    data: dict[str, Any] = {
        "command": f"python benchmarks/reference_faults.py {' '.join(asked.models)}",
        "kv_cache_dtype": asked.kv_cache_dtype,
        "machine": machine(),
        "models": {},
    }
    for model in asked.models:
        with tempfile.TemporaryDirectory() as scratch:
            found = run_model(model, Path(scratch), asked.kv_cache_dtype)
        data["models"][Path(model).name] = found
        if asked.out:
            asked.out.write_text(as_text(data))
    return 0


def as_text(data: dict[str, Any]) -> str:
    """JSON with one line for each fault."""
    models = [
        f' {json.dumps(name)}: {{"reference": {json.dumps(found["reference"])}, "faults": {{\n'
        + ",\n".join(
            f"  {json.dumps(fault)}: {json.dumps(told)}" for fault, told in found["faults"].items()
        )
        + "\n }}"
        for name, found in data["models"].items()
    ]
    head = json.dumps({key: value for key, value in data.items() if key != "models"})
    return f'{head[:-1]}, "models": {{\n' + ",\n".join(models) + "\n}}\n"


def run_model(model: str, folder: Path, kv_cache_dtype: str) -> dict[str, Any]:
    reference, proof = folder / "reference.json", folder / "proof"
    proof.mkdir()
    words = [sys.executable, "-m", "nibble", "reference", model, "--out", str(reference), "--json"]
    told = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    environ = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "NIBBLE_PROOF": str(proof),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    words = [
        sys.executable,
        __file__,
        told["path"],
        "--one",
        str(reference),
        str(proof),
        "--kv-cache-dtype",
        kv_cache_dtype,
    ]
    log = folder / "vllm.log"
    found = {}
    with log.open("w") as errors:
        child = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
        )
        for line in child.stdout or ():
            if line.startswith("RESULT "):
                found |= json.loads(line.removeprefix("RESULT "))
                print(line, end="", flush=True)
    if child.wait():
        why = error_in(log.read_text(errors="replace"))
        raise SystemExit(f"the process with vLLM ended with {child.returncode}: {why}")
    about = {key: value for key, value in told.items() if key not in ("out", "path")}
    return {"reference": about, "faults": found}


def error_in(log: str) -> str:
    """The first error in a log, with or without a process's prefix; later ones follow from it."""
    told = [found[1] for line in log.splitlines() if (found := ERROR_LINE.search(line.strip()))]
    return (told[0] if told else (log.strip().splitlines() or ["no word"])[-1])[:300]


def backends_of(model: str) -> dict[str, Any]:
    """The backends that `nibble serve` sets for vLLM on this machine, as arguments of LLM."""
    from nibble.plan.choice import values_of
    from nibble.plan.gather import plan_for, read_wishes

    flags = values_of(plan_for(read_wishes([model], dict(os.environ))).args)
    return {
        flag.strip("-").replace("-", "_"): value for flag, value in flags.items() if flag in NESTED
    }


def one_model(model: str, reference: str, proof: str, kv_cache_dtype: str) -> None:
    """One model in a separate process; a line for each fault with its findings."""
    from vllm import LLM

    from nibble.engine.plugin.report.probes import Probes

    Probes.forget = lambda self: None  # reports are made again and again
    files = hand_over(Path(reference), Path(proof))
    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        gpu_memory_utilization=float(os.environ.get("GPU_MEMORY_UTIL", "0.9")),
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=False,
        **backends_of(model),
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    from tests.support.vllm_plugins import model_faults, vllm_faults

    faults = {"none": vllm_faults.no_fault, **vllm_faults.FAULTS, **model_faults.FAULTS}
    only = os.environ.get("FAULTS", "").split(",")
    for name in [
        name for name in faults if name not in NOT_OF_THE_MODEL and (only == [""] or name in only)
    ]:
        print(
            "\nRESULT " + json.dumps({name: one_fault(llm, worker, faults[name], files)}),
            flush=True,
        )


def hand_over(reference: Path, proof: Path) -> dict[str, Any]:
    from nibble.reference.store import layer_file, read_reference

    data = read_reference(reference)
    assert data is not None
    (proof / "references.json").write_text(
        json.dumps({data["activations"]: str(layer_file(reference, data))})
    )
    return data


def one_fault(llm: Any, worker: Any, fault: Any, data: dict[str, Any]) -> dict[str, Any]:
    from nibble.canary.computed import judge_definition
    from nibble.canary.layers import check_layers
    from nibble.engine.plugin.report import make_report

    began = time.monotonic()
    try:
        undo = fault(worker)
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        return {"not_injected": f"{type(error).__name__}: {error}"}
    try:
        report = make_report(worker)
        judged = judge_definition([report])
        return {
            "layers": check_layers([report]).verdict,
            "definition": f"{judged.verdict}: {judged.detail}",
            "nats": [round(value, 3) for value in distances(llm, data)],
            "report": report["definition"],
            "seconds": round(time.monotonic() - began, 2),
        }
    finally:
        undo()


def distances(llm: Any, data: dict[str, Any]) -> list[float]:
    """Mean difference in nats of each text."""
    from vllm import SamplingParams

    texts = [[*case["prompt_ids"], *case["answer_ids"]] for case in data["cases"]]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], sampling, use_tqdm=False)
    found = []
    for ids, case, output in zip(texts, data["cases"], outputs, strict=True):
        own = [
            place[token].logprob
            for place, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        pairs = list(zip(own, case["logprobs"], strict=True))
        found.append(sum(abs(one - other) for one, other in pairs) / len(pairs))
    return found


if __name__ == "__main__":
    sys.exit(main())

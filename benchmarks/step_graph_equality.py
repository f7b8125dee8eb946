"""Answers with NIBBLE_STEP_GRAPH=on and off: tokens, log-probs and finish reasons must be equal.

    python benchmarks/step_graph_equality.py [--model FOLDER] [--requests 300] [--seed 0]
        [--out benchmarks/results/step_graph_equality.json]

Needs a GPU. Each engine gets the same requests at the same steps: prompts of 1 to 1500 tokens, all
samplers with seeds, stop tokens, `n`, log-probs, penalties, aborts, arrivals during decode, shared
prefixes, and too few cache blocks, so that requests are preempted. The engine runs in one process
and takes requests between its steps, so both see the same batches. `off` runs twice: what differs
there already is not the graphs' doing. Also times a decode step for each number of streams.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
RESULT = ROOT / "benchmarks" / "results" / "step_graph_equality.json"
STREAMS = (1, 8, 16, 32, 64)
TIMED_STEPS, VOCABULARY = 300, 3000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("/tmp/8b2"))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=["off", "off", "on"])
    parser.add_argument("--blocks", type=int, default=1800, help="of the KV cache")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--one", choices=("on", "off"), help="run one engine, in this process")
    options = parser.parse_args()
    if options.one:
        options.out.write_text(json.dumps(run_engine(options)))
        return 0
    found = []
    for number, mode in enumerate(options.modes):
        out = options.out.with_suffix(f".{number}-{mode}.json")
        words = [*sys.argv, "--one", mode, "--out", str(out)]
        subprocess.run([sys.executable, *words], check=True)
        found.append(json.loads(out.read_text()) | {"mode": mode})
        out.unlink()
    result = {"what": __doc__.splitlines()[0]} | comparison(found, options)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 1 if any(row["different"] for row in result["compared"]) else 0


def comparison(found: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Each engine compared with the first."""
    from machine import machine

    first, rows = found[0], []
    for other in found[1:]:
        names = sorted(first["answers"])
        different = [n for n in names if first["answers"][n] != other["answers"].get(n)]
        kinds = sorted({first["kinds"][name.partition("#")[0]] for name in different})
        rows.append(
            {"mode": other["mode"], "answers": len(names), "different": len(different)}
            | {"kinds": kinds, "examples": different[:5]}
        )
    return {
        "model": str(options.model),
        "seed": options.seed,
        "requests": options.requests,
        "machine": machine(),
        "compared": rows,
        "steps": [{"mode": one["mode"]} | one["counts"] for one in found],
        "preemptions": [one["preemptions"] for one in found],
        "step_ms": [{"mode": one["mode"]} | one["step_ms"] for one in found],
    }


def run_engine(options: argparse.Namespace) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(
        str(options.model),
        max_model_len=2048,
        max_num_seqs=64,
        num_gpu_blocks_override=options.blocks,
        kv_cache_memory_bytes=4 << 30,
        gpu_memory_utilization=0.3,
        disable_log_stats=True,
        seed=0,
        additional_config={"nibble": {"step_graph": options.one}},
    )
    engine: Any = llm.llm_engine
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    preempted = []
    preempt = core.scheduler._preempt_request
    core.scheduler._preempt_request = lambda *a, **k: (preempted.append(1), preempt(*a, **k))[1]
    requests = mixed_requests(options.requests, random.Random(options.seed))
    began = time.monotonic()
    answers = ask_mixed(engine, requests, random.Random(options.seed + 1))
    print(f"{options.one}: {len(answers)} answers in {time.monotonic() - began:.1f} s", flush=True)
    counter = getattr(runner, "step_counter", None)
    counts = counter.to_json() if counter else {}
    print(f"{options.one}: steps {counts}, {len(preempted)} preemptions", flush=True)
    step_ms = {} if options.no_timing else {str(n): step_time(engine, n) for n in STREAMS}
    print(f"{options.one}: ms a step {step_ms}", flush=True)
    if options.profile:
        profile(engine)
    kinds = {request["id"]: request["kind"] for request in requests}
    return {"answers": answers, "kinds": kinds, "counts": counts, "step_ms": step_ms} | {
        "preemptions": len(preempted)
    }


def mixed_requests(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Requests with the step at which they arrive, and for some the tokens after which they are
    aborted.
    """
    shared = [rng.randrange(300, VOCABULARY) for _ in range(700)]
    kinds = sampling_kinds()
    requests, step = [], 0
    for number in range(count):
        kind = rng.choice(sorted(kinds))
        length = rng.choice((1, 2, 15, 16, 17, rng.randint(1, 200), rng.randint(200, 1500)))
        ids = [rng.randrange(300, VOCABULARY) for _ in range(length)]
        if rng.random() < 0.25:
            ids = shared[: rng.randint(16, 700)] + ids[:100]
        if rng.random() < 0.3:
            step += rng.randint(1, 25)
        requests.append(
            {
                "id": f"r{number}",
                "kind": kind,
                "prompt": ids,
                "step": step,
                "params": kinds[kind] | {"seed": number, "max_tokens": rng.randint(1, 160)},
                "abort_after": rng.randint(1, 40) if rng.random() < 0.05 else None,
            }
        )
    return requests


def sampling_kinds() -> dict[str, dict[str, Any]]:
    return {
        "greedy": {"temperature": 0.0, "ignore_eos": True},
        "greedy_2": {"temperature": 0.0},
        "greedy_3": {"temperature": 0.0, "ignore_eos": True, "logprobs": 3},
        "greedy_penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
        "plain": {"temperature": 1.0},
        "warm": {"temperature": 0.7},
        "top_k": {"temperature": 0.9, "top_k": 20},
        "top_p": {"temperature": 0.9, "top_p": 0.8},
        "top_k_top_p": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "logprobs": 5},
        "min_p": {"temperature": 0.8, "min_p": 0.05},
        "penalties": {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        "bias": {"temperature": 0.8, "logit_bias": {400: 5.0, 500: -100.0}, "logprobs": 0},
        "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(300, 400))},
        "bad_words": {"temperature": 0.0, "bad_words": ["a", " the", "one two"]},
        "stop_ids": {"temperature": 1.0, "stop_token_ids": list(range(300, 3000)), "min_tokens": 5},
        "stop_string": {"temperature": 1.0, "stop": ["e", "xyz"], "min_tokens": 2},
        "four": {"temperature": 0.9, "n": 4},
        "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
    }


def ask_mixed(engine: Any, requests: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """The answers: id#index -> tokens, log-probs, finish and stop reason."""
    from vllm import SamplingParams

    waiting, answers, aborts = list(requests), dict[str, Any](), dict[str, int]()
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0]["step"] <= step:
            request = waiting.pop(0)
            params = SamplingParams(**request["params"])
            engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, params)
            if request["abort_after"]:
                aborts[request["id"]] = request["abort_after"]
        for output in engine.step():
            for one in output.outputs:
                answers[f"{output.request_id}#{one.index}"] = recorded(one)
            limit = aborts.get(output.request_id)
            if limit and len(output.outputs[0].token_ids) >= limit and not output.finished:
                engine.abort_request([output.request_id])
                del aborts[output.request_id]
        step += 1
    return answers


def recorded(one: Any) -> list[Any]:
    """One completion, as JSON keeps it."""
    logprobs = [
        sorted((token, value.logprob, value.rank) for token, value in position.items())
        for position in one.logprobs or ()
    ]
    return json.loads(
        json.dumps([list(one.token_ids), logprobs, one.finish_reason, one.stop_reason, one.text])
    )


def step_time(engine: Any, streams: int) -> float:
    """Milliseconds of a decode step: the median of the second half of three runs' steps."""
    times: list[float] = []
    for run in range(3):
        began = begin_streams(engine, streams, f"t{streams}-{run}")
        while engine.has_unfinished_requests():
            engine.step()
            now = time.perf_counter()
            times.append(now - began)
            began = now
        times = times if run else []  # the first run captures
    decode = times[len(times) // 2 :]
    return round(1e3 * statistics.median(decode), 3)


def begin_streams(engine: Any, streams: int, name: str) -> float:
    from vllm import SamplingParams

    rng = random.Random(name)
    for number in range(streams):
        ids = [rng.randrange(300, VOCABULARY) for _ in range(16)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=TIMED_STEPS)
        engine.add_request(f"{name}-{number}", {"prompt_token_ids": ids}, params)
    return time.perf_counter()


def profile(engine: Any) -> None:
    """Print the functions that take the host's time, at 16 streams."""
    import cProfile
    import pstats

    begin_streams(engine, 16, "profile")
    for _ in range(40):
        engine.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(200):
        engine.step()
    profiler.disable()
    while engine.has_unfinished_requests():
        engine.step()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    sys.exit(main())

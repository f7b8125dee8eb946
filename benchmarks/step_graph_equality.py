"""Answers with and without steps from CUDA graphs: tokens, log-probs and finish reasons.

    python benchmarks/step_graph_equality.py [--model FOLDER] [--requests 300] [--seed 0]
        [--passes off off on on] [--seconds 600] [--gpus 2] [--drafts 3 --method eagle]
        [--out benchmarks/results/step_graph_equality.json]

Needs a GPU. One engine gets the same requests several times: prompts of 1 to 1500 tokens, all
samplers with seeds, stop tokens, `n`, log-probs, penalties, JSON by a schema, tool calls, aborts,
arrivals during decode, shared prefixes, and few cache blocks, so that requests are preempted. It
takes requests between its steps, so each pass sees the same batches. A pass is `off` (vLLM's path),
`on`, `inputs` (graphs without the sampler), or `pieces` (piecewise graphs for prompts). What
differs between two passes `off` is not the graphs' doing. On an SM90, vLLM's NVFP4 products
(Humming) add parts in the order in which they end. The order of nibble's kernel (`--linear-kernel`)
is fixed. One engine, because two engines may tune kernels differently. Also times a decode step for
each number of streams.

`--drafts` verifies drafts of an EAGLE or MTP head (benchmarks/host_floor.py writes such models).
Without `--acceptance`, those of random weights are rejected. With it, vLLM accepts the first draft
of a step with this probability, and each further one less often, by the requests' seeds. Kinds of
sampling that vLLM refuses with drafts are left out.

`--seconds` goes on with further seeds, each with other requests and another rhythm of arrivals,
until the time is over or an answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
RESULT = ROOT / "benchmarks" / "results" / "step_graph_equality.json"
STREAMS = (1, 8, 16, 32, 64)
TIMED_STEPS, VOCABULARY = 300, 3000
IN_PIECES = ("off", "pieces")  # passes with piecewise graphs for prompts
NOT_WITH_DRAFTS = ("bias", "min_p")  # vllm 0.32 sampling_params.py:1190
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
}
# As vLLM asks for a tool call that is required, and for one that the model may choose.
TOOL_CALLS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["find"]}, "parameters": SCHEMA},
        "required": ["name", "parameters"],
    },
}
TOOL_TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<find>", "schema": SCHEMA, "end": "</find>"}],
    "triggers": ["<find>"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("/tmp/shapes/dense2"))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="further seeds for so long")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--method", choices=("eagle", "mtp", "ngram"), default="eagle")
    parser.add_argument("--draft-head", choices=("bf16", "nvfp4"), default="bf16")
    parser.add_argument("--acceptance", type=float)
    parser.add_argument("--linear-kernel", choices=("vllm", "nibble"), default="vllm")
    parser.add_argument("--attention-kernel", choices=("vllm", "nibble"), default="nibble")
    parser.add_argument("--passes", nargs="+", default=["off", "off", "on", "on"])
    parser.add_argument("--blocks", type=int, default=600, help="of the KV cache")
    parser.add_argument("--timing", nargs="*", default=[], help="passes to time, such as off on")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result = run(options)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    rows = [*result["compared"], *result["further_seeds"]]
    return 1 if any(row["different"] for row in rows) else 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    from machine import machine

    engine = new_engine(options)
    path = PathOfSteps(engine)
    requests = Requests(vocabulary_of(options.model), has_drafts=options.drafts > 0)
    first = requests.mixed(options.requests, options.seed)
    passes, rows = compare_passes(engine, path, first, options.seed, options.passes)
    further, seed, end = [], options.seed, time.monotonic() + options.seconds
    while time.monotonic() < end and not any(row["different"] for row in further):
        seed += 1
        count = random.Random(seed).choice((20, 60, 120))
        others = requests.mixed(count, seed)
        _, found = compare_passes(engine, path, others, seed, options.passes[:2])
        further += [{"seed": seed} | row for row in found]
    step_ms = []
    for mode in options.timing:
        path.take(mode)
        step_ms.append({"mode": mode} | {str(n): step_time(engine, n) for n in STREAMS})
        if mode == "on":
            step_ms.append({"mode": "GPU alone"} | {str(n): gpu_time(engine, n) for n in STREAMS})
        print(step_ms[-1], flush=True)
        if options.profile:
            profile(engine)
    return {
        "what": "tokens, log-probs, finish reasons and texts of passes, compared with the first",
        "model": options.model.name,
        "linear_kernel": options.linear_kernel,
        "speculation": speculation_of(options),
        "draft_head": options.draft_head,
        "seed": options.seed,
        "requests": options.requests,
        "machine": machine(),
        "gpus": options.gpus,
        "compared": rows,
        "further_seeds": further,
        "graph_bytes": path.graph_bytes(),
        "passes": [{k: v for k, v in one.items() if k != "answers"} for one in passes],
        "step_ms": step_ms,
    }


def compare_passes(
    engine: Any, path: PathOfSteps, requests: list[dict[str, Any]], seed: int, modes: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The passes over `requests`, and each one after the first compared with it."""
    kinds = {request["id"]: request["kind"] for request in requests}
    passes: list[dict[str, Any]] = []
    for mode in modes:
        path.take(mode)
        began = time.monotonic()
        answers = ask_mixed(engine, requests)
        passes.append({"mode": mode, "answers": answers, "steps": path.counts()})
        passes[-1]["tokens_of_drafts"] = path.accepted()
        passes[-1]["preemptions"] = path.preemptions()
        seconds, taken = time.monotonic() - began, passes[-1]
        print(f"seed {seed}, {mode}: {len(answers)} answers in {seconds:.1f} s", flush=True)
        print(f"{mode}: {taken['steps']}, {taken['preemptions']} preemptions", flush=True)
        engine.reset_prefix_cache()
    return passes, [compared(passes[0], other, kinds) for other in passes[1:]]


def compared(first: dict[str, Any], other: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """One pass compared with the first."""
    wanted, found = first["answers"], other["answers"]
    different = [name for name in sorted(wanted) if wanted[name] != found.get(name)]
    return {
        "mode": other["mode"],
        "answers": len(wanted),
        "tokens": sum(len(answer[0]) for answer in wanted.values()),
        "different": len(different),
        "kinds": sorted({kinds[name.partition("#")[0]] for name in different}),
        "examples": [describe(name, wanted[name], found.get(name)) for name in different[:6]],
    }


def describe(name: str, wanted: list[Any], found: list[Any] | None) -> str:
    """Where two answers part."""
    if found is None:
        return f"{name}: no answer"
    pairs = [zip(a, b, strict=False) for a, b in zip(wanted[:2], found[:2], strict=True)]
    token, logprob = (next((i for i, (a, b) in enumerate(p) if a != b), None) for p in pairs)
    return (
        f"{name}: token {token} of {len(wanted[0])}, log-prob {logprob}, {wanted[2:4]} {found[2:4]}"
    )


def new_engine(options: argparse.Namespace) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for the workers
    from vllm import LLM

    from nibble.engine.plugin.step_graph import runner
    from nibble.engine.step_graph_memory import PROMPT_SIZES

    runner.take_full_graphs = take_both_graphs
    llm = LLM(
        str(options.model),
        max_model_len=2048,
        max_num_seqs=64,
        tensor_parallel_size=options.gpus,
        num_gpu_blocks_override=options.blocks,
        # As the plan sets them: those of decode steps and of prompts.
        cudagraph_capture_sizes=sorted({1, 2, 4, *range(8, 65, 8), *PROMPT_SIZES}),
        kv_cache_memory_bytes=4 << 30,
        gpu_memory_utilization=0.3,
        disable_log_stats=True,
        seed=0,
        speculative_config=speculation_of(options),
        # vLLM's choice of the second compiles for minutes at each start.
        additional_config={
            "nibble": {
                "step_graph": "on",
                "linear_kernel": options.linear_kernel,
                "attention_kernel": options.attention_kernel,
                "draft_head": options.draft_head,
            },
            "gdn_prefill_backend": "triton",
        },
    )
    return llm.llm_engine


def speculation_of(options: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's speculative_config."""
    from host_floor import speculation

    if not options.drafts:
        return None
    found = speculation(options.model, options.method, options.drafts)
    if options.acceptance is not None:
        rates = [options.acceptance**number for number in range(1, options.drafts + 1)]
        found |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return found


def vocabulary_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


class PathOfSteps:
    """Chooses the path of an engine's steps, and counts."""

    def __init__(self, engine: Any) -> None:
        core = engine.engine_core.engine_core
        self._engine = engine
        self._counted: dict[str, int] = {}
        self._preempted = self._accepted = 0
        # A grammar that is compiled in the background would delay its request by a random time.
        core.structured_output_manager._use_async_grammar_compilation = False
        preempt = core.scheduler._preempt_request

        def counted(*arguments: Any, **more: Any) -> Any:
            self._preempted += 1
            return preempt(*arguments, **more)

        core.scheduler._preempt_request = counted
        update = core.scheduler.update_from_output

        def updated(scheduled: Any, output: Any) -> Any:
            tokens = output.sampled_token_ids or ()
            self._accepted += sum(max(len(found) - 1, 0) for found in tokens)
            return update(scheduled, output)

        core.scheduler.update_from_output = updated

    def take(self, mode: str) -> None:
        self._engine.collective_rpc(take_path, args=(mode,))

    def counts(self) -> dict[str, int]:
        """Steps since the last call, by reason."""
        now = self._engine.collective_rpc(counted_steps)[0]
        before, self._counted = self._counted, now
        return {name: n - before.get(name, 0) for name, n in now.items() if n > before.get(name, 0)}

    def graph_bytes(self) -> list[dict[str, int]]:
        """What the graphs of each GPU have taken, their number, and the limit."""
        return self._engine.collective_rpc(graph_bytes)

    def accepted(self) -> int:
        """Accepted drafts since the last call."""
        before, self._accepted = self._accepted, 0
        return before

    def preemptions(self) -> int:
        """Since the last call."""
        before, self._preempted = self._preempted, 0
        return before


def take_both_graphs(manager: Any, long_sizes: list[int]) -> None:
    """Have an engine capture piecewise graphs for prompts too, for the passes that use them."""
    from vllm.config.compilation import CUDAGraphMode

    from nibble.engine.plugin.step_graph.prompts import take_full_graphs

    piecewise = manager._capture_descs[CUDAGraphMode.PIECEWISE]
    before = {key: list(found) for key, found in manager._candidates.items()}
    take_full_graphs(manager, long_sizes)
    # The manager's first capture makes room for the results of all: the largest one comes first.
    largest = manager._capture_descs[CUDAGraphMode.FULL].pop(0)
    manager._capture_descs[CUDAGraphMode.PIECEWISE] = [largest, *piecewise]
    for key, found in before.items():
        manager._candidates[key] += [one for one in found if one in piecewise]


def take_path(worker: Any, mode: str) -> None:
    """In a worker: let its steps take a path."""
    from vllm.config.compilation import CUDAGraphMode

    from nibble.engine.plugin.step_graph.prompts import is_for_prompts

    runner = worker.model_runner
    if not hasattr(runner, "all_graphs"):
        runner.all_graphs, runner.any_batch = runner._graphs, runner._new_batch
        runner.all_candidates = dict(runner.cudagraph_manager._candidates)
        runner.any_inputs = runner.prepare_inputs

    def without_sampler(*arguments: Any) -> Any:
        batch = runner.any_batch(*arguments)
        if not isinstance(batch, str):
            batch.refusal = "random_sampler"
        return batch

    if mode != "off" and runner.all_graphs is None:
        raise RuntimeError("this engine has no graphs of whole steps; its log says why")
    runner._graphs = None if mode == "off" else runner.all_graphs
    candidates = runner.cudagraph_manager._candidates
    largest = runner.compilation_config.max_cudagraph_capture_size

    def other(desc: Any) -> list[Any]:
        """For a pass without full graphs for prompts. Beyond vLLM's sizes the same number of tokens
        without a graph: with another number, products may add in another order.
        """
        if not is_for_prompts(desc):
            return [desc]
        eager = replace(desc, cg_mode=CUDAGraphMode.NONE, num_reqs=None)
        return [eager] if desc.num_tokens > largest else []

    for key, found in runner.all_candidates.items():
        taken = [other(one) for one in found] if mode in IN_PIECES else [found]
        candidates[key] = [one for some in taken for one in some]
    runner._new_batch = without_sampler if mode == "inputs" else runner.any_batch

    def as_in_graph(scheduled: Any, state: Any, desc: Any, loras: int) -> Any:
        """What runs from a graph for prompts takes FlashAttention, planned as if one request had
        all tokens: also a prompt of one token beside decode steps. The same without that graph.
        """
        batch = runner.any_inputs(scheduled, state, desc, loras)
        found = runner.all_candidates.get((batch.num_tokens, 0), ())
        if desc.cg_mode != CUDAGraphMode.FULL and any(map(is_for_prompts, found)):
            batch.max_query_len = desc.num_tokens
        return batch

    runner.prepare_inputs = as_in_graph if mode in IN_PIECES else runner.any_inputs


def counted_steps(worker: Any) -> dict[str, int]:
    return worker.model_runner.step_counter.to_json()


def graph_bytes(worker: Any) -> dict[str, int]:
    graphs = getattr(worker.model_runner, "all_graphs", None)
    if graphs is None:
        return {}
    sizes = [one for one in graphs.sizes.values() if one is not None]
    return {
        "inputs_bytes": graphs.inputs_bytes,
        "samplers_bytes": graphs.samplers_bytes,
        "limit_bytes": graphs.limit_bytes,
        "inputs": sum(one.inputs is not None for one in sizes),
        "samplers": sum(len(one.samplers) for one in sizes),
    }


@dataclass
class Requests:
    """Makes requests for a model with this vocabulary."""

    vocabulary: int
    has_drafts: bool = False

    def token(self, rng: random.Random) -> int:
        return rng.randrange(300, min(VOCABULARY, self.vocabulary))

    def mixed(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Requests with the step at which they arrive, and for some the tokens after which they
        are aborted.
        """
        rng = random.Random(seed)
        shared = [self.token(rng) for _ in range(700)]
        kinds = sampling_kinds(self.vocabulary)
        for kind in NOT_WITH_DRAFTS if self.has_drafts else ():
            del kinds[kind]
        requests, step = [], 0
        for number in range(count):
            kind = rng.choice(sorted(kinds))
            length = rng.choice((1, 2, 15, 16, 17, rng.randint(1, 200), rng.randint(200, 1500)))
            ids = [self.token(rng) for _ in range(length)]
            if rng.random() < 0.25:
                ids = shared[: rng.randint(16, 700)] + ids[:100]
            if rng.random() < 0.3:
                step += rng.randint(1, 25)
            most = max(rng.randint(1, 160), kinds[kind].get("min_tokens", 1))
            requests.append(
                {
                    "id": f"r{number}",
                    "kind": kind,
                    "prompt": ids,
                    "step": step,
                    "params": kinds[kind] | {"seed": number, "max_tokens": most},
                    "abort_after": rng.randint(1, 40) if rng.random() < 0.05 else None,
                }
            )
        return requests


def sampling_kinds(vocabulary: int) -> dict[str, dict[str, Any]]:
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
        "stop_ids": {
            "temperature": 1.0,
            "allowed_token_ids": list(range(300, min(1200, vocabulary))),
            "stop_token_ids": list(range(300, 420)),
            "min_tokens": 5,
        },
        "stop_string": {"temperature": 1.0, "stop": ["e", "xyz"], "min_tokens": 2},
        "four": {"temperature": 0.9, "n": 4},
        "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
        "json": {"temperature": 0.8, "structured_outputs": {"json": SCHEMA}},
        "tool_required": {"temperature": 0.8, "structured_outputs": {"json": TOOL_CALLS}},
        "tool_chosen": {
            "temperature": 1.0,
            "structured_outputs": {"structural_tag": json.dumps(TOOL_TAGS)},
        },
    }


def ask_mixed(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers: id#index -> tokens, log-probs, finish and stop reason."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    waiting, answers, aborts = list(requests), dict[str, Any](), dict[str, int]()
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0]["step"] <= step:
            request = waiting.pop(0)
            given = dict(request["params"])
            if rules := given.pop("structured_outputs", None):
                given["structured_outputs"] = StructuredOutputsParams(**rules)
            params = SamplingParams(**given)
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


def gpu_time(engine: Any, streams: int) -> float:
    """Milliseconds of a step's graphs one after the other, without a host between them."""
    begin_streams(engine, streams, f"g{streams}")
    for _ in range(30):
        engine.step()
    found = engine.collective_rpc(replay_time)[0]
    engine.abort_request([f"g{streams}-{number}" for number in range(streams)])
    while engine.has_unfinished_requests():
        engine.step()
    return found


def replay_time(worker: Any) -> float:
    """In a worker: the time of the last step's graphs. Leaves its requests in no usable state."""
    import torch

    runner, times = worker.model_runner, []
    batch = runner._batch
    for count in (50, 50, 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            runner._graphs.run_model(batch.size)
            runner._graphs.sample(batch.size, batch.sampling)
            if batch.size.drafting is not None:
                runner._graphs.draft(batch.size)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return round(statistics.median(times), 3)


def begin_streams(engine: Any, streams: int, name: str) -> float:
    from vllm import SamplingParams

    rng = random.Random(name)
    for number in range(streams):
        ids = [rng.randrange(300, 1000) for _ in range(16)]
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

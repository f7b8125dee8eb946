"""The memory flags that vLLM gets, and what to reduce if the model does not fit. Pure.

If the engine uses the host's memory, nibble sets the KV cache in bytes, and
`gpu_memory_utilization` to a fraction that passes vLLM's check at start (that fraction of the whole
memory must be free). On a discrete GPU vLLM measures the KV cache itself, and nibble only lowers
the fraction. A fraction from a user or a recipe is a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nibble.engine.step_graph_memory import LONG_PROMPT_SIZES, long_prompt_bytes
from nibble.plan.attention_kernel import attention_workspace_bytes
from nibble.plan.budget import Budget, CacheShape, is_shared, make_budget, sequence_bytes
from nibble.plan.choice import Choice, Choices, Layer, values_of
from nibble.plan.draft_head import draft_head_bytes
from nibble.plan.expert_memory import experts_workspace_bytes, most_tokens
from nibble.plan.inputs import PlanInputs
from nibble.plan.leading_head import leading_head_bytes
from nibble.plan.nvfp4_options import asked
from nibble.plan.step_graph import captures_prompts, planned_bytes
from nibble.plan.topology import Topology
from nibble.plan.w4a4_memory import linear_workspace_bytes
from nibble.settings.declare import token_count

GIB = 1 << 30
MIB = 1 << 20
CPU_KV_CACHE_LIMIT_BYTES = 4 * GIB
DEFAULT_UTILIZATION = 0.92  # vllm 0.32 config/cache.py:102
KV = "--kv-cache-memory-bytes"
UTILIZATION = "--gpu-memory-utilization"
SOURCE = "memory budget"
# vLLM rounds a sequence up to groups of equal layers; `sequence_memory_bytes` does not model that.
ONE_SEQUENCE_MARGIN = 1 / 16
SHORTEST_CONTEXT = 1024
EIGHT_BIT_OR_LESS = ("fp8", "int8", "int4", "nvfp4", "turboquant")


@dataclass(frozen=True)
class Step:
    """One setting that reduces memory, and the bytes of one device that it frees (None:
    unknown).
    """

    what: str
    frees_bytes: int | None

    def __str__(self) -> str:
        freed = "" if self.frees_bytes is None else f" ({show_gib(self.frees_bytes)} less)"
        return self.what + freed


@dataclass(frozen=True)
class MemoryPlan:
    """The budget, the flags that follow from it, and the steps that reduce memory, in the order to
    try them.
    """

    budget: Budget
    flags: Choices
    ladder: tuple[Step, ...]


def plan_memory(inputs: PlanInputs, args: Mapping[str, Choice], topology: Topology) -> MemoryPlan:
    """Compare the available memory with the model's need under `args`, and set the memory flags."""
    tokens, shape = context(inputs, args), cache_shape(inputs, args)
    gpus = number_of(args, "--tensor-parallel-size", 1) * number_of(
        args, "--pipeline-parallel-size", 1
    )
    replicas = number_of(args, "--data-parallel-size", 1)
    reserve_gib = inputs.loaded.settings.memory_reserve_gib
    cpu_space = _cpu_space(inputs, args)
    kv_choice = {**args, **cpu_space}.get(KV)
    budget = make_budget(
        inputs.target,
        inputs.hardware,
        inputs.checkpoint,
        cap=_cap(inputs, args),
        reserve_bytes=None if reserve_gib is None else int(reserve_gib * GIB),
        tokens=tokens,
        sequences=number_of(args, "--max-num-seqs", 0) or None,
        shape=shape,
        gpus_per_model=gpus,
        replicas=replicas,
        ranks_here=topology.ranks_here,
        graphs_bytes=_graphs_bytes(inputs, args),
        kv_cache_bytes=int(kv_choice.value) if kv_choice else None,
        kernels_bytes=_kernels_bytes(inputs, args),
        copies_bytes=draft_head_bytes(inputs.checkpoint, args) + leading_head_bytes(inputs, args),
    )

    def sequence_at(tokens: int, dtype: str) -> int | None:
        return sequence_bytes(inputs.checkpoint, tokens, replace(shape, kv_cache_dtype=dtype))

    flags = cpu_space | _kv_cache(inputs, kv_choice, budget, topology.ranks_here)
    kv = flags.get(KV, kv_choice)
    flags |= _utilization(inputs, args, budget, int(kv.value) if kv else None)
    return MemoryPlan(
        budget, flags, ladder(budget, sequence_at, inputs, shape.kv_cache_dtype, gpus)
    )


def _kernels_bytes(inputs: PlanInputs, args: Mapping[str, Choice]) -> int:
    """The workspace of nibble's kernels."""
    return _products_bytes(inputs, args, most_tokens(args)) + attention_workspace_bytes(args)


def _products_bytes(inputs: PlanInputs, args: Mapping[str, Choice], tokens: int) -> int:
    """Linear layers and experts compute one after the other."""
    experts = experts_workspace_bytes(inputs, args, tokens)
    return max(experts, linear_workspace_bytes(inputs, args, tokens))


def _cap(inputs: PlanInputs, args: Mapping[str, Choice]) -> float | None:
    if UTILIZATION in args:
        return float(args[UTILIZATION].value)
    return None if is_shared(inputs.target) else DEFAULT_UTILIZATION


def _graphs_bytes(inputs: PlanInputs, args: Mapping[str, Choice]) -> int:
    if inputs.target.device != "cuda" or _is_eager(args):
        return 0
    planned = planned_bytes(inputs.checkpoint, args) + _long_prompts_bytes(inputs, args)
    return inputs.target.memory.graphs_bytes + planned


def _long_prompts_bytes(inputs: PlanInputs, args: Mapping[str, Choice]) -> int:
    """Of the graphs for prompts beyond vLLM's sizes (engine/plugin/step_graph/prompts.py)."""
    checkpoint, values = inputs.checkpoint, values_of(args)
    if checkpoint is None or not captures_prompts(checkpoint, args):
        return 0
    if asked(values).get("attention_kernel") in (None, "vllm"):
        return 0
    tokens = min(most_tokens(args), LONG_PROMPT_SIZES[-1])
    hidden = int(checkpoint.text_config.get("hidden_size") or 0)
    return long_prompt_bytes(hidden, tokens) + _products_bytes(inputs, args, tokens)


def _is_eager(args: Mapping[str, Choice]) -> bool:
    return "--enforce-eager" in args and args["--enforce-eager"].value is True


def _cpu_space(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choices:
    """VLLM_CPU_KVCACHE_SPACE in whole GiB. Inside vLLM it wins over the flag (vllm 0.32
    platforms/cpu.py:327).
    """
    space = inputs.accepted.environ.get("VLLM_CPU_KVCACHE_SPACE", "").strip()
    if inputs.target.device != "cpu" or not space.isdigit() or int(space) == 0:
        return {}
    source = "environment VLLM_CPU_KVCACHE_SPACE"
    return {KV: Choice(int(space) * GIB, source, f"{space} GiB", Layer.LIMIT)}


def _kv_cache(inputs: PlanInputs, kv_choice: Choice | None, budget: Budget, ranks: int) -> Choices:
    """The KV cache in bytes, if the engine uses the host's memory and the size is unset."""
    if kv_choice is not None or not is_shared(inputs.target):
        return {}
    if inputs.target.memory.kind == "host":
        return {KV: _cpu_kv_cache(budget, ranks)}
    return _unified_kv_cache(budget)


def _cpu_kv_cache(budget: Budget, ranks: int) -> Choice:
    """The KV cache on a CPU. Without a size in bytes vLLM requires 92 % of the memory to be free
    (vllm 0.32 cpu_worker.py:80).
    """
    each, sequences = budget.sequence_bytes, budget.sequences or 1
    room = CPU_KV_CACHE_LIMIT_BYTES if budget.room_bytes is None else budget.room_bytes
    limit = max(MIB, min(CPU_KV_CACHE_LIMIT_BYTES, room))
    if each is None:
        reason = "the model's memory per sequence is unknown until pull"
        return Choice(_round_down(limit // ranks, MIB), "nibble's default", reason)
    wanted = max(each, min(each * sequences, limit))
    reason = (
        f"{sequences} sequences of {budget.sequence_tokens} tokens, {each / GIB:.3f} GiB each, "
        f"limited to {show_gib(limit)} or one sequence"
    )
    return Choice(_round_up(-(-wanted // ranks), MIB), "nibble's default", reason)


def _unified_kv_cache(budget: Budget) -> Choices:
    """The KV cache for all sequences at full length, or what fits; no flag while the weights are
    unknown.
    """
    if budget.room_bytes is None:
        return {}
    each, full = budget.sequence_bytes, budget.full_kv_bytes
    room = max(MIB, budget.room_bytes)
    if each is None or full is None:
        reason = f"all of the {show_gib(room)} that weights, engine and reserve leave"
        return {KV: Choice(_round_down(room, MIB), SOURCE, reason)}
    least = int(each * (1 + ONE_SEQUENCE_MARGIN))
    if full <= room:
        reason = (
            f"{budget.sequences} sequences of {budget.sequence_tokens} tokens, {show_gib(each)}"
            " each"
        )
        return {KV: Choice(_round_up(min(max(full, least), room), MIB), SOURCE, reason)}
    reason = (
        f"the {show_gib(room)} that weights, engine and reserve leave hold "
        f"{budget.room_bytes / each:.1f} sequences of {budget.sequence_tokens} tokens"
    )
    return {KV: Choice(max(_round_down(room, MIB), _round_up(each, MIB)), SOURCE, reason)}


def _utilization(
    inputs: PlanInputs, args: Mapping[str, Choice], budget: Budget, kv_bytes: int | None
) -> Choices:
    """The fraction of the whole memory that vLLM requires to be free at its start.

    It is at most the free fraction and, with the KV cache in bytes, at most the fraction that vLLM
    will use. On a CPU vLLM checks nothing once the bytes are given.
    """
    share = budget.free_share()
    if inputs.target.memory.kind == "host" or share is None or share <= 0:
        return {}
    cap = DEFAULT_UTILIZATION if budget.cap is None else budget.cap
    cap_choice = args.get(UTILIZATION)
    cap_note = f"{cap_choice.value} ({cap_choice.source}) is a cap; " if cap_choice else ""
    used = budget.used_share(kv_bytes) if is_shared(inputs.target) else None
    if used is not None and used < min(share, cap):
        reason = (
            f"{cap_note}vLLM starts only with this fraction free: its planned use of"
            f" {show_gib(budget.memory_bytes)}"
        )
        return {UTILIZATION: Choice(used, SOURCE, reason, Layer.LIMIT)}
    if share >= cap:
        return {}
    reason = (
        f"{cap_note}vLLM starts only with this fraction free: {show_gib(budget.available_bytes)} of"
        f" {show_gib(budget.memory_bytes)} are available, less reserve"
        f" {show_gib(budget.reserve_bytes)} and engine {show_gib(budget.engine_bytes)}"
    )
    return {UTILIZATION: Choice(share, SOURCE, reason, Layer.LIMIT)}


# --- what to reduce ---


def ladder(
    budget: Budget,
    sequence_at: Callable[[int, str], int | None],
    inputs: PlanInputs,
    dtype: str,
    gpus: int,
) -> tuple[Step, ...]:
    """Steps that reduce memory, those with the least cost for the user first. `sequence_at` gives a
    sequence's bytes for (tokens, dtype).

    Each step's bytes are what that step alone frees: for all sequences at full length, as `nibble
    plan` adds them up, or for one sequence if not even one fits.
    """
    count = 1 if budget.missing_bytes else budget.sequences or 1
    steps: list[Step] = []
    if budget.kv_cache_bytes is not None:
        steps.append(Step("a smaller NIBBLE_KV_CACHE_BYTES, or none", None))
    elif budget.sequence_bytes:
        if count > 1:
            steps.append(Step("MAX_NUM_SEQS=1", (count - 1) * budget.sequence_bytes))
        steps += _shorter_context(budget, count, lambda tokens: sequence_at(tokens, dtype))
        if inputs.target.device == "cuda" and not _is_small_cache(inputs, dtype):
            fp8_bytes = sequence_at(budget.sequence_tokens or 0, "fp8")
            saved = count * max(0, budget.sequence_bytes - fp8_bytes) if fp8_bytes else None
            steps.append(Step("--kv-cache-dtype fp8", saved))
    if budget.graphs_bytes:
        steps.append(Step("--enforce-eager", budget.graphs_bytes))
    if (
        inputs.target.device == "cuda"
        and len(inputs.hardware.gpus) >= 2 * gpus
        and budget.weights_bytes
    ):
        steps.append(Step(f"TENSOR_PARALLEL_SIZE={2 * gpus}", budget.weights_bytes // 2))
    if budget.is_capped:
        steps.insert(0, Step(f"a GPU_MEMORY_UTIL above {budget.cap}", None))
    if inputs.loaded.settings.memory_reserve_gib:
        steps.append(Step("a smaller NIBBLE_MEMORY_RESERVE_GIB", None))
    last_step = (
        "a higher limit of that cgroup" if "cgroup" in budget.limited_by else "stop other programs"
    )
    least_bytes = budget.missing_bytes // 16  # smaller savings do not help
    steps = [step for step in steps if step.frees_bytes is None or step.frees_bytes >= least_bytes]
    return (*steps, Step(last_step, None), Step("a smaller model", None))


def _is_small_cache(inputs: PlanInputs, dtype: str) -> bool:
    declared = inputs.checkpoint.scheme.kv_cache if inputs.checkpoint else None
    return (declared if dtype == "auto" and declared else dtype).startswith(EIGHT_BIT_OR_LESS)


def _shorter_context(
    budget: Budget, count: int, sequence_at: Callable[[int], int | None]
) -> list[Step]:
    """The longest context, in whole 1024 tokens, with which one sequence fits; half of the current
    one if that fits too.
    """
    tokens, now_bytes = budget.sequence_tokens or 0, budget.sequence_bytes or 0
    if tokens < 2 * SHORTEST_CONTEXT or budget.room_bytes is None:
        return []
    units = tokens // SHORTEST_CONTEXT
    low, high = 1, max(1, units // 2)
    while low < high:
        middle = (low + high + 1) // 2
        fits = (sequence_at(middle * SHORTEST_CONTEXT) or 0) * (
            1 + ONE_SEQUENCE_MARGIN
        ) <= budget.room_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    saved = count * (now_bytes - (sequence_at(low * SHORTEST_CONTEXT) or 0))
    return [Step(f"MAX_MODEL_LEN={low * SHORTEST_CONTEXT}", saved)] if saved > 0 else []


def arithmetic(budget: Budget, kv_bytes: int) -> str:
    """The sum as text: the need with a KV cache of `kv_bytes`, and the available memory."""
    terms = [f"weights {show_gib(budget.weights_bytes)}"]
    if budget.kv_cache_bytes is not None or not budget.sequence_bytes:
        terms.append(f"KV cache {show_gib(kv_bytes)}")
    else:
        count = kv_bytes // budget.sequence_bytes
        tokens = f"{budget.sequence_tokens} tokens at {show_gib(budget.sequence_bytes)}"
        terms.append(f"{count} sequence{'s' if count != 1 else ''} of {tokens}")
    terms += [f"graphs {show_gib(budget.graphs_bytes)}"] if budget.graphs_bytes else []
    terms += [
        f"workspace {show_gib(budget.workspace_bytes)}",
        f"engine {show_gib(budget.engine_bytes)}",
        f"reserve {show_gib(budget.reserve_bytes)}",
    ]
    total = (budget.weights_bytes or 0) + kv_bytes + budget.overhead_bytes + budget.reserve_bytes
    supply = (
        f"{show_gib(budget.available_bytes)} available of {show_gib(budget.memory_bytes)}"
        f" ({budget.limited_by})"
    )
    text = f"{' + '.join(terms)} = {show_gib(total)} needed; {supply}"
    if budget.is_capped:
        text += (
            f", of which a cap of {budget.cap} leaves"
            f" {show_gib((budget.allowed_bytes or 0) + budget.reserve_bytes)}"
        )
    return text


def show_gib(nbytes: int | None) -> str:
    """Bytes in GiB as text, with three digits below one GiB."""
    if nbytes is None:
        return "unknown"
    return f"{nbytes / GIB:.3f} GiB" if abs(nbytes) < GIB else f"{nbytes / GIB:.1f} GiB"


# --- from flags to the shape of the cache ---


def context(inputs: PlanInputs, args: Mapping[str, Choice]) -> int | None:
    """Tokens of a full sequence: the set value, else the checkpoint's limit."""
    tokens = token_count(args["--max-model-len"].value) if "--max-model-len" in args else None
    return tokens or (inputs.checkpoint.max_model_len if inputs.checkpoint else None)


def cache_shape(inputs: PlanInputs, args: Mapping[str, Choice]) -> CacheShape:
    """What determines a sequence's memory, from the flags and vLLM's defaults."""
    speculative = args.get("--speculative-config")
    config = speculative.value if speculative and isinstance(speculative.value, Mapping) else {}
    latent = inputs.checkpoint is not None and any(
        layer.kind == "mla" for layer in inputs.checkpoint.layers or ()
    )
    # vllm 0.32 platforms/cpu.py: blocks of 128 tokens, except for latent attention.
    block = 128 if inputs.target.device == "cpu" and not latent else 16
    return CacheShape(
        kv_cache_dtype=(
            str(args["--kv-cache-dtype"].value) if "--kv-cache-dtype" in args else "auto"
        ),
        tensor_parallel_size=number_of(args, "--tensor-parallel-size", 1),
        block_size=number_of(args, "--block-size", block),
        # Only drafts in the checkpoint itself (MTP) add layers to the KV cache.
        speculative_tokens=(
            int(config.get("num_speculative_tokens", 0))
            if "mtp" in str(config.get("method"))
            else 0
        ),
        prefix_caching=(
            args["--enable-prefix-caching"].value is not False
            if "--enable-prefix-caching" in args
            else True
        ),
        # What vLLM schedules beyond a sliding window. Its default depends on the hardware; 8192 is
        # the largest.
        in_flight_tokens=number_of(args, "--max-num-batched-tokens", 8192),
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _round_down(value: int, unit: int) -> int:
    return value // unit * unit


def number_of(args: Mapping[str, Choice], name: str, default: int) -> int:
    """The value of a flag that is a number; `default` where it is missing or zero."""
    return token_count(args[name].value) or default if name in args else default


# Shares of the reserve; docs/operations.md explains them.
PAUSE_SHARE, STOP_SHARE, RESUME_SHARE = 1 / 2, 1 / 4, 3 / 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of the host's memory. All 0 if nothing is watched."""

    reserve_bytes: int
    pause_below_bytes: int
    stop_below_bytes: int
    resume_from_bytes: int


def limits(reserve_bytes: int) -> Limits:
    """The watchdog's limits for a reserve of `reserve_bytes`."""
    shares = (PAUSE_SHARE, STOP_SHARE, RESUME_SHARE)
    return Limits(reserve_bytes, *(int(reserve_bytes * share) for share in shares))


UNWATCHED = limits(0)

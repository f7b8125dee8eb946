"""Which memory flags vLLM gets, from one budget, and what to turn down where it does not fit. Pure.

Where the engine's memory is the host's, the KV cache is given in bytes and vLLM's own check at
start (`gpu_memory_utilization` of the whole memory must be free) gets a fraction that passes. On a
discrete GPU vLLM measures the KV cache itself and only the fraction is lowered. A fraction that a
user or a recipe gives is a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nibble.plan.budget import Budget, CacheShape, is_shared, make_budget, sequence_bytes
from nibble.plan.choice import Choice, Choices, Layer
from nibble.plan.inputs import Ingredients
from nibble.plan.topology import Topology
from nibble.settings.declare import token_count

GIB = 1 << 30
MIB = 1 << 20
CPU_KV_CACHE_LIMIT_BYTES = 4 * GIB
DEFAULT_UTILIZATION = 0.92  # vllm 0.32 config/cache.py:102
KV = "--kv-cache-memory-bytes"
UTILIZATION = "--gpu-memory-utilization"
SOURCE = "memory budget"
# vLLM rounds a sequence up to groups of equal layers, which `sequence_memory` does not know.
ONE_SEQUENCE_MARGIN = 1 / 16
SHORTEST_CONTEXT = 1024
EIGHT_BIT_OR_LESS = ("fp8", "int8", "int4", "nvfp4", "turboquant")


@dataclass(frozen=True)
class Step:
    """One thing to turn down: what to set, and the bytes of one device it frees (None: it
    depends).
    """

    what: str
    frees_bytes: int | None

    def __str__(self) -> str:
        return (
            self.what
            if self.frees_bytes is None
            else f"{self.what} ({show_gib(self.frees_bytes)} less)"
        )


@dataclass(frozen=True)
class MemoryPlan:
    """The budget, the flags it decides, and the steps that need less memory, in the order to try
    them.
    """

    budget: Budget
    flags: Choices
    ladder: tuple[Step, ...]


def plan_memory(parts: Ingredients, args: Mapping[str, Choice], topology: Topology) -> MemoryPlan:
    """Weigh what is there against what the model needs under `args`."""
    tokens, shape = context(parts, args), cache_shape(parts, args)
    gpus = _number(args, "--tensor-parallel-size", 1) * _number(args, "--pipeline-parallel-size", 1)
    replicas = _number(args, "--data-parallel-size", 1)
    asked = parts.loaded.settings.memory_reserve_gib
    legacy = _cpu_space(parts, args)
    given = {**args, **legacy}.get(KV)
    budget = make_budget(
        parts.target,
        parts.hardware,
        parts.checkpoint,
        cap=_cap(parts, args),
        reserve_bytes=None if asked is None else int(asked * GIB),
        tokens=tokens,
        sequences=_number(args, "--max-num-seqs", 0) or None,
        shape=shape,
        gpus_per_model=gpus,
        replicas=replicas,
        ranks_here=topology.ranks_here,
        has_graphs=parts.target.device == "cuda" and not _is_eager(args),
        kv_cache_bytes=int(given.value) if given else None,
    )

    def each(tokens: int, dtype: str) -> int | None:
        return sequence_bytes(parts.checkpoint, tokens, replace(shape, kv_cache_dtype=dtype))

    flags = legacy | _kv_cache(parts, given, budget, topology.ranks_here)
    kv = flags.get(KV, given)
    flags |= _utilization(parts, args, budget, int(kv.value) if kv else None)
    return MemoryPlan(budget, flags, ladder(budget, each, parts, shape.kv_cache_dtype, gpus))


def _cap(parts: Ingredients, args: Mapping[str, Choice]) -> float | None:
    if UTILIZATION in args:
        return float(args[UTILIZATION].value)
    return None if is_shared(parts.target) else DEFAULT_UTILIZATION


def _is_eager(args: Mapping[str, Choice]) -> bool:
    return "--enforce-eager" in args and args["--enforce-eager"].value is True


def _cpu_space(parts: Ingredients, args: Mapping[str, Choice]) -> Choices:
    """VLLM_CPU_KVCACHE_SPACE, which wins inside vLLM over the flag (vllm 0.32
    platforms/cpu.py:327): whole GiB.
    """
    space = parts.accepted.environ.get("VLLM_CPU_KVCACHE_SPACE", "").strip()
    if parts.target.device != "cpu" or not space.isdigit() or int(space) == 0:
        return {}
    source = "environment VLLM_CPU_KVCACHE_SPACE"
    return {KV: Choice(int(space) * GIB, source, f"{space} GiB", Layer.LIMIT)}


def _kv_cache(parts: Ingredients, given: Choice | None, budget: Budget, ranks: int) -> Choices:
    """KV cache in bytes, where the memory is the host's and the size is unset."""
    if given is not None or not is_shared(parts.target):
        return {}
    if parts.target.memory.kind == "host":
        return {KV: _cpu_kv_cache(budget, ranks)}
    return _unified_kv_cache(budget)


def _cpu_kv_cache(budget: Budget, ranks: int) -> Choice:
    """On a CPU vLLM wants 92 % of all memory free unless told how many bytes (vllm 0.32
    cpu_worker.py:80).
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
    """All sequences at full length, or what there is room for; nothing while the weights are
    unknown.
    """
    if budget.room_bytes is None:
        return {}
    each, full = budget.sequence_bytes, budget.full_kv_bytes
    room = max(MIB, budget.room_bytes)
    if each is None or full is None:
        reason = f"all of the {show_gib(room)} left beside weights, engine and reserve"
        return {KV: Choice(_round_down(room, MIB), SOURCE, reason)}
    least = int(each * (1 + ONE_SEQUENCE_MARGIN))
    if full <= room:
        reason = (
            f"{budget.sequences} sequences of {budget.sequence_tokens} tokens, {show_gib(each)}"
            " each"
        )
        return {KV: Choice(_round_up(min(max(full, least), room), MIB), SOURCE, reason)}
    reason = (
        f"the {show_gib(room)} left beside weights, engine and reserve hold "
        f"{budget.room_bytes / each:.1f} sequences of {budget.sequence_tokens} tokens"
    )
    return {KV: Choice(max(_round_down(room, MIB), _round_up(each, MIB)), SOURCE, reason)}


def _utilization(
    parts: Ingredients, args: Mapping[str, Choice], budget: Budget, kv_bytes: int | None
) -> Choices:
    """The fraction of the whole memory that vLLM wants free at its start, no more than is there
    and, with the KV cache in bytes, than it will use. On a CPU it wants none once the bytes are
    given.
    """
    share = budget.free_share()
    if parts.target.memory.kind == "host" or share is None or share <= 0:
        return {}
    cap = DEFAULT_UTILIZATION if budget.cap is None else budget.cap
    given = args.get(UTILIZATION)
    first = f"{given.value} ({given.source}) is a cap; " if given else ""
    if (
        is_shared(parts.target)
        and (used := budget.used_share(kv_bytes)) is not None
        and used < min(share, cap)
    ):
        reason = (
            f"{first}vLLM starts only with this fraction free: its planned use of"
            f" {show_gib(budget.memory_bytes)}"
        )
        return {UTILIZATION: Choice(used, SOURCE, reason, Layer.LIMIT)}
    if share >= cap:
        return {}
    reason = (
        f"{first}vLLM starts only with this fraction free: {show_gib(budget.available_bytes)} of"
        f" {show_gib(budget.memory_bytes)} are available, less reserve"
        f" {show_gib(budget.reserve_bytes)} and engine {show_gib(budget.engine_bytes)}"
    )
    return {UTILIZATION: Choice(share, SOURCE, reason, Layer.LIMIT)}


# --- what to turn down ---


def ladder(
    budget: Budget,
    each: Callable[[int, str], int | None],
    parts: Ingredients,
    dtype: str,
    gpus: int,
) -> tuple[Step, ...]:
    """Steps that need less memory, the cheapest for the user first; `each` gives a sequence's bytes
    for tokens and dtype.

    Bytes are what the step alone frees: of all sequences at full length, as `nibble plan` adds them
    up, or of the one that a refusal is about.
    """
    count = 1 if budget.missing_bytes else budget.sequences or 1
    steps: list[Step] = []
    if budget.kv_cache_bytes is not None:
        steps.append(Step("a smaller NIBBLE_KV_CACHE_BYTES, or none", None))
    elif budget.sequence_bytes:
        if count > 1:
            steps.append(Step("MAX_NUM_SEQS=1", (count - 1) * budget.sequence_bytes))
        steps += _shorter_context(budget, count, lambda tokens: each(tokens, dtype))
        if parts.target.device == "cuda" and not _is_small_cache(parts, dtype):
            eight = each(budget.sequence_tokens or 0, "fp8")
            saved = count * max(0, budget.sequence_bytes - eight) if eight else None
            steps.append(Step("--kv-cache-dtype fp8", saved))
    if budget.graphs_bytes:
        steps.append(Step("--enforce-eager", budget.graphs_bytes))
    if (
        parts.target.device == "cuda"
        and len(parts.hardware.gpus) >= 2 * gpus
        and budget.weights_bytes
    ):
        steps.append(Step(f"TENSOR_PARALLEL_SIZE={2 * gpus}", budget.weights_bytes // 2))
    if budget.is_capped:
        steps.insert(0, Step(f"a GPU_MEMORY_UTIL above {budget.cap}", None))
    if parts.loaded.settings.memory_reserve_gib:
        steps.append(Step("a smaller NIBBLE_MEMORY_RESERVE_GIB", None))
    others = (
        "a higher limit of that cgroup" if "cgroup" in budget.limited_by else "stop other programs"
    )
    worth = budget.missing_bytes // 16  # smaller savings do not help
    steps = [step for step in steps if step.frees_bytes is None or step.frees_bytes >= worth]
    return (*steps, Step(others, None), Step("a smaller model", None))


def _is_small_cache(parts: Ingredients, dtype: str) -> bool:
    declared = parts.checkpoint.scheme.kv_cache if parts.checkpoint else None
    return (declared if dtype == "auto" and declared else dtype).startswith(EIGHT_BIT_OR_LESS)


def _shorter_context(budget: Budget, count: int, each: Callable[[int], int | None]) -> list[Step]:
    """The longest context, in whole 1024 tokens, of which one sequence fits; half of what is
    asked where all fit.
    """
    tokens, now = budget.sequence_tokens or 0, budget.sequence_bytes or 0
    if tokens < 2 * SHORTEST_CONTEXT or budget.room_bytes is None:
        return []
    units = tokens // SHORTEST_CONTEXT
    low, high = 1, max(1, units // 2)
    while low < high:
        middle = (low + high + 1) // 2
        fits = (each(middle * SHORTEST_CONTEXT) or 0) * (
            1 + ONE_SEQUENCE_MARGIN
        ) <= budget.room_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    saved = count * (now - (each(low * SHORTEST_CONTEXT) or 0))
    return [Step(f"MAX_MODEL_LEN={low * SHORTEST_CONTEXT}", saved)] if saved > 0 else []


def arithmetic(budget: Budget, kv_bytes: int) -> str:
    """The sum in words: what is needed with a KV cache of `kv_bytes`, and what there is."""
    parts = [f"weights {show_gib(budget.weights_bytes)}"]
    if budget.kv_cache_bytes is not None or not budget.sequence_bytes:
        parts.append(f"KV cache {show_gib(kv_bytes)}")
    else:
        count = kv_bytes // budget.sequence_bytes
        tokens = f"{budget.sequence_tokens} tokens at {show_gib(budget.sequence_bytes)}"
        parts.append(f"{count} sequence{'s' if count != 1 else ''} of {tokens}")
    parts += [f"graphs {show_gib(budget.graphs_bytes)}"] if budget.graphs_bytes else []
    parts += [
        f"workspace {show_gib(budget.workspace_bytes)}",
        f"engine {show_gib(budget.engine_bytes)}",
        f"reserve {show_gib(budget.reserve_bytes)}",
    ]
    total = (budget.weights_bytes or 0) + kv_bytes + budget.overhead_bytes + budget.reserve_bytes
    there = (
        f"{show_gib(budget.available_bytes)} available of {show_gib(budget.memory_bytes)}"
        f" ({budget.limited_by})"
    )
    text = f"{' + '.join(parts)} = {show_gib(total)} needed; {there}"
    if budget.is_capped:
        text += (
            f", of which a cap of {budget.cap} leaves"
            f" {show_gib((budget.allowed_bytes or 0) + budget.reserve_bytes)}"
        )
    return text


def show_gib(count: int | None) -> str:
    """Bytes for people: GiB, with three digits below one."""
    if count is None:
        return "unknown"
    return f"{count / GIB:.3f} GiB" if abs(count) < GIB else f"{count / GIB:.1f} GiB"


# --- from flags to the shape of the cache ---


def context(parts: Ingredients, args: Mapping[str, Choice]) -> int | None:
    """Tokens of a full sequence: the set value, else the checkpoint's limit."""
    asked = token_count(args["--max-model-len"].value) if "--max-model-len" in args else None
    return asked or (parts.checkpoint.max_model_len if parts.checkpoint else None)


def cache_shape(parts: Ingredients, args: Mapping[str, Choice]) -> CacheShape:
    """What decides a sequence's memory, from the flags and vLLM's defaults."""
    speculative = args.get("--speculative-config")
    config = speculative.value if speculative and isinstance(speculative.value, Mapping) else {}
    latent = parts.checkpoint is not None and any(
        layer.kind == "mla" for layer in parts.checkpoint.layers or ()
    )
    # vllm 0.32 platforms/cpu.py: blocks of 128 tokens, except for latent attention.
    block = 128 if parts.target.device == "cpu" and not latent else 16
    return CacheShape(
        kv_cache_dtype=(
            str(args["--kv-cache-dtype"].value) if "--kv-cache-dtype" in args else "auto"
        ),
        tensor_parallel_size=_number(args, "--tensor-parallel-size", 1),
        block_size=_number(args, "--block-size", block),
        # Only drafts in the checkpoint itself (MTP) have separate layers there.
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
        # What vLLM schedules beyond a sliding window; its default differs by hardware, and 8192 is
        # the largest on one.
        in_flight_tokens=_number(args, "--max-num-batched-tokens", 8192),
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _round_down(value: int, unit: int) -> int:
    return value // unit * unit


def _number(args: Mapping[str, Choice], name: str, otherwise: int) -> int:
    return token_count(args[name].value) or otherwise if name in args else otherwise


# Shares of the reserve (docs/operations.md says why).
PAUSE_SHARE, STOP_SHARE, RESUME_SHARE = 1 / 2, 1 / 4, 3 / 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of the host's memory. All 0: nothing is watched."""

    reserve_bytes: int
    pause_below_bytes: int
    stop_below_bytes: int
    resume_from_bytes: int


def limits(reserve_bytes: int) -> Limits:
    """The limits that follow from what is kept for the rest of the machine."""
    shares = (PAUSE_SHARE, STOP_SHARE, RESUME_SHARE)
    return Limits(reserve_bytes, *(int(reserve_bytes * share) for share in shares))


UNWATCHED = limits(0)

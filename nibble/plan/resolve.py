"""(settings, hardware, checkpoint, recipe, target) -> Plan.

Deciders stand in one tuple and read one frozen situation; nothing else sets a flag. Refusals come
after the last decider, on the flags that vLLM would get: what is refused when it is typed is
refused when a rule or a recipe sets it. Nothing here reads a file, opens a socket or imports vllm.
"""

from __future__ import annotations

from nibble.machine.paths import cache_dir
from nibble.plan.budget import make_bound, memory_bytes, weights_bytes_per_gpu
from nibble.plan.choice import OURS, Choice, Choices, Layer, at
from nibble.plan.compile_cache import plan_caches
from nibble.plan.environment import decide_environment, on_hub
from nibble.plan.inputs import Ingredients
from nibble.plan.layers import read_layers
from nibble.plan.linear_kernel import choose_linear_kernel, linear_kernel_flags
from nibble.plan.load_check import load_check_flags, load_check_notices
from nibble.plan.memory import plan_memory
from nibble.plan.models.cloverlm import cloverlm_flags
from nibble.plan.models.gemma4 import check_gemma4
from nibble.plan.moe_tuning import VARIABLE as TUNED_CONFIG_FOLDER
from nibble.plan.moe_tuning import choose_alias
from nibble.plan.nvfp4_options import check_is_object, check_nvfp4_options
from nibble.plan.one_order import check_one_order
from nibble.plan.our_kernels import yield_to_our_kernels
from nibble.plan.plan import Plan
from nibble.plan.quantized_layers import quantization_override
from nibble.plan.reference import choose_reference
from nibble.plan.rules import refuse_known_risks, weigh_risks
from nibble.plan.server import model_argument, served_names
from nibble.plan.situation import Decider, Decision, Situation
from nibble.plan.startup import fast_start_flags
from nibble.plan.topology import replicas_here, topology_flags
from nibble.plan.validate import (
    TURBOQUANT_COST,
    check_api,
    check_model,
    check_parallel,
    check_recipe,
    check_request,
)

GIB = 1 << 30


def make_plan(parts: Ingredients) -> Plan:
    """Decide every flag and variable, then refuse what cannot work. Raises NibbleError for
    contradictions.
    """
    settings = parts.loaded.settings
    check_request(settings)
    check_recipe(parts.recipe, parts.target)
    situation = resolve(parts)
    check(situation)
    return _assemble(situation)


def resolve(parts: Ingredients) -> Situation:
    """Each decider in its order."""
    situation = Situation(parts, read_layers(parts))
    check_is_object(situation.values)
    for decide in DECIDERS:
        situation = situation.after(decide(situation))
    return situation


def check(situation: Situation) -> None:
    """Refuse what cannot work with the flags as they are now. Raises NibbleError."""
    parts, served, values = situation.parts, situation.served, situation.values
    check_nvfp4_options(parts.checkpoint, parts.target, situation.flags)
    check_gemma4(parts.loaded.settings, parts.target, served.checkpoint, values, parts.can_compile)
    check_api(values, parts.environ, situation.topology)
    refuse_known_risks(situation)
    check_one_order(served, values)


# --- deciders: each returns what it adds ---


def _tensor_parallel(situation: Situation) -> Decision:
    """Where it is unset: what the recipe's evidence used, else as many GPUs as the weights need,
    else one.
    """
    parts, args = situation.parts, situation.flags
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size")
    if any(size in args for size in sizes) or parts.target.device == "cpu":
        return Decision()
    here = len(parts.hardware.gpus) // replicas_here(situation.values)
    reported = parts.recipe.gpus if parts.recipe else None
    if reported and 1 < reported <= here:
        choice = Choice(reported, "recipe", f"the evidence is for {reported} GPUs", Layer.RECIPE)
        return Decision({"--tensor-parallel-size": choice})
    total, _ = memory_bytes(parts.target, parts.hardware)
    heads = parts.checkpoint.num_attention_heads if parts.checkpoint else None
    for gpus in (1, 2, 4, 8, 16):
        weights = weights_bytes_per_gpu(parts.checkpoint, gpus)
        if weights is None or total is None or not heads or gpus > here or heads % gpus:
            break
        if weights < total * 0.85:  # the rest is for KV cache, graphs and workspaces
            reason = f"{weights / GIB:.1f} GiB of weights a GPU of {total / GIB:.1f} GiB"
            chosen = {"--tensor-parallel-size": Choice(gpus, OURS, reason)}
            return Decision(chosen if gpus > 1 else {})
    return Decision()


def _cloverlm(situation: Situation) -> Decision:
    return Decision(cloverlm_flags(situation.parts.checkpoint, situation.flags))


def _topology(situation: Situation) -> Decision:
    flags = topology_flags(situation.topology)
    check_parallel(
        situation.parts.checkpoint,
        situation.parts.hardware,
        situation.parts.target,
        situation.tensor_parallel,
        situation.topology,
    )
    return Decision({name: Choice(value, OURS, why) for name, (value, why) in flags.items()})


def _linear_kernel(situation: Situation) -> Decision:
    kernel = choose_linear_kernel(situation.served, situation.flags)
    return Decision(linear_kernel_flags(kernel, situation.flags), linear_kernel=kernel)


def _quantized_layers(situation: Situation) -> Decision:
    return Decision(quantization_override(situation.parts.checkpoint, situation.flags))


def _load_check(situation: Situation) -> Decision:
    checkpoint = situation.parts.checkpoint
    flags = load_check_flags(checkpoint, situation.flags)
    notices = load_check_notices(checkpoint, situation.flags.add(flags))
    return Decision(flags, notices=notices)


def _memory(situation: Situation) -> Decision:
    # The arithmetic knows no cache that these models cannot have.
    check_model(situation.parts.checkpoint, situation.parts.target, situation.values)
    memory = plan_memory(situation.served, situation.flags, situation.topology)
    return Decision(memory.flags, memory=memory)


def _startup(situation: Situation) -> Decision:
    return Decision(fast_start_flags(situation.served, situation.flags))


def _code_revision(situation: Situation) -> Decision:
    revision = situation.flags.get("--revision")
    if revision is None or situation.values.get("--trust-remote-code") is not True:
        return Decision()
    reason = "code from the same commit as the weights"
    return Decision({"--code-revision": Choice(revision.value, revision.source, reason)})


def _local_files(situation: Situation) -> Decision:
    """Folders of a draft and a tokenizer that were fetched."""
    others, found = situation.parts.local.others, situation.flags
    chosen: Choices = {}
    for flag, name in on_hub(found).items():
        if name in others:
            path = str(others[name])
            value = {"model": path} if flag == "--speculative-config" else path
            chosen[flag] = Choice(value, found[flag].source, found[flag].reason)
    return Decision(at(Layer.LIMIT, chosen))


DECIDERS: tuple[Decider, ...] = (
    _tensor_parallel,
    _cloverlm,
    _topology,
    weigh_risks,
    yield_to_our_kernels,
    _linear_kernel,
    _quantized_layers,
    _load_check,
    _memory,
    _startup,
    _code_revision,
    _local_files,
)


# --- the plan ---


def _assemble(situation: Situation) -> Plan:
    parts, flags, memory = situation.served, situation.flags, situation.memory
    settings = parts.loaded.settings
    assert memory is not None
    cache = settings.cache_dir or cache_dir(parts.accepted.environ)
    alias = choose_alias(
        parts.hardware,
        parts.target,
        parts.checkpoint,
        parts.tuned_configs,
        situation.values,
        cache,
    )
    caches = plan_caches(
        cache,
        parts.build,
        parts.vllm,
        parts.target,
        parts.hardware,
        parts.checkpoint,
        model_argument(parts),
        flags,
    )
    env = decide_environment(situation, caches, alias, cache)
    if alias and env[TUNED_CONFIG_FOLDER].value != str(alias.folder):
        alias = None  # the user has set another folder
    return Plan(
        model=model_argument(parts),
        served_names=served_names(parts),
        target=parts.target,
        hardware=parts.hardware,
        checkpoint=parts.checkpoint,
        checkpoint_note=parts.checkpoint_note,
        recipe=parts.recipe,
        settings=settings,
        choices=_choices(situation),
        args=flags,
        env=env,
        rules=tuple(rule.id for rule in situation.rules),
        notices=(*_notices(situation), *situation.notices),
        budget=memory.budget,
        ladder=memory.ladder,
        bound=make_bound(parts.target, parts.hardware, parts.checkpoint, situation.tensor_parallel),
        moe_alias=alias,
        topology=situation.topology,
        caches=caches,
    )


def _choices(situation: Situation) -> Choices:
    """What nibble decides beside vLLM's flags."""
    parts = situation.served
    settings, origins = parts.loaded.settings, parts.loaded.origins
    reasons = {"host": "the image listens on all addresses" if settings.host == "0.0.0.0" else ""}
    shown = ("model", "host", "port", "control_port", "drain_seconds", "allow_anonymous")
    found: Choices = {
        name: Choice(getattr(settings, name), str(origins[name]), reasons.get(name, ""))
        for name in shown
    }
    found = {"target": parts.target_choice, **found, "recipe": _recipe_choice(parts)}
    if situation.linear_kernel is not None:
        found["linear_kernel"] = situation.linear_kernel
    return {**found, "reference": choose_reference(parts, situation.flags)}


def _recipe_choice(parts: Ingredients) -> Choice:
    if parts.loaded.settings.recipe == "off":
        return Choice("off", str(parts.loaded.origins["recipe"]), "recipes are off")
    recipe = parts.recipe
    if recipe is None:
        reason = "this model has no recipe: target and vLLM decide"
        return Choice(None, OURS, reason)
    reason = f"{recipe.status} on {parts.target.name}: {recipe.evidence}".rstrip(": ")
    return Choice(recipe.id, "recipes/", reason)


def _notices(situation: Situation) -> tuple[str, ...]:
    parts = situation.parts
    notices = [*parts.accepted.notices, *parts.loaded.notices]
    dtype = str(situation.values.get("--kv-cache-dtype", ""))
    if dtype in TURBOQUANT_COST:
        notices.append(
            f"KV cache {dtype} costs quality: {TURBOQUANT_COST[dtype]} (vLLM's own figures for"
            " Qwen3-4B)"
        )
    if parts.recipe is not None:
        notices += parts.recipe.notes
    if parts.checkpoint is not None:
        notices += parts.checkpoint.scheme.notes
    if parts.hardware.assumed:
        notices.append(f"{parts.target.name} is not this machine: memory and GPUs are assumed")
    return tuple(notices)

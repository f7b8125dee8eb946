"""(settings, hardware, checkpoint, recipe, target) -> Plan.

The deciders run in the order of one tuple and read a frozen situation. Nothing else sets a flag.
Refusals run after the last decider, on the flags that vLLM gets, so a value is refused in the same
way from a user, a rule or a recipe. This module reads no file, opens no socket and does not import
vllm.
"""

from __future__ import annotations

from nibble.machine.paths import cache_dir
from nibble.plan.applications import compact_json_flags, tool_flags
from nibble.plan.attention import attention_flags, choose_attention
from nibble.plan.attention_front import choose_attention_front
from nibble.plan.attention_kernel import attention_kernel_flags, check_attention
from nibble.plan.budget import make_bound, memory_bytes, weights_bytes_per_gpu
from nibble.plan.choice import OURS, Choice, Choices, Layer, at
from nibble.plan.compile_cache import plan_caches
from nibble.plan.cpu_engine import layer_operators, prompt_chunk
from nibble.plan.draft_head import choose_draft_head
from nibble.plan.e4m3_linear import NAME as E4M3_LINEAR
from nibble.plan.e4m3_linear import choose_e4m3_linear
from nibble.plan.environment import decide_environment, on_hub
from nibble.plan.expert_kernel import check_experts, choose_expert_kernel, expert_kernel_flags
from nibble.plan.inputs import PlanInputs
from nibble.plan.layers import read_layers
from nibble.plan.leading_head import bytes_not_read
from nibble.plan.linear_attention import choose_linear_attention
from nibble.plan.linear_kernel import choose_linear_kernel, linear_kernel_flags
from nibble.plan.load_check import load_check_flags, load_check_notices
from nibble.plan.memory import plan_memory
from nibble.plan.models.cloverlm import cloverlm_flags
from nibble.plan.models.gemma4 import check_gemma4
from nibble.plan.moe_tuning import VARIABLE as TUNED_CONFIG_FOLDER
from nibble.plan.moe_tuning import choose_alias
from nibble.plan.nvfp4_options import check_is_object, check_nvfp4_options, option_flags
from nibble.plan.one_order import check_one_order
from nibble.plan.our_kernels import yield_to_our_kernels
from nibble.plan.plan import Plan
from nibble.plan.quantized_layers import quantization_override
from nibble.plan.reference import choose_reference
from nibble.plan.rules import refuse_known_risks, weigh_risks
from nibble.plan.server import model_argument, served_names
from nibble.plan.shared_expert import choose_shared_expert
from nibble.plan.situation import Decider, Decision, Situation
from nibble.plan.startup import fast_start_flags
from nibble.plan.state_blocks import limit_sequences
from nibble.plan.step_graph import captures_prompts, choose_step_graph
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


def make_plan(inputs: PlanInputs) -> Plan:
    """Decide every flag and variable, then refuse what cannot work. Raises NibbleError for
    contradictions.
    """
    settings = inputs.loaded.settings
    check_request(settings)
    check_recipe(inputs.recipe, inputs.target)
    situation = resolve(inputs)
    check(situation)
    return _assemble(situation)


def resolve(inputs: PlanInputs) -> Situation:
    """Read the layers and apply each decider in order."""
    situation = Situation(inputs, read_layers(inputs))
    check_is_object(situation.values)
    for decide in DECIDERS:
        situation = situation.after(decide(situation))
    return situation


def check(situation: Situation) -> None:
    """Refuse what cannot work with the final flags. Raises NibbleError."""
    inputs, served, values = situation.inputs, situation.served, situation.values
    check_nvfp4_options(inputs.checkpoint, inputs.target, situation.flags)
    check_experts(served, values)
    check_attention(served, values)
    check_gemma4(
        inputs.loaded.settings, inputs.target, served.checkpoint, values, inputs.can_compile
    )
    check_api(values, inputs.environ, situation.topology)
    refuse_known_risks(situation)
    check_one_order(served, values)


# --- deciders: each returns the flags and notices that it adds ---


def _tensor_parallel(situation: Situation) -> Decision:
    """If unset: the number of GPUs in the recipe's evidence, else the smallest number that holds
    the weights, else one.
    """
    inputs, args = situation.inputs, situation.flags
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size")
    if any(size in args for size in sizes) or inputs.target.device == "cpu":
        return Decision()
    gpus_here = len(inputs.hardware.gpus) // replicas_here(situation.values)
    reported = inputs.recipe.gpus if inputs.recipe else None
    if reported and 1 < reported <= gpus_here:
        choice = Choice(reported, "recipe", f"the evidence is for {reported} GPUs", Layer.RECIPE)
        return Decision({"--tensor-parallel-size": choice})
    total, _ = memory_bytes(inputs.target, inputs.hardware)
    heads = inputs.checkpoint.num_attention_heads if inputs.checkpoint else None
    for gpus in (1, 2, 4, 8, 16):
        weights = weights_bytes_per_gpu(inputs.checkpoint, gpus)
        if weights is None or total is None or not heads or gpus > gpus_here or heads % gpus:
            break
        if weights < total * 0.85:  # the rest is for KV cache, graphs and workspaces
            reason = f"{weights / GIB:.1f} GiB of weights on each GPU of {total / GIB:.1f} GiB"
            chosen = {"--tensor-parallel-size": Choice(gpus, OURS, reason)}
            return Decision(chosen if gpus > 1 else {})
    return Decision()


def _cloverlm(situation: Situation) -> Decision:
    return Decision(cloverlm_flags(situation.inputs.checkpoint, situation.flags))


def _topology(situation: Situation) -> Decision:
    flags = topology_flags(situation.topology)
    check_parallel(
        situation.inputs.checkpoint,
        situation.inputs.hardware,
        situation.inputs.target,
        situation.tensor_parallel,
        situation.topology,
    )
    return Decision({name: Choice(value, OURS, why) for name, (value, why) in flags.items()})


def _e4m3_linear(situation: Situation) -> Decision:
    kernels = choose_e4m3_linear(situation.served, situation.flags)
    return Decision(
        option_flags(E4M3_LINEAR, kernels.choice, situation.flags, "nibble"),
        notices=kernels.notices,
        e4m3_kernels=kernels,
    )


def _linear_kernel(situation: Situation) -> Decision:
    kernels = choose_linear_kernel(situation.served, situation.flags)
    return Decision(
        linear_kernel_flags(kernels, situation.flags),
        notices=kernels.notices,
        linear_kernels=kernels,
    )


def _expert_kernel(situation: Situation) -> Decision:
    kernels = choose_expert_kernel(situation.served, situation.flags)
    return Decision(
        expert_kernel_flags(kernels, situation.flags),
        notices=kernels.notices,
        expert_kernels=kernels,
    )


def _draft_head(situation: Situation) -> Decision:
    kernel = situation.linear_kernels.choice
    chosen = choose_draft_head(situation.inputs, situation.flags, kernel)
    return Decision(option_flags("draft_head", chosen, situation.flags, "nvfp4"), draft_head=chosen)


def _step_graph(situation: Situation) -> Decision:
    chosen = choose_step_graph(situation.inputs, situation.flags)
    return Decision(option_flags("step_graph", chosen, situation.flags), step_graph=chosen)


def _attention(situation: Situation) -> Decision:
    ours = attention_kernel_flags(situation.inputs, situation.flags)
    flags = situation.flags.add(ours)
    chosen = choose_attention(situation.inputs, flags, situation.step_graph)
    return Decision({**ours, **attention_flags(chosen, flags)}, attention=chosen)


def _attention_front(situation: Situation) -> Decision:
    chosen = choose_attention_front(situation.inputs, situation.flags)
    return Decision(
        option_flags("attention_front", chosen, situation.flags), attention_front=chosen
    )


def _linear_attention(situation: Situation) -> Decision:
    chosen = choose_linear_attention(situation.inputs, situation.flags)
    return Decision(
        option_flags("linear_attention", chosen, situation.flags), linear_attention=chosen
    )


def _shared_expert(situation: Situation) -> Decision:
    chosen = choose_shared_expert(situation.inputs, situation.flags)
    return Decision(option_flags("shared_expert", chosen, situation.flags), shared_expert=chosen)


def _quantized_layers(situation: Situation) -> Decision:
    return Decision(quantization_override(situation.inputs.checkpoint, situation.flags))


def _load_check(situation: Situation) -> Decision:
    checkpoint = situation.inputs.checkpoint
    flags = load_check_flags(checkpoint, situation.flags)
    notices = load_check_notices(checkpoint, situation.flags.add(flags))
    return Decision(flags, notices=notices)


def _layer_operators(situation: Situation) -> Decision:
    return Decision(layer_operators(situation.served, situation.flags))


def _prompt_chunk(situation: Situation) -> Decision:
    return Decision(prompt_chunk(situation.served, situation.flags))


def _memory(situation: Situation) -> Decision:
    # First refuse a KV cache that this model cannot have: the arithmetic does not know its size.
    check_model(situation.inputs.checkpoint, situation.inputs.target, situation.values)
    memory = plan_memory(situation.served, situation.flags, situation.topology)
    return Decision(memory.flags, memory=memory)


def _startup(situation: Situation) -> Decision:
    prompts = captures_prompts(situation.inputs.checkpoint, situation.flags)
    return Decision(fast_start_flags(situation.served, situation.flags, captures_prompts=prompts))


def _applications(situation: Situation) -> Decision:
    flags = situation.flags
    return Decision(
        {**tool_flags(situation.inputs.chat_template, flags), **compact_json_flags(flags)}
    )


def _code_revision(situation: Situation) -> Decision:
    revision = situation.flags.get("--revision")
    if revision is None or situation.values.get("--trust-remote-code") is not True:
        return Decision()
    reason = "code from the same commit as the weights"
    return Decision({"--code-revision": Choice(revision.value, revision.source, reason)})


def _local_files(situation: Situation) -> Decision:
    """Replace Hub ids of a draft and a tokenizer by the folders that were fetched."""
    folders, flags = situation.inputs.local.others, situation.flags
    chosen: Choices = {}
    for flag, name in on_hub(flags).items():
        if name in folders:
            path = str(folders[name])
            value = {"model": path} if flag == "--speculative-config" else path
            chosen[flag] = Choice(value, flags[flag].source, flags[flag].reason)
    return Decision(at(Layer.LIMIT, chosen))


DECIDERS: tuple[Decider, ...] = (
    _tensor_parallel,
    _cloverlm,
    _topology,
    weigh_risks,
    yield_to_our_kernels,
    _e4m3_linear,  # before the plan names a kernel of NVFP4 layers
    _linear_kernel,
    _expert_kernel,
    _draft_head,
    _step_graph,
    _attention,
    _attention_front,
    _linear_attention,
    _shared_expert,
    _quantized_layers,
    _load_check,
    _layer_operators,
    _prompt_chunk,
    _memory,
    limit_sequences,
    _startup,
    _applications,
    _code_revision,
    _local_files,
)


# --- the plan ---


def _assemble(situation: Situation) -> Plan:
    inputs, flags, memory = situation.served, situation.flags, situation.memory
    settings = inputs.loaded.settings
    assert memory is not None
    cache = settings.cache_dir or cache_dir(inputs.accepted.environ)
    alias = choose_alias(
        inputs.hardware,
        inputs.target,
        inputs.checkpoint,
        inputs.tuned_configs,
        situation.values,
        cache,
    )
    caches = plan_caches(
        cache,
        inputs.build,
        inputs.vllm,
        inputs.target,
        inputs.hardware,
        inputs.checkpoint,
        model_argument(inputs),
        flags,
    )
    env = decide_environment(situation, caches, alias, cache)
    if alias and env[TUNED_CONFIG_FOLDER].value != str(alias.folder):
        alias = None  # the user set another folder
    return Plan(
        model=model_argument(inputs),
        served_names=served_names(inputs),
        target=inputs.target,
        hardware=inputs.hardware,
        checkpoint=inputs.checkpoint,
        checkpoint_note=inputs.checkpoint_note,
        recipe=inputs.recipe,
        settings=settings,
        choices=_choices(situation),
        args=flags,
        env=env,
        rules=tuple(rule.id for rule in situation.rules),
        notices=(*_notices(situation), *situation.notices),
        budget=memory.budget,
        ladder=memory.ladder,
        bound=make_bound(
            inputs.target,
            inputs.hardware,
            inputs.checkpoint,
            situation.tensor_parallel,
            bytes_not_read(inputs, flags),
        ),
        moe_alias=alias,
        topology=situation.topology,
        caches=caches,
        linear_kernels=situation.linear_kernels,
        expert_kernels=situation.expert_kernels,
        e4m3_kernels=situation.e4m3_kernels,
    )


def _choices(situation: Situation) -> Choices:
    """What nibble decides besides vLLM's flags."""
    inputs = situation.served
    settings, origins = inputs.loaded.settings, inputs.loaded.origins
    reasons = {"host": "the image listens on all addresses" if settings.host == "0.0.0.0" else ""}
    shown = ("model", "host", "port", "control_port", "drain_seconds", "allow_anonymous")
    choices: Choices = {
        name: Choice(getattr(settings, name), str(origins[name]), reasons.get(name, ""))
        for name in shown
    }
    choices = {"target": inputs.target_choice, **choices, "recipe": _recipe_choice(inputs)}
    if (linear_kernel := situation.linear_kernels.choice) is not None:
        choices["linear_kernel"] = linear_kernel
    if (e4m3_linear := situation.e4m3_kernels.choice) is not None:
        choices["e4m3_linear"] = e4m3_linear
    if (expert_kernel := situation.expert_kernels.choice) is not None:
        choices["moe_kernel"] = expert_kernel
    if situation.draft_head is not None:
        choices["draft_head"] = situation.draft_head
    if situation.step_graph is not None:
        choices["step_graph"] = situation.step_graph
    if situation.attention is not None:
        choices["attention"] = situation.attention
    if situation.attention_front is not None:
        choices["attention_front"] = situation.attention_front
    if situation.linear_attention is not None:
        choices["linear_attention"] = situation.linear_attention
    if situation.shared_expert is not None:
        choices["shared_expert"] = situation.shared_expert
    return {**choices, "reference": choose_reference(inputs, situation.flags)}


def _recipe_choice(inputs: PlanInputs) -> Choice:
    if inputs.loaded.settings.recipe == "off":
        return Choice("off", str(inputs.loaded.origins["recipe"]), "recipes are off")
    recipe = inputs.recipe
    if recipe is None:
        reason = "this model has no recipe: target and vLLM decide"
        return Choice(None, OURS, reason)
    reason = f"{recipe.status} on {inputs.target.name}: {recipe.evidence}".rstrip(": ")
    return Choice(recipe.id, "recipes/", reason)


def _notices(situation: Situation) -> tuple[str, ...]:
    inputs = situation.inputs
    notices = [*inputs.accepted.notices, *inputs.loaded.notices, *inputs.trial_notes]
    dtype = str(situation.values.get("--kv-cache-dtype", ""))
    if dtype in TURBOQUANT_COST:
        notices.append(
            f"KV cache {dtype} costs quality: {TURBOQUANT_COST[dtype]} (vLLM's own figures for"
            " Qwen3-4B)"
        )
    if inputs.recipe is not None:
        notices += inputs.recipe.notes
    if inputs.checkpoint is not None:
        notices += inputs.checkpoint.scheme.notes
    if inputs.hardware.assumed:
        notices.append(f"{inputs.target.name} is not this machine: memory and GPUs are assumed")
    return tuple(notices)

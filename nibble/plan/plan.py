"""The plan: every value nibble will use, where it came from and why. Pure.

(settings, hardware, checkpoint, recipe, target) -> Plan. Nothing here reads a file, opens a socket
or imports vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.engine.flags import write_flag
from nibble.machine.hardware import Hardware
from nibble.machine.paths import cache_dir
from nibble.machine.targets import Target
from nibble.plan.budget import (
    Budget,
    DecodeBound,
    host_reserve_bytes,
    make_bound,
    memory_bytes,
    weights_bytes_per_gpu,
)
from nibble.plan.compile_cache import CachePlan, cache_environment, is_nobodys_wish, plan_caches
from nibble.plan.guard_limits import limits_environment
from nibble.plan.layers import Choice, Choices, Ingredients, join_layers
from nibble.plan.linear_kernel import choose_linear_kernel, linear_kernel_flags
from nibble.plan.load_check import load_check_flags, load_check_notices
from nibble.plan.memory import Limits, Step, limits, plan_memory
from nibble.plan.models.cloverlm import cloverlm_flags
from nibble.plan.models.gemma4 import check_gemma4
from nibble.plan.moe_tuning import VARIABLE as TUNED_CONFIG_FOLDER
from nibble.plan.moe_tuning import Alias, choose_alias
from nibble.plan.nvfp4_options import check_nvfp4_options, with_served_activations
from nibble.plan.one_order import check_one_order
from nibble.plan.quantized_layers import quantization_override
from nibble.plan.reference import choose_reference
from nibble.plan.rules import Risks, rule_environment, weigh_risks
from nibble.plan.shared_memory import queue_environment
from nibble.plan.startup import fast_start_environment, fast_start_flags
from nibble.plan.topology import Topology, find_topology, replicas_here, topology_flags
from nibble.plan.validate import (
    TURBOQUANT_COST,
    check_api,
    check_model,
    check_parallel,
    check_recipe,
    check_request,
)
from nibble.recipes.recipe import ResolvedRecipe
from nibble.settings.options import Settings, options

GIB = 1 << 30

# model_hosting_container_standards, a dependency of vLLM, puts code these name outside the gate.
WRAPPING_PREFIXES = (
    "CUSTOM_FASTAPI_",
    "CUSTOM_PRE_PROCESS",
    "CUSTOM_POST_PROCESS",
    "CUSTOM_SCRIPT_FILENAME",
)


@dataclass(frozen=True)
class Plan:
    """What `nibble serve` will do; `nibble plan` prints it."""

    model: str
    served_names: tuple[str, ...]
    target: Target
    hardware: Hardware
    checkpoint: Checkpoint | None
    checkpoint_note: str
    recipe: ResolvedRecipe | None
    settings: Settings
    choices: Mapping[str, Choice]
    args: Mapping[str, Choice]
    env: Mapping[str, Choice]
    rules: tuple[str, ...]
    notices: tuple[str, ...]
    budget: Budget
    ladder: tuple[Step, ...]
    bound: DecodeBound
    moe_alias: Alias | None
    topology: Topology
    caches: CachePlan

    @property
    def revision(self) -> str | None:
        """The commit, branch or tag to fetch."""
        found = self.args.get("--revision")
        return str(found.value) if found else None

    @property
    def memory_limits(self) -> Limits:
        """Where the watchdog acts."""
        asked = self.settings.memory_reserve_gib
        asked_bytes = None if asked is None else int(asked * GIB)
        return limits(
            host_reserve_bytes(self.target, self.hardware.memory_total_bytes, asked_bytes)
        )

    def argv(self) -> list[str]:
        """Words after `vllm`, without any secret."""
        words = ["serve", self.model]
        on_disk = self.checkpoint is not None and self.checkpoint.path is not None
        for name, choice in self.args.items():
            if not (
                on_disk and name in ("--revision", "--code-revision")
            ):  # a folder has no revisions
                words += write_flag(name, choice.value)
        return words

    def vllm_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of the vLLM process: what the user has, without secrets and names that
        are ours alone.
        """
        withheld = {"VLLM_EXTRA_ARGS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
        for option in options().values():
            if option.secret:
                withheld |= set(option.env) | {f"{name}_FILE" for name in option.env}
        kept = {
            name: value
            for name, value in environ.items()
            if name not in withheld and not name.startswith(WRAPPING_PREFIXES)
        }
        if may_need_the_hub(self.args) and self.settings.hf_token is not None:
            kept["HF_TOKEN"] = self.settings.hf_token.get_secret_value()
        return kept | {name: str(choice.value) for name, choice in self.env.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json and /status; holds no secret."""
        return {
            "model": self.model,
            "served_names": list(self.served_names),
            "target": self.target.name,
            "recipe": _describe_recipe(self.recipe),
            "checkpoint": describe_checkpoint(self.checkpoint, self.checkpoint_note),
            "topology": self.topology.to_json(),
            "choices": {name: choice.to_json() for name, choice in self.choices.items()},
            "args": {name: choice.to_json() for name, choice in self.args.items()},
            "env": {name: choice.to_json() for name, choice in self.env.items()},
            "budget": self.budget.to_json(),
            "memory_limits": asdict(self.memory_limits),
            "to_need_less": [str(step) for step in self.ladder],
            "decode_bound": self.bound.to_json(),
            "expected": dict(self.recipe.expected) if self.recipe else {},
            "rules": list(self.rules),
            "notices": list(self.notices),
            "cache_entries": [key.name for key in self.caches.keys],
            "command": ["vllm", *self.argv()],
        }  # fmt: skip


def may_need_the_hub(args: Mapping[str, Choice]) -> bool:
    """Whether a flag may name a further repository, which only vLLM knows how to read.

    --code-revision is none: the model is a folder when vLLM starts, and `Plan.argv` drops its
    revisions.
    """
    return any(
        flag in args for flag in ("--lora-modules", "--hf-config-path", "--tokenizer-revision")
    )


def _describe_recipe(recipe: ResolvedRecipe | None) -> dict[str, Any] | None:
    return recipe and {"id": recipe.id, "status": recipe.status, "evidence": recipe.evidence}


def describe_checkpoint(checkpoint: Checkpoint | None, note: str) -> dict[str, Any]:
    """The checkpoint as plain data; without one, only why."""
    if checkpoint is None:
        return {"note": note}
    weights = checkpoint.weights
    return {
        "id": checkpoint.id,
        "revision": checkpoint.revision,
        "architecture": checkpoint.architecture,
        "scheme": checkpoint.scheme.name,
        "max_model_len": checkpoint.max_model_len,
        "weights_bytes": weights.total_bytes if weights else None,
        "weights_bytes_by_kind": dict(weights.bytes_by_kind) if weights else None,
        "parameters": weights.parameters if weights else None,
        "active_parameters": weights.active_parameters if weights else None,
        "decode_bytes_per_step": weights.decode_bytes_per_step if weights else None,
    }


def make_plan(parts: Ingredients) -> Plan:
    """Join the layers, check what cannot work, and do the arithmetic. Raises NibbleError for
    contradictions.
    """
    settings = parts.loaded.settings
    check_request(settings)
    check_recipe(parts.recipe, parts.target)
    args = join_layers(parts)
    args |= _tensor_parallel(parts, args)
    args |= cloverlm_flags(parts.checkpoint, args)
    values = {name: choice.value for name, choice in args.items()}
    check_model(parts.checkpoint, parts.target, values)
    check_nvfp4_options(parts.checkpoint, parts.target, values)
    parts = replace(parts, checkpoint=with_served_activations(parts.checkpoint, values))
    check_gemma4(settings, parts.target, parts.checkpoint, values, parts.can_compile)
    tensor = int(values.get("--tensor-parallel-size", 1))
    gpus_here = len(parts.hardware.gpus) if parts.target.device == "cuda" else None
    topology = find_topology(settings, values, gpus_here)
    flags = topology_flags(topology)
    args = {
        name: Choice(value, "nibble's default", why) for name, (value, why) in flags.items()
    } | args
    check_api(values, parts.environ, topology)
    check_parallel(parts.checkpoint, parts.hardware, parts.target, tensor, topology)
    risks = weigh_risks(parts, args, tensor)
    args |= risks.args
    values |= {name: choice.value for name, choice in risks.args.items()}
    check_one_order(parts, values)
    kernel = choose_linear_kernel(parts, args)
    args |= linear_kernel_flags(kernel, args)
    args |= quantization_override(parts.checkpoint, args)
    args |= load_check_flags(parts.checkpoint, args)
    memory = plan_memory(parts, args, topology)
    args |= memory.flags
    args |= fast_start_flags(parts, args)
    if "--revision" in args and values.get("--trust-remote-code") is True:
        args["--code-revision"] = Choice(
            args["--revision"].value,
            args["--revision"].source,
            "code from the same commit as the weights",
        )
    served = _served_names(parts)
    args = _server_flags(parts, served) | args
    cache = settings.cache_dir or cache_dir(parts.accepted.environ)
    moe_alias = choose_alias(
        parts.hardware, parts.target, parts.checkpoint, parts.tuned_configs, values, cache
    )
    caches = plan_caches(
        cache,
        parts.build,
        parts.vllm,
        parts.target,
        parts.hardware,
        parts.checkpoint,
        _model_argument(parts),
        args,
    )
    chosen = cache_environment(caches, parts.target) | queue_environment(parts, args, topology)
    env = _environment(parts, moe_alias, risks, cache, chosen, args)
    if moe_alias and env[TUNED_CONFIG_FOLDER].value != str(moe_alias.folder):
        moe_alias = None  # the user has a folder of their own
    return Plan(
        model=_model_argument(parts),
        served_names=served,
        target=parts.target,
        hardware=parts.hardware,
        checkpoint=parts.checkpoint,
        checkpoint_note=parts.checkpoint_note,
        recipe=parts.recipe,
        settings=settings,
        choices=_choices(parts)
        | ({"linear_kernel": kernel} if kernel else {})
        | {"reference": choose_reference(parts, args)},
        args=args,
        env=env,
        rules=tuple(rule.id for rule in risks.rules),
        notices=_notices(parts, values)
        + risks.notices
        + load_check_notices(parts.checkpoint, args),
        budget=memory.budget,
        ladder=memory.ladder,
        bound=make_bound(parts.target, parts.hardware, parts.checkpoint, tensor),
        moe_alias=moe_alias,
        topology=topology,
        caches=caches,
    )


def _model_argument(parts: Ingredients) -> str:
    checkpoint = parts.checkpoint
    return (
        str(checkpoint.path) if checkpoint and checkpoint.path else str(parts.loaded.settings.model)
    )


def _tensor_parallel(parts: Ingredients, args: Choices) -> Choices:
    """Where nobody says: what the recipe's evidence used, else as many GPUs as the weights need,
    else one.
    """
    if (
        "--tensor-parallel-size" in args
        or "--pipeline-parallel-size" in args
        or parts.target.device == "cpu"
    ):
        return {}
    here = len(parts.hardware.gpus) // replicas_here(
        {name: choice.value for name, choice in args.items()}
    )
    reported = parts.recipe.gpus if parts.recipe else None
    if reported and 1 < reported <= here:
        return {
            "--tensor-parallel-size": Choice(
                reported, "recipe", f"the evidence is for {reported} GPUs"
            )
        }  # type: ignore[union-attr]
    total, _ = memory_bytes(parts.target, parts.hardware)
    heads = parts.checkpoint.num_attention_heads if parts.checkpoint else None
    for gpus in (1, 2, 4, 8, 16):
        weights = weights_bytes_per_gpu(parts.checkpoint, gpus)
        if weights is None or total is None or not heads or gpus > here or heads % gpus:
            break
        if weights < total * 0.85:  # the rest is for KV cache, graphs and workspaces
            reason = f"{weights / GIB:.1f} GiB of weights a GPU of {total / GIB:.1f} GiB"
            return (
                {"--tensor-parallel-size": Choice(gpus, "nibble's default", reason)}
                if gpus > 1
                else {}
            )
    return {}


def _served_names(parts: Ingredients) -> tuple[str, ...]:
    model = str(parts.loaded.settings.model)
    name = Path(model).resolve().name if parts.checkpoint and parts.checkpoint.is_local else model
    extra = parts.loaded.settings.served_model_name
    return tuple(dict.fromkeys([*([extra] if extra else []), name, "default"]))


def _server_flags(parts: Ingredients, served: tuple[str, ...]) -> Choices:
    """Flags nibble owns; first in the command so that they are easy to find."""
    settings, origins = parts.loaded.settings, parts.loaded.origins
    gate = "answers nobody without the key, before ready or while draining"
    return {
        "--served-model-name": Choice(
            list(served), "nibble's default", "every model answers to its id and to `default`"
        ),
        "--host": Choice(settings.host, str(origins["host"])),
        "--port": Choice(settings.port, str(origins["port"])),
        "--middleware": Choice("nibble.engine.gate.asgi.Gate", "nibble's default", gate),
        "--shutdown-timeout": Choice(
            settings.drain_seconds,
            str(origins["drain_seconds"]),
            "running requests finish after SIGTERM",
        ),
    }


def _environment(
    parts: Ingredients,
    moe_alias: Alias | None,
    risks: Risks,
    cache: Path,
    chosen: Choices,
    args: Mapping[str, Choice],
) -> Choices:
    """Variables for vLLM: a user's own value wins over recipe, known risk and target."""
    quiet = "no usage statistics leave this machine"
    env: Choices = {
        name: Choice("1", "nibble's default", quiet)
        for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
    }
    if (
        parts.checkpoint is not None
        and not parts.checkpoint.is_local
        and parts.checkpoint.path is not None
    ):
        env["HF_HUB_OFFLINE"] = Choice(
            "1", "nibble's default", "the model is on disk: nothing is looked up while serving"
        )
    if moe_alias is not None:
        env[TUNED_CONFIG_FOLDER] = Choice(
            str(moe_alias.folder), "nibble's default", moe_alias.reason
        )
    if parts.loaded.settings.debug:
        env["VLLM_LOGGING_LEVEL"] = Choice(
            "DEBUG", str(parts.loaded.origins["debug"]), "verbose logs"
        )
    if parts.without_cpp_compiler:
        why = "no C++ compiler is here, and vLLM compiles what log-probs need in eager mode, too"
        env["TORCHDYNAMO_DISABLE"] = Choice("1", "nibble's default", why)
    env |= chosen | fast_start_environment(parts.target, args)
    env |= limits_environment(parts.loaded, parts.checkpoint)
    for name, default in parts.target.env.items():
        env[name] = Choice(
            default.value, f"target {parts.target.name}", f"{default.reason} ({default.evidence})"
        )
    env |= rule_environment(risks.rules)
    if parts.recipe is not None:
        env |= {
            name: Choice(value, "recipe", parts.recipe.origins.get(name, ""))
            for name, value in parts.recipe.env.items()
        }
    env |= {
        name: Choice(value, str(parts.loaded.settings.config))
        for name, value in parts.loaded.file_env.items()
    }
    in_image = "NIBBLE_IMAGE" in parts.accepted.environ
    for name in env:
        given = parts.accepted.environ.get(name)
        if given is not None and not is_nobodys_wish(name, given, cache, in_image):
            env[name] = Choice(given, f"environment {name}")
    return env


def _choices(parts: Ingredients) -> Choices:
    """What is nibble's own to decide, beside the vLLM flags."""
    settings, origins = parts.loaded.settings, parts.loaded.origins
    reasons: dict[str, str] = {
        "host": "the image listens on all addresses" if settings.host == "0.0.0.0" else ""
    }
    shown = ("model", "host", "port", "control_port", "drain_seconds", "allow_anonymous")
    found = {
        name: Choice(getattr(settings, name), str(origins[name]), reasons.get(name, ""))
        for name in shown
    }
    recipe = Choice(
        None,
        "nibble's default",
        "no recipe is known for this model: vLLM decides what the target does not",
    )
    if settings.recipe == "off":
        recipe = Choice("off", str(origins["recipe"]), "recipes are switched off")
    elif parts.recipe is not None:
        recipe = Choice(
            parts.recipe.id,
            "recipes/",
            f"{parts.recipe.status} on {parts.target.name}: {parts.recipe.evidence}".rstrip(": "),
        )
    return {"target": parts.target_choice, **found, "recipe": recipe}


def _notices(parts: Ingredients, values: Mapping[str, Any]) -> tuple[str, ...]:
    notices = [*parts.accepted.notices, *parts.loaded.notices]
    dtype = str(values.get("--kv-cache-dtype", ""))
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

"""Variables for vLLM, each with its source. The user's value wins. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nibble.hub.access import is_model_id
from nibble.plan.choice import OURS, Choice, Choices, Flags, Layer, at
from nibble.plan.compile_cache import CachePlan, cache_environment, is_preset_folder
from nibble.plan.cpu_engine import cpu_environment
from nibble.plan.guard_limits import limits_environment
from nibble.plan.inputs import PlanInputs
from nibble.plan.moe_tuning import VARIABLE as TUNED_CONFIG_FOLDER
from nibble.plan.moe_tuning import Alias
from nibble.plan.rules import rule_environment
from nibble.plan.shared_memory import queue_environment
from nibble.plan.situation import Situation
from nibble.plan.startup import fast_start_environment

# Flags that may name another repository, which only vLLM resolves. --code-revision is not among
# them: vLLM gets the model as a folder, and `Plan.argv` drops revisions.
_NEED_THE_HUB = ("--lora-modules", "--hf-config-path", "--tokenizer-revision")


def decide_environment(
    situation: Situation, caches: CachePlan, alias: Alias | None, cache: Path
) -> Flags:
    """Name -> choice, for every variable that nibble, a target, a rule, a recipe or the user's TOML
    sets. The user's environment overrules them.
    """
    inputs, args = situation.served, situation.flags
    env = Flags()
    for layer, choices in (
        (Layer.NIBBLE, _quiet()),
        (Layer.NIBBLE, _offline(inputs, args)),
        (Layer.NIBBLE, _tuned_configs(alias)),
        (Layer.NIBBLE, _logging(inputs)),
        (Layer.NIBBLE, _without_compiler(inputs)),
        (Layer.NIBBLE, cache_environment(caches, inputs.target)),
        (Layer.NIBBLE, queue_environment(inputs, args, situation.topology)),
        (Layer.NIBBLE, fast_start_environment(inputs.target, args)),
        (Layer.NIBBLE, cpu_environment(inputs, args, situation.topology)),
        (Layer.NIBBLE, limits_environment(inputs.loaded, inputs.checkpoint)),
        (Layer.TARGET, _of_target(inputs)),
        (Layer.RECIPE, _of_recipe(inputs)),
        (Layer.RULE, rule_environment(situation.rules, inputs.recipe)),
        (Layer.FILE, _of_file(inputs)),
    ):
        env = env.add(at(layer, choices))
    return env.add(at(Layer.ENVIRONMENT, _of_user(inputs, env, cache)))


def may_need_the_hub(args: Mapping[str, Choice]) -> bool:
    """Whether vLLM may need the Hub although every file that nibble knows of is on disk."""
    return any(flag in args for flag in _NEED_THE_HUB)


def on_hub(args: Mapping[str, Choice]) -> dict[str, str]:
    """Flag -> Hub id, for a draft and a tokenizer that are on the Hub."""
    config = args["--speculative-config"].value if "--speculative-config" in args else None
    tokenizer = args["--tokenizer"].value if "--tokenizer" in args else None
    names = {
        "--speculative-config": config.get("model") if isinstance(config, Mapping) else None,
        "--tokenizer": tokenizer,
    }
    return {flag: str(name) for flag, name in names.items() if _is_on_hub(str(name or ""))}


def _is_on_hub(name: str) -> bool:
    # A draft may also name a method, such as ngram; a model's id has an organisation.
    return "/" in name and is_model_id(name) and not Path(name).is_dir()


def _quiet() -> Choices:
    reason = "no usage statistics leave this machine"
    return dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), Choice("1", OURS, reason))


def _offline(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choices:
    if inputs.local:
        if may_need_the_hub(args):
            return {}
        reason = "all files of this plan are on disk and verified"
        return {"HF_HUB_OFFLINE": Choice("1", OURS, reason)}
    checkpoint = inputs.checkpoint
    if checkpoint is None or checkpoint.is_local or checkpoint.path is None:
        return {}
    reason = "the model is on disk: the server needs no lookup"
    return {"HF_HUB_OFFLINE": Choice("1", OURS, reason)}


def _tuned_configs(alias: Alias | None) -> Choices:
    if alias is None:
        return {}
    return {TUNED_CONFIG_FOLDER: Choice(str(alias.folder), OURS, alias.reason)}


def _logging(inputs: PlanInputs) -> Choices:
    if not inputs.loaded.settings.debug:
        return {}
    source = str(inputs.loaded.origins["debug"])
    return {"VLLM_LOGGING_LEVEL": Choice("DEBUG", source, "verbose logs")}


def _without_compiler(inputs: PlanInputs) -> Choices:
    if not inputs.without_cpp_compiler:
        return {}
    why = "this machine has no C++ compiler, and vLLM compiles log-probs even in eager mode"
    return {"TORCHDYNAMO_DISABLE": Choice("1", OURS, why)}


def _of_target(inputs: PlanInputs) -> Choices:
    source = f"target {inputs.target.name}"
    return {
        name: Choice(default.value, source, f"{default.reason} ({default.evidence})")
        for name, default in inputs.target.env.items()
    }


def _of_recipe(inputs: PlanInputs) -> Choices:
    if inputs.recipe is None:
        return {}
    origins = inputs.recipe.origins
    return {
        name: Choice(value, "recipe", origins.get(name, ""))
        for name, value in inputs.recipe.env.items()
    }


def _of_file(inputs: PlanInputs) -> Choices:
    source = str(inputs.loaded.settings.config)
    return {name: Choice(value, source) for name, value in inputs.loaded.file_env.items()}


def _of_user(inputs: PlanInputs, env: Mapping[str, Choice], cache: Path) -> Choices:
    """The user's values of the variables in `env`. All other variables reach vLLM unchanged."""
    environ, in_image = inputs.accepted.environ, "NIBBLE_IMAGE" in inputs.accepted.environ
    return {
        name: Choice(environ[name], f"environment {name}")
        for name in env
        if name in environ and not is_preset_folder(name, environ[name], cache, in_image)
    }

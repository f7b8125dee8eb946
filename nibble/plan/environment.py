"""Variables for vLLM, each with its source; the user's value wins. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nibble.hub.access import is_model_id
from nibble.plan.choice import OURS, Choice, Choices, Flags, Layer, at
from nibble.plan.compile_cache import CachePlan, cache_environment, is_preset_folder
from nibble.plan.cpu_engine import cpu_environment
from nibble.plan.guard_limits import limits_environment
from nibble.plan.inputs import Ingredients
from nibble.plan.moe_tuning import VARIABLE as TUNED_CONFIG_FOLDER
from nibble.plan.moe_tuning import Alias
from nibble.plan.rules import rule_environment
from nibble.plan.shared_memory import queue_environment
from nibble.plan.situation import Situation
from nibble.plan.startup import fast_start_environment

# Flags that may name a further repository, which only vLLM knows how to read. --code-revision is
# none: the model is a folder when vLLM starts, and `Plan.argv` drops its revisions.
_NEED_THE_HUB = ("--lora-modules", "--hf-config-path", "--tokenizer-revision")


def decide_environment(
    situation: Situation, caches: CachePlan, alias: Alias | None, cache: Path
) -> Flags:
    """Name -> choice, of the variables that nibble, a target, a rule, a recipe or the user's TOML
    sets; the user's environment overrules them.
    """
    parts, args = situation.served, situation.flags
    env = Flags()
    for layer, choices in (
        (Layer.NIBBLE, _quiet()),
        (Layer.NIBBLE, _offline(parts, args)),
        (Layer.NIBBLE, _tuned_configs(alias)),
        (Layer.NIBBLE, _logging(parts)),
        (Layer.NIBBLE, _without_compiler(parts)),
        (Layer.NIBBLE, cache_environment(caches, parts.target)),
        (Layer.NIBBLE, queue_environment(parts, args, situation.topology)),
        (Layer.NIBBLE, fast_start_environment(parts.target, args)),
        (Layer.NIBBLE, cpu_environment(parts, args, situation.topology)),
        (Layer.NIBBLE, limits_environment(parts.loaded, parts.checkpoint)),
        (Layer.TARGET, _of_target(parts)),
        (Layer.RECIPE, _of_recipe(parts)),
        (Layer.RULE, rule_environment(situation.rules, parts.recipe)),
        (Layer.FILE, _of_file(parts)),
    ):
        env = env.add(at(layer, choices))
    return env.add(at(Layer.ENVIRONMENT, _of_user(parts, env, cache)))


def may_need_the_hub(args: Mapping[str, Choice]) -> bool:
    """Whether vLLM may look something up on the Hub although all that nibble knows of is here."""
    return any(flag in args for flag in _NEED_THE_HUB)


def on_hub(args: Mapping[str, Choice]) -> dict[str, str]:
    """Flag -> Hub id, of draft and tokenizer where they are on the Hub."""
    config = args["--speculative-config"].value if "--speculative-config" in args else None
    tokenizer = args["--tokenizer"].value if "--tokenizer" in args else None
    names = {
        "--speculative-config": config.get("model") if isinstance(config, Mapping) else None,
        "--tokenizer": tokenizer,
    }
    return {flag: str(name) for flag, name in names.items() if _is_on_hub(str(name or ""))}


def _is_on_hub(name: str) -> bool:
    # A draft may also be the name of a method, such as ngram; ids of models have an organisation.
    return "/" in name and is_model_id(name) and not Path(name).is_dir()


def _quiet() -> Choices:
    reason = "no usage statistics leave this machine"
    return dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), Choice("1", OURS, reason))


def _offline(parts: Ingredients, args: Mapping[str, Choice]) -> Choices:
    if parts.local:
        if may_need_the_hub(args):
            return {}
        reason = "all files of this plan are on disk and verified"
        return {"HF_HUB_OFFLINE": Choice("1", OURS, reason)}
    checkpoint = parts.checkpoint
    if checkpoint is None or checkpoint.is_local or checkpoint.path is None:
        return {}
    reason = "the model is on disk: the server needs no lookup"
    return {"HF_HUB_OFFLINE": Choice("1", OURS, reason)}


def _tuned_configs(alias: Alias | None) -> Choices:
    if alias is None:
        return {}
    return {TUNED_CONFIG_FOLDER: Choice(str(alias.folder), OURS, alias.reason)}


def _logging(parts: Ingredients) -> Choices:
    if not parts.loaded.settings.debug:
        return {}
    source = str(parts.loaded.origins["debug"])
    return {"VLLM_LOGGING_LEVEL": Choice("DEBUG", source, "verbose logs")}


def _without_compiler(parts: Ingredients) -> Choices:
    if not parts.without_cpp_compiler:
        return {}
    why = "this machine has no C++ compiler, and vLLM compiles log-probs even in eager mode"
    return {"TORCHDYNAMO_DISABLE": Choice("1", OURS, why)}


def _of_target(parts: Ingredients) -> Choices:
    source = f"target {parts.target.name}"
    return {
        name: Choice(default.value, source, f"{default.reason} ({default.evidence})")
        for name, default in parts.target.env.items()
    }


def _of_recipe(parts: Ingredients) -> Choices:
    if parts.recipe is None:
        return {}
    origins = parts.recipe.origins
    return {
        name: Choice(value, "recipe", origins.get(name, ""))
        for name, value in parts.recipe.env.items()
    }


def _of_file(parts: Ingredients) -> Choices:
    source = str(parts.loaded.settings.config)
    return {name: Choice(value, source) for name, value in parts.loaded.file_env.items()}


def _of_user(parts: Ingredients, env: Mapping[str, Choice], cache: Path) -> Choices:
    """The user's own values of the variables in `env`; others reach vLLM as they are."""
    given, in_image = parts.accepted.environ, "NIBBLE_IMAGE" in parts.accepted.environ
    return {
        name: Choice(given[name], f"environment {name}")
        for name in env
        if name in given and not is_preset_folder(name, given[name], cache, in_image)
    }

"""vLLM's flags from all layers, each with its source and reason: command line > VLLM_EXTRA_ARGS >
other environment > user TOML > known risk (rules/) > recipe > target > nibble's default.
JSON-valued flags are joined key by key. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.engine.contract import CONFIG_KEY
from nibble.engine.contract import OPTIONS as NVFP4_OPTIONS
from nibble.engine.flags import merge
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target
from nibble.plan.models.gemma4 import FLAGS as GEMMA4_FLAGS
from nibble.plan.models.gemma4 import REASON as GEMMA4_REASON
from nibble.plan.moe_tuning import TunedConfigs
from nibble.plan.nvfp4_options import FLAG as NVFP4_FLAG
from nibble.plan.nvfp4_options import REASON as NVFP4_REASON
from nibble.plan.validate import TURBOQUANT_COST
from nibble.recipes.recipe import ResolvedRecipe
from nibble.recipes.rules import Rule
from nibble.settings.environment import Accepted
from nibble.settings.options import default_of, options
from nibble.settings.sources import Loaded


@dataclass(frozen=True)
class Choice:
    """A value, where it came from (`environment PORT`, `recipe …`, `target gb10`) and why it is
    so.
    """

    value: Any
    source: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        value = str(self.value) if isinstance(self.value, Path) else self.value
        return {"value": value, "source": self.source, "reason": self.reason}


def values_of(choices: Mapping[str, Choice]) -> dict[str, Any]:
    """What was chosen, without the reasons."""
    return {name: choice.value for name, choice in choices.items()}


Choices = dict[str, Choice]


@dataclass(frozen=True)
class Ingredients:
    """All a plan is made of. `cli_flags` and `extra_flags` are vLLM flags in the form of
    `vllm_args`.
    """

    loaded: Loaded
    accepted: Accepted
    cli_flags: Mapping[str, Any]
    extra_flags: Mapping[str, Any]
    hardware: Hardware
    target: Target
    target_choice: Choice
    checkpoint: Checkpoint | None
    checkpoint_note: str
    recipe: ResolvedRecipe | None
    is_demo: bool = False
    tuned_configs: TunedConfigs | None = None
    rules: tuple[Rule, ...] = ()
    # `compiled_id` of what is installed here (build_id.py); empty: a plan for another machine
    build: str = ""
    vllm: str = ""
    can_compile: bool | None = None  # whether FlashInfer's compiler is here; None: not this machine
    without_cpp_compiler: bool = False  # on the CPU, where torch.compile needs one
    shm_free_bytes: int | None = None  # in /dev/shm; None: not this machine, or there is none
    without_gpu_kernels: str = (
        ""  # why nibble's cannot run here; empty also where that is not known
    )

    @property
    def environ(self) -> dict[str, str]:
        """What vLLM finds in its environment, but for the plan's own choices: the settings
        file's below the user's.
        """
        return {**self.loaded.file_env, **self.accepted.environ}


def join_layers(parts: Ingredients) -> Choices:
    """Lowest layer first; later layers replace values and join JSON objects key by key."""
    args: Choices = {}
    layers = [_nibble_defaults(parts), _target_layer(parts), _recipe_layer(parts)]
    layers += [
        _plain_layer(file_flags(parts.loaded), f"file {parts.loaded.settings.config}"),
        _legacy_layer(parts),
        _settings_layer(parts, "file", "default"),
    ]
    layers += [_settings_layer(parts, "environment"), _switches(parts, "file", "environment")]
    layers += [_plain_layer(parts.extra_flags, "VLLM_EXTRA_ARGS")]
    layers += [_switches(parts, "command line"), _settings_layer(parts, "command line")]
    layers += [_plain_layer(parts.cli_flags, "command line")]
    for layer in layers:
        for name, choice in layer.items():
            args[name] = _over(args.get(name), choice)
    return args


def _over(low: Choice | None, high: Choice) -> Choice:
    if low is None or not isinstance(low.value, Mapping) or not isinstance(high.value, Mapping):
        return high
    return Choice(
        merge(low.value, high.value), f"{low.source} + {high.source}", high.reason or low.reason
    )


def _plain_layer(flags: Mapping[str, Any], source: str) -> Choices:
    return {name: Choice(value, source) for name, value in flags.items()}


def _nibble_defaults(parts: Ingredients) -> Choices:
    defaults: Choices = {
        "--fail-on-environ-validation": Choice(
            True, "nibble's default", "a VLLM_ name that vLLM does not know stops the start"
        )
    }
    if parts.is_demo and parts.target.device == "cpu":
        reason = (
            "first answer sooner than compiled, cold or warm"
            " (benchmarks/results/start_overhead.json)"
        )
        defaults["--enforce-eager"] = Choice(True, "nibble's default", reason)
    elif parts.without_cpp_compiler:
        defaults["--enforce-eager"] = Choice(
            True, "nibble's default", "no C++ compiler is here to compile with"
        )
    return defaults


def _target_layer(parts: Ingredients) -> Choices:
    source = f"target {parts.target.name}"
    return {
        n: Choice(d.value, source, f"{d.reason} ({d.evidence})")
        for n, d in parts.target.args.items()
    }


def _recipe_layer(parts: Ingredients) -> Choices:
    if parts.recipe is None:
        return {}
    recipe = parts.recipe
    args = {
        name: Choice(value, "recipe", f"{recipe.origins.get(name, '[args]')}, {recipe.status}")
        for name, value in recipe.args.items()
    }
    pinned = {"--revision": Choice(recipe.revision, "recipe", "pinned")} if recipe.revision else {}
    return pinned | args


def file_flags(loaded: Loaded) -> dict[str, Any]:
    """The [args] table of the user's TOML file, by canonical name."""
    return {"--" + name.replace("_", "-"): value for name, value in loaded.file_args.items()}


def _legacy_layer(parts: Ingredients) -> Choices:
    origins = parts.accepted.flag_origins
    return {
        name: Choice(
            value,
            f"environment {origins[name]}",
            "translated: vLLM 0.32 no longer reads that variable",
        )
        for name, value in parts.accepted.flags.items()
    }


def _settings_layer(parts: Ingredients, *layers: str) -> Choices:
    """Options that are vLLM flags under another name, for the given layers of origin."""
    found: Choices = {}
    for name, option in options().items():
        origin, value = parts.loaded.origins[name], getattr(parts.loaded.settings, name)
        if option.vllm and value is not None and origin.layer in layers:
            found[option.vllm] = Choice(value, str(origin))
    return found


def _switches(parts: Ingredients, *layers: str) -> Choices:
    """Options that stand for several flags or for a key of one."""
    found: Choices = {}
    settings, origins = parts.loaded.settings, parts.loaded.origins
    if settings.debug and origins["debug"].layer in layers:
        found["--enforce-eager"] = Choice(
            True, str(origins["debug"]), "debugging: no compilation, no CUDA graphs"
        )
    if settings.tq and origins["tq"].layer in layers:
        found["--kv-cache-dtype"] = Choice(
            settings.tq, str(origins["tq"]), TURBOQUANT_COST[settings.tq]
        )
    if origins["gemma4_attention"].layer in layers:
        for flag, value in GEMMA4_FLAGS[settings.gemma4_attention].items():
            found[flag] = Choice(value, str(origins["gemma4_attention"]), GEMMA4_REASON)
    ours = {
        name: getattr(settings, name) for name in NVFP4_OPTIONS if origins[name].layer in layers
    }
    # vLLM's kernel is the plugin's own default, and `auto` is not for it to know
    # (linear_kernel.py).
    if ours := {
        name: value for name, value in ours.items() if value not in (default_of(name), "vllm")
    }:
        source = " and ".join(str(origins[name]) for name in ours)
        found[NVFP4_FLAG] = Choice({CONFIG_KEY: ours}, source, NVFP4_REASON)
    return found

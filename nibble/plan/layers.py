"""The flags that each layer sets, before nibble decides the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nibble.engine.contract import CONFIG_KEY
from nibble.engine.contract import OPTIONS as NVFP4_OPTIONS
from nibble.plan.choice import OURS, Choice, Choices, Flags, Layer, at
from nibble.plan.inputs import PlanInputs
from nibble.plan.models.gemma4 import FLAGS as GEMMA4_FLAGS
from nibble.plan.models.gemma4 import REASON as GEMMA4_REASON
from nibble.plan.nvfp4_options import FLAG as NVFP4_FLAG
from nibble.plan.nvfp4_options import REASON as NVFP4_REASON
from nibble.plan.server import OPTIONS as SERVER_OPTIONS
from nibble.plan.server import server_flags
from nibble.plan.validate import TURBOQUANT_COST
from nibble.settings.options import Settings, default_of, options
from nibble.settings.sources import Loaded

LAYERS = {
    "default": Layer.NIBBLE,
    "file": Layer.FILE,
    "environment": Layer.ENVIRONMENT,
    "command line": Layer.COMMAND_LINE,
}


def read_layers(inputs: PlanInputs) -> Flags:
    """The flags of all layers. Within a layer, a vLLM flag wins over nibble's option for the same
    thing.
    """
    flags = Flags().add(server_flags(inputs))
    for layer, choices in (
        (Layer.NIBBLE, _nibble_defaults(inputs)),
        (Layer.TARGET, _target_layer(inputs)),
        (Layer.RECIPE, _recipe_layer(inputs)),
        (Layer.FILE, _plain(file_flags(inputs.loaded), f"file {inputs.loaded.settings.config}")),
        (Layer.ENVIRONMENT, _translated(inputs)),
        *((layer, _switches(inputs.loaded, name)) for name, layer in LAYERS.items()),
        *((layer, _options_of(inputs.loaded, name)) for name, layer in LAYERS.items()),
        (Layer.EXTRA_ARGS, _plain(inputs.extra_flags, "VLLM_EXTRA_ARGS")),
        (Layer.COMMAND_LINE, _plain(inputs.cli_flags, "command line")),
    ):
        flags = flags.add(at(layer, choices))
    return flags


def _plain(flags: Mapping[str, Any], source: str) -> Choices:
    return {name: Choice(value, source) for name, value in flags.items()}


def _nibble_defaults(inputs: PlanInputs) -> Choices:
    defaults: Choices = {
        "--fail-on-environ-validation": Choice(
            True, OURS, "an unknown VLLM_ variable stops the start"
        )
    }
    if inputs.is_demo and inputs.target.device == "cpu":
        reason = (
            "the first answer comes sooner than with compilation, cold or warm"
            " (benchmarks/results/start_overhead.json)"
        )
        defaults["--enforce-eager"] = Choice(True, OURS, reason)
    elif inputs.without_cpp_compiler:
        defaults["--enforce-eager"] = Choice(True, OURS, "this machine has no C++ compiler")
    return defaults


def _target_layer(inputs: PlanInputs) -> Choices:
    source = f"target {inputs.target.name}"
    return {
        n: Choice(d.value, source, f"{d.reason} ({d.evidence})")
        for n, d in inputs.target.args.items()
    }


def _recipe_layer(inputs: PlanInputs) -> Choices:
    if inputs.recipe is None:
        return {}
    recipe = inputs.recipe
    args = {
        name: Choice(value, "recipe", f"{recipe.origins.get(name, '[args]')}, {recipe.status}")
        for name, value in recipe.args.items()
    }
    pinned = {"--revision": Choice(recipe.revision, "recipe", "pinned")} if recipe.revision else {}
    return pinned | args


def file_flags(loaded: Loaded) -> dict[str, Any]:
    """The [args] table of the user's TOML file, by canonical name."""
    return {"--" + name.replace("_", "-"): value for name, value in loaded.file_args.items()}


def _translated(inputs: PlanInputs) -> Choices:
    """Variables of old guides, translated to flags."""
    origins = inputs.accepted.flag_origins
    reason = "translated: vLLM 0.32 does not read that variable"
    return {
        name: Choice(value, f"environment {origins[name]}", reason)
        for name, value in inputs.accepted.flags.items()
    }


def _of_layer(loaded: Loaded, layer: str) -> Iterator[tuple[str, str, Any]]:
    """(field, source, value) of each option that `layer` sets. An overruled value is the text that
    the layer gave.
    """
    for name, origin in loaded.origins.items():
        if origin.layer == layer:
            yield name, str(origin), getattr(loaded.settings, name)
        else:
            for below, written in loaded.given.get(name, ()):
                if below.layer == layer:
                    yield name, str(below), written


def _options_of(loaded: Loaded, layer: str) -> Choices:
    """Options that set a vLLM flag of another name."""
    known = options()
    return {
        flag: Choice(value, source)
        for name, source, value in _of_layer(loaded, layer)
        if (flag := known[name].vllm or SERVER_OPTIONS.get(name)) and value is not None
    }


def _switches(loaded: Loaded, layer: str) -> Choices:
    """Options that set several flags, or one key of a JSON flag. Only winning values count."""
    settings, origins = loaded.settings, loaded.origins
    choices: Choices = {}
    if settings.debug and origins["debug"].layer == layer:
        choices["--enforce-eager"] = Choice(
            True, str(origins["debug"]), "debug mode: no compilation, no CUDA graphs"
        )
    if settings.tq and origins["tq"].layer == layer:
        choices["--kv-cache-dtype"] = Choice(
            settings.tq, str(origins["tq"]), TURBOQUANT_COST[settings.tq]
        )
    if origins["gemma4_attention"].layer == layer:
        for flag, value in GEMMA4_FLAGS[settings.gemma4_attention].items():
            choices[flag] = Choice(value, str(origins["gemma4_attention"]), GEMMA4_REASON)
    return choices | _plugin_options(settings, loaded, layer)


def _plugin_options(settings: Settings, loaded: Loaded, layer: str) -> Choices:
    # The plugin's default is vLLM's kernel. linear_kernel.py and expert_kernel.py decide `auto`.
    changed = {
        name: value
        for name in NVFP4_OPTIONS
        if loaded.origins[name].layer == layer
        and (value := getattr(settings, name)) not in (default_of(name), "vllm")
    }
    if not changed:
        return {}
    source = " and ".join(str(loaded.origins[name]) for name in changed)
    return {NVFP4_FLAG: Choice({CONFIG_KEY: changed}, source, NVFP4_REASON)}

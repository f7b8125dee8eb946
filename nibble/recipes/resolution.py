"""The values of a recipe for one target and machine: its layers merged, with their origins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.engine.flags import merge
from nibble.recipes.recipe import Recipe, Section


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe for one target and machine.

    `args` has canonical names (`--max-model-len`). `origins` names the part of the file for each
    flag and variable. `gpus` is the number in the evidence, None without a source. With the status
    "unknown" it holds only what applies to the model everywhere (`[args]`, `[env]`).
    """

    id: str
    target: str
    status: str
    evidence: str
    revision: str
    gpus: int | None
    args: Mapping[str, Any]
    env: Mapping[str, str]
    expected: Mapping[str, str]
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    min_acceptance: float | None = None


def resolve(
    recipe: Recipe, target: str, gpu_count: int | None = None, gpu_names: Sequence[str] = ()
) -> ResolvedRecipe:
    """The recipe's values for this target and these GPUs; without them, for the evidence's machine.

    Layers, each over the one before: [args], the target's section, then its matching variants, the
    most specific last. JSON-valued flags merge key by key. `remove` drops inherited names before
    its layer applies.
    """
    layers = [("[args]", Section(args=recipe.args, env=recipe.env))]
    section = recipe.targets.get(target)
    notes = [recipe.note] if recipe.note else []
    if section is None:
        known = ", ".join(sorted(recipe.targets)) or "none"
        return _merged(
            recipe,
            target,
            layers,
            "unknown",
            [*notes, f"no source reports this model on {target} (known: {known})"],
        )
    count = section.gpus if gpu_count is None else gpu_count
    fitting = (v for v in section.variants if _matches(v, section, count, gpu_names))
    matching = sorted(fitting, key=lambda v: v.specificity)
    if (
        section.status != "unsupported"
        and not matching
        and not _covers(section, gpu_count, gpu_names)
    ):
        return _merged(recipe, target, layers, "unknown", [*notes, _other_hardware(section)])
    layers += [(f"[target.{target}]", section)]
    layers += [(f"[target.{target}] variant {_described(v)}", v) for v in matching]
    notes += [layer.note for _, layer in layers if layer.note]
    return _merged(recipe, target, layers, "", notes)


def resolutions(recipe: Recipe) -> Iterator[tuple[str, ResolvedRecipe]]:
    """Every resolution of the recipe: each target and variant on the machine of its evidence."""
    for name, section in recipe.targets.items():
        yield (
            f"target.{name}.",
            resolve(recipe, name, section.gpus, [section.gpu] if section.gpu else []),
        )
        for index, variant in enumerate(section.variants):
            gpu = variant.gpu or section.gpu
            count = variant.gpus if variant.gpus is not None else section.gpus
            yield (
                f"target.{name}.variants[{index}].",
                resolve(recipe, name, count, [gpu] if gpu else []),
            )
    if not recipe.targets:
        yield "", resolve(recipe, "")


def _matches(variant: Section, section: Section, count: int | None, names: Sequence[str]) -> bool:
    """Whether a variant applies: its GPU must be present; an inherited GPU must not be
    contradicted.
    """
    right_count = variant.gpus is None or variant.gpus == count
    right_kind = all(_named(variant.gpu or section.gpu, name) for name in names)
    return right_count and right_kind and (bool(names) or not variant.gpu)


def _covers(section: Section, count: int | None, names: Sequence[str]) -> bool:
    """Whether the section's evidence covers this machine; it also covers more GPUs than it used."""
    enough = section.gpus is None or count is None or count >= section.gpus
    return enough and (not section.gpu or all(_named(section.gpu, n) for n in names))


def _named(part: str, name: str) -> bool:
    return part.lower() in name.lower()


def _described(section: Section) -> str:
    return " ".join(
        p for p in (f"{section.gpus}x" if section.gpus is not None else "", section.gpu) if p
    )


def _other_hardware(section: Section) -> str:
    known = [_described(s) for s in (section, *section.variants) if _described(s)]
    return f"reported only for {', '.join(dict.fromkeys(known))}, not for this machine"


def _merged(
    recipe: Recipe,
    target: str,
    layers: Sequence[tuple[str, Section]],
    status: str,
    notes: Sequence[str],
) -> ResolvedRecipe:
    args: Mapping[str, Any] = {}
    env: dict[str, str] = {}
    expected: dict[str, str] = {}
    origins: dict[str, str] = {}
    evidence, gpus, acceptance = "", None, None
    for origin, layer in layers:
        for name in layer.remove:
            args = {flag: value for flag, value in args.items() if flag != canonical(name)}
            env.pop(name, None)
        args = merge(args, {canonical(name): value for name, value in layer.args.items()})
        env |= layer.env
        expected |= layer.expected
        origins |= dict.fromkeys([*map(canonical, layer.args), *layer.env], origin)
        evidence, gpus = layer.evidence or evidence, layer.gpus if layer.gpus is not None else gpus
        acceptance = layer.min_acceptance if layer.min_acceptance is not None else acceptance
    found = status or next(
        (layer.status for _, layer in reversed(layers) if layer.status), "unknown"
    )
    kept = {name: origin for name, origin in origins.items() if name in args or name in env}
    return ResolvedRecipe(
        recipe.id,
        target,
        found,
        evidence,
        recipe.revision,
        gpus,
        args,
        env,
        expected,
        kept,
        tuple(notes),
        acceptance,
    )


def canonical(flag: str) -> str:
    """`max_model_len` or `max-model-len` as `--max-model-len`."""
    return "--" + flag.removeprefix("--").replace("_", "-")

"""What the known risks of rules/backends.toml change in a plan: flags, variables, notices, and
what is refused. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.plan.layers import Choice, Choices, Ingredients
from nibble.recipes.rules import NESTED, Rule, Situation, accepted_risks, applying, hits, in_effect

NOBODY = "nibble's default"  # the source of a flag that is not set at all


@dataclass(frozen=True)
class Risks:
    """The rules that hold for a plan, the flags they force and what the user is told."""

    rules: tuple[Rule, ...]
    args: Choices
    notices: tuple[str, ...]


def weigh_risks(parts: Ingredients, args: Mapping[str, Choice], tensor_parallel: int) -> Risks:
    """Hold `args` against the rules. Raises CONFIG for a value that a rule forbids, and for an
    unknown id to allow.
    """
    allowed = accepted_risks(parts.loaded.settings.allow_risk, parts.rules)
    situation = _situation(parts, tensor_parallel)
    here = applying(parts.rules, situation)
    rules = tuple(rule for rule in here if rule.id not in allowed)
    notices = [f"the risk {rule.id} is taken: {rule.why}" for rule in here if rule.id in allowed]
    forced: Choices = {}
    for rule in rules:
        for name, value in rule.force.items():
            choice, notice = _force(rule, f"--{name}", value, parts, args)
            forced |= {f"--{name}": choice} if choice else {}
            notices += [notice] if notice else []
    values = {name: choice.value for name, choice in {**args, **forced}.items()}
    for rule in rules:
        _refuse(rule, values, situation.quantization, args)
        notices += [
            f"{flag} {value}: {rule.why}"
            for flag, value in hits(rule.warn, values, situation.quantization)
        ]
    return Risks(rules, forced, tuple(notices))


def rule_environment(rules: Iterable[Rule]) -> Choices:
    """Variables the rules set."""
    return {
        name: Choice(value, f"rule {rule.id}", rule.why)
        for rule in rules
        for name, value in rule.env.items()
    }


def _situation(parts: Ingredients, tensor_parallel: int) -> Situation:
    declared = parts.checkpoint.scheme.vllm_quantization if parts.checkpoint else None
    return Situation(
        target=parts.target.name,
        model=str(parts.loaded.settings.model),
        checkpoint=parts.checkpoint,
        tensor_parallel=tensor_parallel,
        quantization=declared or "",
    )


def _force(
    rule: Rule, flag: str, value: str | bool, parts: Ingredients, args: Mapping[str, Choice]
) -> tuple[Choice | None, str]:
    """The forced value, unless the user or a recipe that stays says otherwise; and what to tell."""
    found = in_effect(flag, {name: choice.value for name, choice in args.items()})
    source = _source(flag, args)
    if found == value:
        return None, ""
    if source == "recipe":
        if not rule.beats_recipe(parts.recipe.status if parts.recipe else ""):
            return None, ""
        notice = f"{flag} {value} in place of the recipe's {found}: {rule.why}"
        return Choice(value, f"rule {rule.id}", rule.why), notice
    if source not in (NOBODY, f"target {parts.target.name}"):
        return (
            None,
            (
                f"{flag} {found} ({source}) in place of {value}, which rule {rule.id} asks for:"
                f" {rule.why}"
            ),
        )
    return Choice(value, f"rule {rule.id}", rule.why), ""


def _source(flag: str, args: Mapping[str, Choice]) -> str:
    """Who set a flag, itself or as a key of a JSON-valued one."""
    if flag in args:
        return args[flag].source
    outer, key = NESTED.get(flag, ("", ""))
    nested = args.get(outer)
    has_key = nested is not None and isinstance(nested.value, Mapping) and key in nested.value
    return nested.source if nested is not None and has_key else NOBODY


def _refuse(
    rule: Rule, values: Mapping[str, Any], declared: str, args: Mapping[str, Choice]
) -> None:
    for flag, value in hits(rule.forbid, values, declared):
        source = _source(flag, args)
        origin = "the checkpoint" if source == NOBODY else source
        what = (
            f"{flag} {value} ({origin}) is a known risk on this target ({rule.effect}): {rule.why}"
        )
        action = f"leave the choice to nibble, or take the risk with NIBBLE_ALLOW_RISK={rule.id}"
        raise NibbleError(ExitCode.CONFIG, what, "", action)

"""Applies the known risks of rules/backends.toml: flags, variables, notices, refusals. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import OURS, Choice, Choices, Flags, Layer
from nibble.plan.inputs import Ingredients
from nibble.plan.nvfp4_options import source_of
from nibble.plan.situation import Decision, Situation
from nibble.recipes.recipe import ResolvedRecipe
from nibble.recipes.rules import Rule, RuleContext, accepted_risks, applying, hits, in_effect


def weigh_risks(situation: Situation) -> Decision:
    """The rules that hold here, and the flags they force. Raises CONFIG for an unknown id in
    NIBBLE_ALLOW_RISK.
    """
    parts = situation.served
    allowed = accepted_risks(parts.loaded.settings.allow_risk, parts.rules)
    here = applying(parts.rules, _context(situation))
    rules = tuple(rule for rule in here if rule.id not in allowed)
    notices = [
        f"you accepted the risk {rule.id}: {rule.why}" for rule in here if rule.id in allowed
    ]
    forced: Choices = {}
    for rule in rules:
        for name, value in rule.force.items():
            choice, notice = _force(rule, f"--{name}", value, parts, situation.flags)
            forced |= {f"--{name}": choice} if choice else {}
            notices += [notice] if notice else []
    values = situation.flags.add(forced).plain
    declared = _declared(parts)
    for rule in rules:
        notices += [
            f"{flag} {value}: {rule.why}" for flag, value in hits(rule.warn, values, declared)
        ]
    return Decision(forced, rules, tuple(notices))


def refuse_known_risks(situation: Situation) -> None:
    """Raise CONFIG for a value that a rule forbids."""
    declared = _declared(situation.served)
    for rule in situation.rules:
        _refuse(rule, declared, situation.flags)


def rule_environment(rules: Iterable[Rule], recipe: ResolvedRecipe | None) -> Choices:
    """Variables the rules set; a recipe that sets one knows the rule."""
    known = recipe.env if recipe else {}
    return {
        name: Choice(value, f"rule {rule.id}", rule.why, Layer.RULE)
        for rule in rules
        for name, value in rule.env.items()
        if name not in known
    }


def _context(situation: Situation) -> RuleContext:
    parts = situation.served
    return RuleContext(
        target=parts.target.name,
        model=str(parts.loaded.settings.model),
        checkpoint=parts.checkpoint,
        tensor_parallel=situation.tensor_parallel,
        quantization=_declared(parts),
    )


def _declared(parts: Ingredients) -> str:
    """vLLM's name of the quantization that the checkpoint declares."""
    declared = parts.checkpoint.scheme.vllm_quantization if parts.checkpoint else None
    return declared or ""


def _force(
    rule: Rule, flag: str, value: str | bool, parts: Ingredients, flags: Flags
) -> tuple[Choice | None, str]:
    """The forced value, unless the user or a recipe that stays says otherwise; and the notice."""
    found, source = in_effect(flag, flags.plain), source_of(flag, flags)
    forced = Choice(value, f"rule {rule.id}", rule.why, Layer.RULE)
    if found == value:
        return None, ""
    if source == "recipe":
        if not rule.beats_recipe(parts.recipe.status if parts.recipe else ""):
            return None, ""
        return forced, f"{flag} {value} in place of the recipe's {found}: {rule.why}"
    if source not in (OURS, f"target {parts.target.name}"):
        return None, (
            f"{flag} {found} ({source}) in place of {value}, which rule {rule.id} requires:"
            f" {rule.why}"
        )
    return forced, ""


def _refuse(rule: Rule, declared: str, flags: Flags) -> None:
    for flag, value in hits(rule.forbid, flags.plain, declared):
        source = source_of(flag, flags)
        origin = "the checkpoint" if source == OURS else source
        what = (
            f"{flag} {value} ({origin}) is a known risk on this target ({rule.effect}): {rule.why}"
        )
        action = f"leave the choice to nibble, or accept the risk with NIBBLE_ALLOW_RISK={rule.id}"
        raise NibbleError(ExitCode.CONFIG, what=what, action=action)

"""Applies the known risks of rules/backends.toml: flags, variables, notices, refusals. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import OURS, Choice, Choices, Flags, Layer
from nibble.plan.inputs import PlanInputs
from nibble.plan.nvfp4_options import source_of
from nibble.plan.situation import Decision, Situation
from nibble.recipes.resolution import ResolvedRecipe
from nibble.recipes.rules import Rule, RuleContext, accepted_risks, applying, hits, in_effect


def weigh_risks(situation: Situation) -> Decision:
    """Find the rules that apply, and the flags that they force. Raises CONFIG for an unknown id in
    NIBBLE_ALLOW_RISK.
    """
    inputs = situation.served
    allowed = accepted_risks(inputs.loaded.settings.allow_risk, inputs.rules)
    applying_rules = applying(inputs.rules, _context(situation))
    rules = tuple(rule for rule in applying_rules if rule.id not in allowed)
    notices = [
        f"you accepted the risk {rule.id}: {rule.why}"
        for rule in applying_rules
        if rule.id in allowed
    ]
    forced: Choices = {}
    for rule in rules:
        for name, value in rule.force.items():
            choice, notice = _force(rule, f"--{name}", value, inputs, situation.flags)
            forced |= {f"--{name}": choice} if choice else {}
            notices += [notice] if notice else []
    values = situation.flags.add(forced).plain
    declared = _declared(inputs)
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
    """Variables that the rules set. A recipe that sets the same variable wins."""
    known = recipe.env if recipe else {}
    return {
        name: Choice(value, f"rule {rule.id}", rule.why, Layer.RULE)
        for rule in rules
        for name, value in rule.env.items()
        if name not in known
    }


def _context(situation: Situation) -> RuleContext:
    inputs = situation.served
    return RuleContext(
        target=inputs.target.name,
        model=str(inputs.loaded.settings.model),
        checkpoint=inputs.checkpoint,
        tensor_parallel=situation.tensor_parallel,
        quantization=_declared(inputs),
    )


def _declared(inputs: PlanInputs) -> str:
    """vLLM's name for the quantization that the checkpoint declares; empty if none."""
    declared = inputs.checkpoint.scheme.vllm_quantization if inputs.checkpoint else None
    return declared or ""


def _force(
    rule: Rule, flag: str, value: str | bool, inputs: PlanInputs, flags: Flags
) -> tuple[Choice | None, str]:
    """(the forced value or None, a notice or nothing). A user's value and a verified recipe's
    stay.
    """
    current, source = in_effect(flag, flags.plain), source_of(flag, flags)
    forced = Choice(value, f"rule {rule.id}", rule.why, Layer.RULE)
    if current == value:
        return None, ""
    if source == "recipe":
        if not rule.beats_recipe(inputs.recipe.status if inputs.recipe else ""):
            return None, ""
        return forced, f"{flag} {value} in place of the recipe's {current}: {rule.why}"
    if source not in (OURS, f"target {inputs.target.name}"):
        return None, (
            f"{flag} {current} ({source}) in place of {value}, which rule {rule.id} requires:"
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

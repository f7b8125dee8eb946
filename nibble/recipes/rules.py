"""Known risks of vLLM's backends as data: rules/backends.toml, and where each applies.

A rule names machines and models, and its effect on a plan: a flag to force, values to forbid,
values to warn about, variables to set. plan/layers.py and plan/plan.py apply it, plan/rules.py
refuses, and lint.py checks rules and recipes against the installed vLLM.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, StrictBool, StrictInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from nibble.checkpoint import Checkpoint
from nibble.errors import ExitCode, NibbleError

Words = tuple[str, ...]
STRICT = ConfigDict(extra="forbid")

# Flags that a key of a JSON-valued flag sets too; vLLM prefers the flag unless it is `auto`
# (vllm 0.32 engine/arg_utils.py:2757).
NESTED: Mapping[str, tuple[str, str]] = {
    "--moe-backend": ("--kernel-config", "moe_backend"),
    "--linear-backend": ("--kernel-config", "linear_backend"),
    "--attention-backend": ("--attention-config", "backend"),
    "--gdn-prefill-backend": ("--additional-config", "gdn_prefill_backend"),
}


@checked_dataclass(frozen=True, config=STRICT)
class Condition:
    """Where a rule applies: all conditions hold; before the download, unknown ones count as met.

    models              parts of the model's id; they replace `families` while the family is unknown
    activations         the activation format of some quantized layers; an unknown NVFP4
                        checkpoint counts as fp4
    k_multiple          some 4-bit weight has a K per rank, under tensor parallelism, that is not a
                        multiple of this
    k_unknown_from_tp   while shapes are unknown: the rule applies from this tensor parallel size on
    """

    targets: Words = ()
    families: Words = ()
    models: Words = ()
    quantization: Words = ()
    nvfp4: StrictBool | None = None
    moe: StrictBool | None = None
    activations: Literal["", "fp4", "fp8", "bf16"] = ""
    k_multiple: StrictInt = 0
    k_unknown_from_tp: StrictInt = 0


@checked_dataclass(frozen=True, config=STRICT)
class Rule:
    """One entry of rules/backends.toml; flags are written as vLLM writes them, without dashes."""

    id: str
    effect: Literal["wrong output", "crash", "no start", "slow start", "unmeasured"]
    reason: str
    reference: str
    when: Condition
    row: str = ""
    force: Mapping[str, str | StrictBool] = field(default_factory=dict)
    forbid: Mapping[str, Words] = field(default_factory=dict)
    warn: Mapping[str, Words] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The reason with its source, as notices and errors print it."""
        return f"{self.reason} ({self.reference})"

    def beats_recipe(self, status: str) -> bool:
        """Whether a forced value wins over a recipe's; over a verified recipe it never does."""
        return self.effect == "wrong output" and status != "verified"


@dataclass(frozen=True)
class RuleContext:
    """The facts that conditions are checked against.

    `quantization` is vLLM's name for the declaration of the checkpoint or a recipe.
    """

    target: str
    model: str
    checkpoint: Checkpoint | None = None
    tensor_parallel: int = 1
    quantization: str = ""


def load_rules(root: Path) -> tuple[Rule, ...]:
    """The rules of `root`/rules/backends.toml. Raises CONFIG for a file of another shape."""
    return parse_rules(root / "rules" / "backends.toml")


@cache
def parse_rules(path: Path) -> tuple[Rule, ...]:
    """A file of rules; ids are unique."""
    try:
        data = tomllib.loads(path.read_text())
        rules = TypeAdapter(dict[Literal["rule"], list[Rule]]).validate_python(data)["rule"]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise NibbleError(
            ExitCode.CONFIG, what=f"{path}: {where}: {first['msg']}", action="correct that entry"
        ) from None
    except (OSError, KeyError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{path} cannot be read: {error}",
            expected="a TOML file of rules",
            action="correct that file",
        ) from None
    ids = [rule.id for rule in rules]
    if repeated := {name for name in ids if ids.count(name) > 1}:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{path}: the id {min(repeated)} is given twice",
            action="rename one of the rules",
        )
    return tuple(rules)


def accepted_risks(text: str, rules: Iterable[Rule]) -> frozenset[str]:
    """The ids in NIBBLE_ALLOW_RISK. Raises CONFIG for an id without a rule."""
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    known = sorted(rule.id for rule in rules)
    if unknown := sorted(names - set(known)):
        what = f"there is no known risk {unknown[0]!r} to allow"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="one of " + ", ".join(known),
            action="correct NIBBLE_ALLOW_RISK",
        )
    return names


def applying(
    rules: Iterable[Rule], situation: RuleContext, without: Collection[str] = ()
) -> tuple[Rule, ...]:
    """The rules whose conditions hold, except those named in `without`."""
    return tuple(rule for rule in rules if rule.id not in without and holds(rule.when, situation))


def holds(when: Condition, situation: RuleContext) -> bool:
    """Whether all of a condition holds or may hold."""
    checkpoint = situation.checkpoint
    found = [
        not when.targets or situation.target in when.targets,
        _is_family(when, situation),
        not when.k_multiple or _unaligned(when, situation),
    ]
    if when.nvfp4 is not None:
        found.append(_is_nvfp4(situation) == when.nvfp4)
    if when.moe is not None and checkpoint is not None:
        found.append((checkpoint.num_experts is not None) == when.moe)
    if when.quantization and situation.quantization:
        found.append(situation.quantization in when.quantization)
    if when.activations:
        known = checkpoint.scheme.activations if checkpoint else "fp4"
        found.append(when.activations in known.split("+"))
    return all(found)


def _is_family(when: Condition, situation: RuleContext) -> bool:
    checkpoint = situation.checkpoint
    if when.families and checkpoint is not None:
        return bool(
            {checkpoint.model_type, checkpoint.text_config.get("model_type")} & set(when.families)
        )
    named = any(part.lower() in situation.model.lower() for part in when.models)
    return named or not (when.families or when.models)


def _is_nvfp4(situation: RuleContext) -> bool:
    if situation.checkpoint is not None:
        return situation.checkpoint.scheme.is_nvfp4
    return situation.quantization == "modelopt_fp4" or "nvfp4" in situation.model.lower()


def _unaligned(when: Condition, situation: RuleContext) -> bool:
    size = situation.tensor_parallel
    if situation.checkpoint is None or situation.checkpoint.weights is None:
        return bool(when.k_unknown_from_tp) and size >= when.k_unknown_from_tp
    return any(k % (size * when.k_multiple) for k in situation.checkpoint.weights.split_inputs)


def in_effect(flag: str, args: Mapping[str, Any], declared_quantization: str = "") -> str:
    """The value of a flag that vLLM sees, `auto` for an unset flag, in vLLM's spelling."""
    own = _spelled(flag, args.get(flag))
    if own not in ("", "auto"):
        return own
    if flag == "--quantization":
        return declared_quantization
    outer, key = NESTED.get(flag, ("", ""))
    config = args.get(outer)
    return _spelled(flag, config.get(key) if isinstance(config, Mapping) else None) or "auto"


def _spelled(flag: str, value: Any) -> str:
    """Backends as vLLM compares them, without case and hyphens (vllm 0.32
    engine/arg_utils.py:1806).
    """
    text = "" if value is None else str(value)
    return text.lower().replace("-", "_") if flag in NESTED else text


def hits(
    values: Mapping[str, Collection[str]], args: Mapping[str, Any], declared_quantization: str = ""
) -> Iterator[tuple[str, str]]:
    """(flag, value) for each flag of `values` whose value in effect is one of those named."""
    for name, wanted in values.items():
        value = in_effect(f"--{name}", args, declared_quantization)
        if value in {_spelled(f"--{name}", one) for one in wanted}:
            yield f"--{name}", value

"""`nibble recipes lint`: checks recipes and known risks against the installed vLLM.

People write recipes for one vLLM version, and vLLM drops variables and flags without an error (an
unknown VLLM_* name only logs a warning, vllm 0.32 platforms/interface.py:1446). `lint` finds what
vLLM would refuse or ignore (schema_checks.py), and values that do not fit each other.
`lint(live=True)` also runs the installed vLLM's parser on every command line of a recipe.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nibble.engine.flags import write_flag
from nibble.engine.live_schema import drift, live_schema
from nibble.engine.schema import Schema, closest, load_schema
from nibble.errors import NibbleError
from nibble.machine.targets import TARGET_NAMES
from nibble.recipes.evidence import evidence_problem, is_evidence_file
from nibble.recipes.recipe import (
    STATUSES,
    Problem,
    Recipe,
    Section,
    load_recipe,
    no_recipe,
    read_toml,
    shape_problems,
)
from nibble.recipes.resolution import ResolvedRecipe, resolutions
from nibble.recipes.rules import Rule, RuleContext, applying, hits, in_effect, load_rules
from nibble.recipes.schema_checks import Finding, env_problems, flag_problems, kernel_problems

_HEX40 = re.compile(r"[0-9a-f]{40}")
_PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")


def lint(
    root: Path, ids: Sequence[str] = (), live: bool = True, python: str = sys.executable
) -> list[Problem]:
    """Problems of the named recipes (ids or paths), or of all; `root` holds recipes/ and
    benchmarks/.

    live: check the vLLM that `python` imports, and report where it differs from the snapshot,
    instead of the snapshot alone. Raises VERIFY if that interpreter has no vLLM.
    """
    files = _files(root, ids)
    if not live:
        schema = load_schema()
        found = [] if ids else lint_rules(root, schema)
        return found + [p for file in files for p in lint_file(file, root, schema)]
    lines = _command_lines(files, root)
    schema, refusals = live_schema(python, [argv for _, _, argv in lines])
    problems = [
        Problem("nibble/engine/schema.json", "", difference)
        for difference in drift(load_schema(), schema)
    ]
    problems += [] if ids else lint_rules(root, schema)
    return problems + _problems(files, root, schema, lines, refusals)


CommandLine = tuple[str, str, list[str]]


def all_command_lines(root: Path) -> list[CommandLine]:
    """(file, key path, argv of `vllm serve`) of every recipe."""
    return _command_lines(_files(root, ()), root)


def lint_for(
    root: Path, schema: Schema, lines: Sequence[CommandLine], refusals: Sequence[str | None]
) -> list[Problem]:
    """Problems of all recipes and rules with another vLLM: its schema, and what its parser
    refuses of `lines`.
    """
    return lint_rules(root, schema) + _problems(_files(root, ()), root, schema, lines, refusals)


def _problems(
    files: Iterable[Path],
    root: Path,
    schema: Schema,
    lines: Sequence[CommandLine],
    refusals: Sequence[str | None],
) -> list[Problem]:
    problems = [p for file in files for p in lint_file(file, root, schema)]
    told = {p.file for p in problems}
    # Where a check above names the mistake, the parser's long message is redundant.
    for (file, where, _), refusal in zip(lines, refusals, strict=True):
        if refusal and file not in told:
            problems.append(
                Problem(file, where, f"vLLM's own parser refuses the command: {refusal}")
            )
    return problems


def lint_file(path: Path, root: Path, schema: Schema) -> list[Problem]:
    """Problems of one recipe file."""
    file = path.relative_to(root).as_posix()
    try:
        data = read_toml(path)
    except NibbleError as error:
        return [Problem(file, "", error.what)]
    shape = list(shape_problems(data, file))
    if shape:
        return shape  # the checks below need the right shape
    model_id = path.relative_to(root / "recipes").with_suffix("").as_posix()
    recipe = load_recipe(model_id, root)
    if recipe is None:
        return [
            Problem(
                file,
                "",
                f"the path does not give a Hugging Face id ({model_id!r}); write"
                f" recipes/<org>/<repo>.toml",
            )
        ]
    problems = [*_model_problems(recipe, data["model"], schema), *_layer_problems(recipe, schema)]
    for name, section in recipe.targets.items():
        problems += _target_problems(recipe, name, section, root)
    problems += _resolved_problems(recipe)
    problems += _risky_values(recipe, _rules(root))
    return [Problem(file, key, message, hint) for key, message, hint in problems]


def lint_rules(root: Path, schema: Schema) -> list[Problem]:
    """Problems of rules/backends.toml; none in a folder without rules."""
    file = "rules/backends.toml"
    try:
        rules = _rules(root)
    except NibbleError as error:
        return [Problem(file, "", error.what)]
    found = ((rule.id, finding) for rule in rules for finding in _rule_problems(rule, schema))
    return [Problem(file, f"{id}.{key}", message, hint) for id, (key, message, hint) in found]


def _rules(root: Path) -> tuple[Rule, ...]:
    return load_rules(root) if (root / "rules").is_dir() else ()


def _rule_problems(rule: Rule, schema: Schema) -> Iterator[Finding]:
    values = [("force", name, [value]) for name, value in rule.force.items()]
    values += [("forbid", name, [*many]) for name, many in rule.forbid.items()]
    values += [("warn", name, [*many]) for name, many in rule.warn.items()]
    for verb, name, wanted in values:
        for value in wanted:
            yield from flag_problems(f"{verb}.{name}", name, value, schema)
    for name in rule.env:
        yield from env_problems(f"env.{name}", name, schema)
    for name in rule.when.targets:
        if name not in TARGET_NAMES:
            yield "when.targets", f"there is no target {name!r}", closest(name, TARGET_NAMES)
    if not values and not rule.env:
        yield "when", "has no effect: add force, forbid, warn or env", ""
    if not rule.reason or not rule.reference:
        yield "reason", "is missing: a rule needs reason and reference", ""


def _risky_values(recipe: Recipe, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Values that a rule refuses or overrides; conditions about the checkpoint count as met."""
    for where, resolved in resolutions(recipe):
        size = resolved.args.get("--tensor-parallel-size")
        ranks = size if isinstance(size, int) else 1
        situation = RuleContext(
            resolved.target, recipe.id, tensor_parallel=ranks, quantization=recipe.scheme
        )
        for rule in applying(rules, situation):
            for flag, value in hits(rule.forbid, resolved.args, recipe.scheme):
                yield (
                    f"{where}args.{flag[2:]}",
                    f"{value} is refused by the rule {rule.id}: {rule.reason}",
                    "",
                )
            for name, value in rule.force.items():
                found = in_effect(f"--{name}", resolved.args)
                if found not in ("auto", value) and rule.beats_recipe(resolved.status):
                    message = f"{found} is replaced by the rule {rule.id}: {rule.reason}"
                    yield f"{where}args.{name}", message, str(value)


def _model_problems(recipe: Recipe, model: Mapping[str, Any], schema: Schema) -> Iterator[Finding]:
    if model["id"] != recipe.id:
        yield "model.id", f"is {model['id']!r}, but the path says {recipe.id!r}", ""
    if recipe.revision and not _HEX40.fullmatch(recipe.revision):
        yield (
            "model.revision",
            f"{recipe.revision!r} is not a commit of 40 hex digits (or leave it empty)",
            "",
        )
    if not recipe.source:
        yield "model.source", "is missing: a recipe carries only facts with a source", ""
    schemes = [*_choices(schema, "--quantization"), "bf16"]
    if recipe.scheme and recipe.scheme not in schemes:
        yield (
            "model.scheme",
            f"{recipe.scheme!r} is not a quantization of vLLM",
            closest(recipe.scheme, schemes),
        )


def _choices(schema: Schema, flag: str) -> tuple[str, ...]:
    spec = schema.flag(flag)
    return spec.choices if spec else ()


def _layers(recipe: Recipe) -> Iterator[tuple[str, Section]]:
    """Every part of a file that has args and env, with its key path."""
    yield "", Section(args=recipe.args, env=recipe.env)
    for name, section in recipe.targets.items():
        yield f"target.{name}.", section
        for index, variant in enumerate(section.variants):
            yield f"target.{name}.variants[{index}].", variant


def _layer_problems(recipe: Recipe, schema: Schema) -> Iterator[Finding]:
    for where, layer in _layers(recipe):
        for flag, value in layer.args.items():
            yield from flag_problems(f"{where}args.{flag}", flag, value, schema)
        for name in layer.env:
            yield from env_problems(f"{where}env.{name}", name, schema)
        for kind, kernel in layer.expected.items():
            yield from kernel_problems(f"{where}expected.{kind}", kind, kernel, schema)


def _target_problems(recipe: Recipe, name: str, section: Section, root: Path) -> Iterator[Finding]:
    where = f"target.{name}"
    if name not in TARGET_NAMES:
        yield where, f"there is no target {name!r}", closest(name, TARGET_NAMES)
    if not section.status:
        yield f"{where}.status", f"is missing; one of {', '.join(STATUSES)}", ""
    if not section.evidence:
        yield f"{where}.evidence", "is missing: a target section names the source of its facts", ""
    for at, part in [
        (where, section),
        *((f"{where}.variants[{i}]", v) for i, v in enumerate(section.variants)),
    ]:
        if part.status and part.status not in STATUSES:
            yield (
                f"{at}.status",
                f"{part.status!r} is not one of {', '.join(STATUSES)}",
                closest(part.status, STATUSES),
            )
        if part.status == "verified" and is_evidence_file(part.evidence):
            if problem := evidence_problem(part, recipe.path.parent, recipe.id, name):
                yield f"{at}.evidence", problem, ""
        elif part.status == "verified" and not _is_result(part.evidence, root):
            yield (
                f"{at}.evidence",
                "verified needs the path of an existing file under benchmarks/results, or a file of"
                " `nibble recipes verify`",
                "",
            )
    yield from _variant_problems(where, section.variants)


def _is_result(evidence: str, root: Path) -> bool:
    """Whether the evidence names a result. An image has the recipes without the results, so that
    only a checkout looks for the file.
    """
    paths = re.findall(r"benchmarks/results/[\w./-]+", evidence)
    if not (root / "benchmarks").is_dir():
        return bool(paths)
    return any((root / path.rstrip(".")).is_file() for path in paths)


def _variant_problems(where: str, variants: Sequence[Section]) -> Iterator[Finding]:
    seen: set[tuple[str, int | None]] = set()
    for index, variant in enumerate(variants):
        keys = (variant.gpu.lower(), variant.gpus)
        if keys == ("", None):
            yield f"{where}.variants[{index}]", "matches every machine; add gpu or gpus", ""
        elif keys in seen:
            yield f"{where}.variants[{index}]", "has the same gpu and gpus as another variant", ""
        seen.add(keys)


def _resolved_problems(recipe: Recipe) -> Iterator[Finding]:
    """Checks of the final values of each target and variant, after all layers."""
    for where, resolved in resolutions(recipe):
        if resolved.args.get("--trust-remote-code") and not _HEX40.fullmatch(recipe.revision):
            yield (
                f"{where}args.trust-remote-code",
                "needs model.revision (40 hex digits), or any later code of the model runs",
                "",
            )
        draft = _speculative(resolved).get("model", "")
        if draft and draft != recipe.draft:
            yield (
                f"{where}args.speculative-config",
                f"names the draft {draft!r}, model.draft is {recipe.draft!r}",
                draft,
            )
        processes = _processes(resolved)
        if resolved.status != "unknown" and processes > 1 and processes != resolved.gpus:
            yield (
                f"{where}gpus",
                f"is {resolved.gpus}, but the flags use {processes} GPUs",
                str(processes),
            )


def _processes(resolved: ResolvedRecipe) -> int:
    """GPUs that the flags use; an invalid size counts as one (`flag_problems` reports it)."""
    sizes = [resolved.args.get(flag, 1) for flag in _PARALLEL]
    return math.prod(size for size in sizes if isinstance(size, int))


def _speculative(resolved: ResolvedRecipe) -> Mapping[str, Any]:
    value = resolved.args.get("--speculative-config", {})
    return value if isinstance(value, Mapping) else {}


def _files(root: Path, names: Iterable[str]) -> list[Path]:
    """The recipe files of ids or paths (`recipes/org/repo.toml`), or all files."""
    folder = root / "recipes"
    ids = [re.sub(r"^(.*/)?recipes/|\.toml$", "", name) for name in names]
    for name in ids:
        if not (folder / f"{name}.toml").is_file():
            raise no_recipe(name, root)
    return [folder / f"{name}.toml" for name in ids] or sorted(folder.glob("**/*.toml"))


def _command_lines(files: Iterable[Path], root: Path) -> list[tuple[str, str, list[str]]]:
    """(file, key path, argv of `vllm serve`) of every resolution of valid recipes."""
    lines = []
    for path in files:
        file = path.relative_to(root).as_posix()
        model_id = path.relative_to(root / "recipes").with_suffix("").as_posix()
        try:
            recipe = load_recipe(model_id, root)
        except NibbleError:
            continue  # lint_file reports it
        for where, resolved in resolutions(recipe) if recipe else ():
            words = [
                word for flag, value in resolved.args.items() for word in write_flag(flag, value)
            ]
            lines.append((file, where.rstrip("."), [model_id, *words]))
    return lines

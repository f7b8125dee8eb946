"""Recipes: sourced facts about serving one model on one target with a number of GPUs.

A recipe is `recipes/<hf_org>/<hf_repo>.toml`; its path is the Hugging Face id. `[args]` and `[env]`
hold for the model everywhere (parsers, mostly), `[target.NAME]` for a target, and
`[[target.NAME.variants]]` for a number or a kind of GPU. A target without a section is unknown.
This module reads a file and checks its shape, resolution.py merges its layers for a machine, and
`nibble recipes lint` (lint.py) checks names and values against the installed vLLM.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError

STATUSES = ("verified", "reported", "unsupported")
EXPECTED_KEYS = ("moe", "linear", "attention")

# key -> types of its value; the whole vocabulary of a recipe file.
MODEL_KEYS: Mapping[str, tuple[type, ...]] = {
    "id": (str,),
    "revision": (str,),  # 40 hex digits; with "" nibble resolves it and suggests a pin
    # vLLM's quantization name (modelopt_fp4, compressed-tensors, mxfp4, ...); "" without a source
    "scheme": (str,),
    "min_memory_gb": (int, float),  # GB of all GPUs together, as the source reports it
    "download_bytes": (int,),
    "draft": (str,),  # id of the draft model that speculative-config names
    "note": (str,),
    "source": (str, list),
}
SECTION_KEYS: Mapping[str, tuple[type, ...]] = {
    "status": (str,),
    "evidence": (str,),
    "note": (str,),
    "gpu": (str,),  # part of the NVML name the evidence is for
    "gpus": (int,),  # how many GPUs the evidence is for
    "args": (dict,),
    "env": (dict,),
    "expected": (dict,),
    "min_acceptance": (
        int,
        float,
    ),  # share of drafted tokens that the model has to accept before the server is ready
    "remove": (list,),  # inherited flags or variables to drop
    "variants": (list,),
}
VARIANT_KEYS = {key: types for key, types in SECTION_KEYS.items() if key != "variants"}
TOP_KEYS: Mapping[str, tuple[type, ...]] = {
    "model": (dict,),
    "args": (dict,),
    "env": (dict,),
    "target": (dict,),
    "quality": (dict,),
}
# Thresholds of `nibble eval` for this model; bench/quality/thresholds.py has what they mean.
QUALITY_KEYS: Mapping[str, tuple[type, ...]] = dict.fromkeys(
    ("max_kl", "min_top1", "min_tools", "min_score"), (int, float)
)


@dataclass(frozen=True)
class Problem:
    """A mistake in a recipe file: key (`target.gb10.args.moe-backend`), message, suggestion."""

    file: str
    key: str
    message: str
    suggestion: str = ""

    def line(self) -> str:
        hint = f"; did you mean {self.suggestion}?" if self.suggestion else ""
        return (
            f"{self.file}: {self.key}: {self.message}{hint}"
            if self.key
            else f"{self.file}: {self.message}{hint}"
        )


@dataclass(frozen=True)
class Section:
    """`[target.NAME]` or a variant. A variant inherits an empty status or evidence."""

    status: str = ""
    evidence: str = ""
    note: str = ""
    gpu: str = ""
    gpus: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    min_acceptance: float | None = None
    remove: tuple[str, ...] = ()
    variants: tuple[Section, ...] = ()

    @property
    def specificity(self) -> int:
        """The kind of GPU counts more than the number; both together count most."""
        return 2 * bool(self.gpu) + (self.gpus is not None)


@dataclass(frozen=True)
class Recipe:
    """One recipe file. `args` are long vLLM flags without dashes; tables are JSON-valued flags."""

    id: str
    path: Path
    revision: str = ""
    scheme: str = ""
    min_memory_gb: float | None = None
    download_bytes: int | None = None
    draft: str = ""
    note: str = ""
    source: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, Section] = field(default_factory=dict)
    quality: Mapping[str, float] = field(default_factory=dict)


def list_recipes(root: Path) -> list[str]:
    """Ids of all recipes under `root`/recipes, sorted."""
    folder = root / "recipes"
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.toml")
    )


def no_recipe(model_id: str, root: Path) -> NibbleError:
    """The error for an id without a recipe; it names the nearest."""
    match = difflib.get_close_matches(model_id, list_recipes(root), 1, 0.6)
    return NibbleError(
        ExitCode.USAGE,
        what=f"there is no recipe for {model_id!r}",
        expected="an id from `nibble recipes list`",
        action=f"did you mean {match[0]}?" if match else "correct the id",
    )


def load_recipe(model_id: str, root: Path) -> Recipe | None:
    """The recipe of a Hugging Face id, or None. Raises CONFIG for a file of another shape."""
    path = recipe_path(model_id, root)
    if path is None or not path.is_file():
        return None
    data = read_toml(path)
    for problem in shape_problems(data, path.relative_to(root).as_posix()):
        action = (
            f"did you mean {problem.suggestion}?"
            if problem.suggestion
            else "`nibble recipes lint` lists all problems"
        )
        raise NibbleError(
            ExitCode.CONFIG, what=f"{problem.file}: {problem.key}: {problem.message}", action=action
        )
    return _recipe(model_id, path, data)


def recipe_path(model_id: str, root: Path) -> Path | None:
    """The path of an id's recipe; None for a local path, which is not an id."""
    org, _, name = model_id.partition("/")
    if not org or not name or "/" in name or org.startswith(".") or name.startswith("."):
        return None
    return root / "recipes" / org / f"{name}.toml"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{path} cannot be read: {error}",
            expected="a TOML recipe",
            action="correct that file",
        ) from None


def _recipe(model_id: str, path: Path, data: Mapping[str, Any]) -> Recipe:
    model = data["model"]
    source = model.get("source", ())
    return Recipe(
        id=model_id,
        path=path,
        revision=model.get("revision", ""),
        scheme=model.get("scheme", ""),
        min_memory_gb=model.get("min_memory_gb"),
        download_bytes=model.get("download_bytes"),
        draft=model.get("draft", ""),
        note=model.get("note", ""),
        source=(source,) if isinstance(source, str) else tuple(source),
        args=data.get("args", {}),
        env=data.get("env", {}),
        targets={name: _section(section) for name, section in data.get("target", {}).items()},
        quality=data.get("quality", {}),
    )


def _section(raw: Mapping[str, Any]) -> Section:
    plain = {key: value for key, value in raw.items() if key not in ("remove", "variants")}
    variants = tuple(_section(variant) for variant in raw.get("variants", ()))
    return Section(**plain, remove=tuple(raw.get("remove", ())), variants=variants)


# --- shape ----------------------------------------------------------------------------------------


def shape_problems(data: Mapping[str, Any], file: str) -> Iterator[Problem]:
    """Unknown keys, and values of a wrong type, anywhere in the file."""
    yield from _keys(data, TOP_KEYS, file, "")
    if not isinstance(data.get("model"), dict):
        yield Problem(file, "model", "the table is missing")
        return
    yield from _keys(data["model"], MODEL_KEYS, file, "model")
    if not data["model"].get("id"):
        yield Problem(file, "model.id", "is missing")
    yield from _env_types(data.get("env", {}), file, "env")
    yield from _keys(data.get("quality", {}), QUALITY_KEYS, file, "quality")
    targets = data.get("target", {})
    for name, section in targets.items() if isinstance(targets, dict) else ():
        where = f"target.{name}"
        if not isinstance(section, dict):
            yield Problem(file, where, "is not a table")
            continue
        yield from _section_shape(section, SECTION_KEYS, file, where)
        for index, variant in enumerate(section.get("variants", ())):
            yield from _section_shape(variant, VARIANT_KEYS, file, f"{where}.variants[{index}]")


def _section_shape(
    section: Any, keys: Mapping[str, tuple[type, ...]], file: str, where: str
) -> Iterator[Problem]:
    if not isinstance(section, dict):
        yield Problem(file, where, "is not a table")
        return
    yield from _keys(section, keys, file, where)
    yield from _env_types(section.get("env", {}), file, f"{where}.env")
    yield from _keys(
        section.get("expected", {}), dict.fromkeys(EXPECTED_KEYS, (str,)), file, f"{where}.expected"
    )


def _keys(
    table: Any, known: Mapping[str, tuple[type, ...]], file: str, where: str
) -> Iterator[Problem]:
    if not isinstance(table, dict):
        return  # the check of its key reports it
    for key, value in table.items():
        at = f"{where}.{key}" if where else key
        if key not in known:
            near = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.5)), "")
            yield Problem(
                file,
                at,
                "unknown key" if near else f"unknown key; known are {', '.join(known)}",
                near,
            )
        elif not isinstance(value, known[key]) or (
            isinstance(value, bool) and bool not in known[key]
        ):
            names = " or ".join(kind.__name__ for kind in known[key])
            yield Problem(file, at, f"is {type(value).__name__}, not {names}")


def _env_types(env: Any, file: str, where: str) -> Iterator[Problem]:
    for name, value in env.items() if isinstance(env, dict) else ():
        if not isinstance(value, str):
            yield Problem(
                file,
                f"{where}.{name}",
                f"is {type(value).__name__}; environment values are strings",
            )

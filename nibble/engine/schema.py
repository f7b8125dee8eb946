"""What the pinned vLLM accepts: flags, choices, config keys, variables, kernel names.

`load_schema()` reads the committed snapshot `schema.json`, so that planning never imports vllm;
`live_schema.py` compares it with an installed vLLM.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("schema.json")

# 1k, 25.6k, 2M as vLLM reads them (vllm 0.32 argparse_utils.py:29: a decimal point only before k,
# m, g, t).
_SIZE = re.compile(r"[+-]?\d+|\d+(\.\d+)?[kmgt]|\d+[KMGT]")
_JSON_TYPES: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    dict: "dict",
    list: "list",
}


@dataclass(frozen=True)
class FlagSpec:
    """One flag of `vllm serve`. `name` is the long form (`--max-model-len`), `kind` the value it
    takes.

    kind: "bool" (no value), "int", "float", "str", "json", or "list" (one or more values of
    `item_kind`). negatable: `--no-X` exists. nocase: choices may be written in any case. suffix:
    8k, 2M are numbers. config_class: the class whose fields are the keys of a JSON value; empty
    where any key goes.
    """

    name: str
    kind: str
    options: tuple[str, ...] = ()
    choices: tuple[Any, ...] = ()
    default: Any = None
    item_kind: str = "str"
    negatable: bool = False
    nocase: bool = False
    suffix: bool = False
    words: tuple[str, ...] = ()
    config_class: str = ""
    accepts_plain_text: bool = False


@dataclass(frozen=True)
class Schema:
    """What one vLLM version accepts. `data` is the snapshot as `introspect.describe` wrote it."""

    data: Mapping[str, Any] = field(repr=False)

    @property
    def version(self) -> str:
        return self.data["vllm"]

    @cached_property
    def envs(self) -> frozenset[str]:
        return frozenset(self.data["envs"])

    @cached_property
    def moe_kernels(self) -> frozenset[str]:
        """Names vLLM logs for a MoE backend, over all schemes."""
        return frozenset(name for names in self.data["moe_kernels"].values() for name in names)

    @cached_property
    def linear_kernels(self) -> frozenset[str]:
        """Class names vLLM logs for an NVFP4 linear kernel."""
        return frozenset(self.data["linear_kernels"])

    @cached_property
    def attention_backends(self) -> frozenset[str]:
        return frozenset(self.data["flags"]["attention-backend"]["choices"]) - {"auto"}

    @cached_property
    def _names(self) -> dict[str, str]:
        return {
            option: name for name, raw in self.data["flags"].items() for option in raw["options"]
        }

    def flag(self, name: str) -> FlagSpec | None:
        """The flag called `name`: `--max_model_len`, `max-model-len`, `-tp`,
        `--no-enable-prefix-caching`; or None.
        """
        option = _option(name)
        found = self._names.get(option)
        if found is None and option.startswith("--no-"):
            spec = self.flag("--" + option[5:])
            return spec if spec is not None and spec.negatable else None
        return None if found is None else _flag_spec(found, self.data["flags"][found])

    def flags(self) -> Iterator[FlagSpec]:
        for name, raw in self.data["flags"].items():
            yield _flag_spec(name, raw)

    def suggest(self, name: str) -> str:
        """The long flag closest to a misspelled one; empty where none is close."""
        longs = [f"--{n}" for n in self.data["flags"]]
        return closest(_option(name), longs)

    def env_exists(self, name: str) -> bool:
        return name in self.envs

    def check_value(self, name: str, value: Any) -> str | None:
        """Why vLLM would refuse `value` for the flag, as a sentence; None where it would not."""
        spec = self.flag(name)
        if spec is None:
            return _unknown_flag(name, self.suggest(name))
        if spec.kind == "bool":
            return _check_bool(spec, value)
        if spec.kind == "json":
            return _first(self._check_json_value(spec, value))
        if spec.kind == "list":
            items = value if isinstance(value, (list, tuple)) else [value]
            return _first(_check_scalar(spec, spec.item_kind, item) for item in items)
        return _check_scalar(spec, spec.kind, value)

    def check_json(self, name: str, value: Any) -> list[str]:
        """Every key and value in a JSON flag that vLLM's config class does not have, each with
        its path.
        """
        spec = self.flag(name)
        if spec is None:
            return [_unknown_flag(name, self.suggest(name))]
        if spec.kind != "json":
            return [f"{spec.name} does not take a JSON object"]
        return [problem for problem in self._check_json_value(spec, value) if problem]

    def _check_json_value(self, spec: FlagSpec, value: Any) -> Iterator[str | None]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                if not spec.accepts_plain_text:
                    yield f"{spec.name} takes JSON, not {value!r}"
                return
        if isinstance(value, Mapping) and spec.config_class:
            # speculative-config may write its keys with dashes (vllm 0.32 arg_utils.py:2086).
            dashes = spec.name == "--speculative-config"
            keys = {key.replace("-", "_") if dashes else key: part for key, part in value.items()}
            yield from self._check_class(spec.config_class, keys, spec.name)
        elif spec.config_class:
            yield f"{spec.name} takes a JSON object, not {value!r}"

    def _check_class(self, cls: str, value: Mapping[str, Any], path: str) -> Iterator[str]:
        described = self.data["classes"][cls]
        for key, part in value.items():
            spec = described["fields"].get(key)
            if spec is not None:
                yield from self._check_typed(spec, part, f"{path}.{key}")
            elif not described.get("open"):
                hint = closest(key, described["fields"])
                did = f"; did you mean {hint}?" if hint else ""
                yield f"{path} has no key {key!r} in vLLM {self.version}{did}"

    def _check_typed(self, spec: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
        if isinstance(value, Mapping):
            if "class" in spec:
                yield from self._check_class(spec["class"], value, path)
            for key, part in value.items() if "values" in spec else ():
                yield from self._check_typed(spec["values"], part, f"{path}.{key}")
        if isinstance(value, list) and "items" in spec:
            for part in value:
                yield from self._check_typed(spec["items"], part, path)
        if not _fits(spec["type"], value):
            yield f"{path} takes {spec['type'].replace('|', ' or ')}, not {value!r}"
        elif isinstance(value, (str, int)) and not _chosen(spec, value):
            yield _not_a_choice(path, value, spec["choices"])


@lru_cache(maxsize=1)
def load_schema() -> Schema:
    """The committed snapshot of the pinned vLLM."""
    return Schema(json.loads(SNAPSHOT.read_text()))


def closest(word: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), "")


def _option(name: str) -> str:
    """`name` as vLLM's parser reads it: long flags with dashes for underscores, short ones as
    they are.
    """
    if name.startswith("-") and not name.startswith("--"):
        return name
    return "--" + name.removeprefix("--").replace("_", "-")


def _flag_spec(name: str, raw: Mapping[str, Any]) -> FlagSpec:
    kind, item_kind = raw["kind"], "str"
    if raw.get("nargs") == "+":
        kind, item_kind = "list", kind
    return FlagSpec(
        name=f"--{name}",
        kind={"switch": "bool", "json-or-text": "json"}.get(kind, kind),
        options=tuple(raw["options"]),
        choices=tuple(raw.get("choices", ())),
        default=raw.get("default"),
        item_kind=item_kind,
        negatable=kind == "bool",
        nocase=raw.get("nocase", False),
        suffix=raw.get("suffix", False),
        words=tuple(raw.get("words", ())),
        config_class=raw.get("class", ""),
        accepts_plain_text=kind == "json-or-text",
    )


def _unknown_flag(name: str, hint: str) -> str:
    return f"vLLM has no flag {_option(name)}" + (f"; did you mean {hint}?" if hint else "")


def _first(problems: Iterable[str | None]) -> str | None:
    return next((p for p in problems if p), None)


def _check_bool(spec: FlagSpec, value: Any) -> str | None:
    if not isinstance(value, bool):
        return f"{spec.name} takes no value; it is on or off, not {value!r}"
    return f"{spec.name} has no --no- form" if value is False and not spec.negatable else None


def _check_scalar(spec: FlagSpec, kind: str, value: Any) -> str | None:
    text = str(value).strip()
    if isinstance(value, (bool, Mapping, list)):
        return f"{spec.name} takes one value, not {value!r}"
    if kind == "int" and text.lower() not in spec.words and not _is_integer(text, spec.suffix):
        return f"{spec.name} takes a whole number, not {text}"
    if kind == "float" and not _is_number(text):
        return f"{spec.name} takes a number, not {text}"
    # A plugin's class path is a legal value where vLLM looks names up
    # (--distributed-executor-backend a.b.C).
    path_like = "." in text and kind == "str"
    if spec.choices and not path_like and not _in_choices(text, spec.choices, spec.nocase):
        return _not_a_choice(spec.name, text, spec.choices)
    return None


def _is_integer(text: str, suffix: bool) -> bool:
    return bool(_SIZE.fullmatch(text) if suffix else re.fullmatch(r"[+-]?\d+", text))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _in_choices(text: str, choices: Iterable[Any], nocase: bool) -> bool:
    # vLLM's own converters fold case and dashes together (moe-backend, attention-backend).
    fold = (lambda c: str(c).lower().replace("-", "_")) if nocase else str
    return fold(text) in {fold(choice) for choice in choices}


def _fits(types: str, value: Any) -> bool:
    """Whether a JSON value has one of the types; pydantic reads an int as a float and a number
    from text.
    """
    accepted = set(types.split("|"))
    if "any" in accepted:
        return True
    if value is None:
        return "null" in accepted
    kind = _JSON_TYPES.get(type(value), "any")
    numeric_text = kind == "str" and bool(accepted & {"int", "float"}) and _is_number(value)
    return kind in accepted or (kind == "int" and "float" in accepted) or numeric_text


def _chosen(spec: Mapping[str, Any], value: Any) -> bool:
    if "choices" not in spec or isinstance(value, bool):
        return True
    # A before-validator (type any) folds case itself; class paths of plugins pass as in
    # `_check_scalar`.
    nocase = spec.get("nocase", False) or spec["type"] == "any"
    return ("." in str(value)) or _in_choices(str(value), spec["choices"], nocase)


def _not_a_choice(where: str, value: Any, choices: Sequence[Any]) -> str:
    hint = closest(str(value).lower(), [str(c) for c in choices]) or closest(
        str(value).upper(), [str(c) for c in choices]
    )
    did = f"did you mean {hint}? " if hint else ""
    return f"{where} cannot be {value!r}: {did}one of {', '.join(map(str, choices))}"

"""Reads the models of a server with several: from the command line, or [[models]] of the user's
TOML file.

Each model is later planned and started alone, with a settings file that this module writes.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import is_folder
from nibble.settings.declare import closest
from nibble.settings.options import Settings, options
from nibble.settings.sources import MODELS

# One for the whole server.
OF_THE_SERVER = (
    *("host", "port", "control_port", "api_key", "allow_anonymous", "hf_token", "cache_dir"),
    *("config", "model", "served_model_name"),
    *("loading", "unload", "load_wait_seconds", "max_waiting"),
)
_OWN_KEYS = ("model", "aliases", "keep", "args", "env")
_CONFIG_FLAG = "--config"


@dataclass(frozen=True)
class ModelWish:
    """One model: names beside its id, whether it stays loaded, and its options, flags and
    variables.
    """

    model: str
    aliases: tuple[str, ...] = ()
    keep: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Several:
    """The models, the words of the command line without them, and the user's file as it is."""

    models: tuple[ModelWish, ...]
    words: tuple[str, ...]
    file: Mapping[str, Any]


def read_several(
    words: Sequence[str], environ: Mapping[str, str], own_switches: Sequence[str]
) -> Several | None:
    """The models where the command line names several, or the file has [[models]] and nothing
    else names one. None for a server of one model. Raises CONFIG and USAGE.
    """
    start = 0
    while start < len(words) and words[start] in own_switches:
        start += 1
    end = start
    while end < len(words) and not words[end].startswith("-"):
        end += 1
    named, rest = words[start:end], (*words[:start], *words[end:])
    path = _config_path(rest, environ)
    table = _read(path) if path else {}
    if len(named) > 1 or (named and _alias_of(named[0])[0]):
        wishes = tuple(_of_word(word) for word in named)
    elif not named and not _model_variable(environ) and MODELS in table:
        wishes = _of_table(table[MODELS], str(path))
    else:
        return None
    _refuse_equal_names(wishes)
    return Several(wishes, tuple(rest), {k: v for k, v in table.items() if k != MODELS})


def settings_file(several: Several, wish: ModelWish) -> str:
    """The text of a TOML file with the settings of one model."""
    shared = dict(several.file)
    args = {**shared.pop("args", {}), **wish.args}
    env = {**shared.pop("env", {}), **wish.env}
    values = {**shared, **wish.options}
    if wish.aliases:
        values["served_model_name"] = ",".join(wish.aliases)
    lines = [f"{_toml(key)} = {_toml(value)}" for key, value in values.items()]
    for name, table in (("args", args), ("env", env)):
        if table:
            lines += [f"[{name}]", *(f"{_toml(k)} = {_toml(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


ONE_MODEL = ("model", "served_model_name", "config")


def without_model(environ: Mapping[str, str], *fields: str) -> dict[str, str]:
    """The environment without the variables of these options. Default: those that name one model,
    its name or the user's file.
    """
    fields = fields or ONE_MODEL
    names = {name for one in fields for name in options()[one].env}
    return {name: value for name, value in environ.items() if name not in names}


def _model_variable(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "").strip() for name in options()["model"].env)


def _config_path(words: Sequence[str], environ: Mapping[str, str]) -> str:
    found = environ.get(options()["config"].env[0], "")
    for number, word in enumerate(words):
        if word == "--":
            break
        if word.startswith(f"{_CONFIG_FLAG}="):
            found = word.partition("=")[2]
        elif word == _CONFIG_FLAG and number + 1 < len(words):
            found = words[number + 1]
    return found


def _read(path: str) -> dict[str, Any]:
    """The file as it is; empty where it cannot be read, which `load_settings` reports."""
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}


def _alias_of(word: str) -> tuple[str, str]:
    """(alias, model) of `ALIAS=MODEL`; an empty alias for a path that has a `=`."""
    alias, equals, model = word.partition("=")
    if not equals or not model or "/" in alias or is_folder(Path(word)):
        return "", word
    return alias, model


def _of_word(word: str) -> ModelWish:
    alias, model = _alias_of(word)
    return ModelWish(model, (_name(alias, word),) if alias else ())


def _of_table(tables: Any, file: str) -> tuple[ModelWish, ...]:
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{MODELS} in {file} is {tables!r}"[:200],
            expected=f"one table [[{MODELS}]] for each model",
            action="correct that line",
        )
    return tuple(_of_entry(table, file) for table in tables)


def _of_entry(table: Mapping[str, Any], file: str) -> ModelWish:
    model = table.get("model")
    aliases, keep = table.get("aliases", []), table.get("keep", False)
    args, env = table.get("args", {}), table.get("env", {})
    for key, is_right, expected in (
        ("model", isinstance(model, str) and bool(model), "a Hugging Face id or a folder"),
        (
            "aliases",
            isinstance(aliases, list) and all(isinstance(one, str) for one in aliases),
            "a list of names",
        ),
        ("keep", isinstance(keep, bool), "true or false"),
        ("args", isinstance(args, dict), "a table of vLLM's flags"),
        ("env", isinstance(env, dict), "a table of variables"),
    ):
        if not is_right:
            what = f"{key} of a [[{MODELS}]] in {file} is {table.get(key)!r}"[:200]
            raise NibbleError(
                ExitCode.CONFIG, what=what, expected=expected, action="correct that line"
            )
    more = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    _check_keys(more, file)
    names = tuple(_name(one, file) for one in aliases)
    return ModelWish(str(model), names, keep, more, args, env)


def _check_keys(values: Mapping[str, Any], file: str) -> None:
    allowed = [name for name in Settings.model_fields if name not in OF_THE_SERVER]
    for key in values:
        if key in OF_THE_SERVER:
            what = f"a [[{MODELS}]] in {file} has {key!r}, which is one for the whole server"
            raise NibbleError(ExitCode.CONFIG, what=what, action="write it at the top of the file")
        if key not in allowed:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"a [[{MODELS}]] in {file} has the unknown key {key!r}",
                expected="an option of nibble, aliases, keep, args or env",
                action=closest(key, [*allowed, *_OWN_KEYS]),
            )


def _name(alias: str, where: str) -> str:
    if not alias.isprintable() or any(one in alias for one in ", \t") or alias == "default":
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{alias!r} in {where} is not usable as an alias",
            expected="a name without blanks and commas, other than default (the first model)",
            action="choose another name",
        )
    return alias


def _refuse_equal_names(wishes: Sequence[ModelWish]) -> None:
    seen: set[str] = set()
    for name in (name for wish in wishes for name in (wish.model, *wish.aliases)):
        if name in seen:
            raise equal_names(name)
        seen.add(name)


def equal_names(name: str) -> NibbleError:
    """The error for two models with one name."""
    return NibbleError(
        ExitCode.CONFIG,
        what=f"two models have the name {name!r}",
        expected="a name for each model",
        action="remove one, or give another alias",
    )


def _toml(value: Any) -> str:
    """A value or a quoted key in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)

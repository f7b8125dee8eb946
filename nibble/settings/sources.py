"""Resolves nibble's options from command line, environment, the user's TOML file and defaults.

Precedence: command line > VLLM_EXTRA_ARGS > other environment > user TOML > known risk (rules/) >
recipe > target > nibble's default > vLLM's default. This module keeps the origin of every value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, TomlConfigSettingsSource

from nibble.errors import ExitCode, NibbleError
from nibble.settings.declare import closest
from nibble.settings.options import Settings, options
from nibble.settings.secrets import read_secret

LayerName = Literal["command line", "environment", "file", "default"]


@dataclass(frozen=True)
class Origin:
    """A value's layer, and the exact name that the user wrote (`PORT`, `--port`, `nibble.toml`)."""

    layer: LayerName
    name: str

    def __str__(self) -> str:
        return self.name if self.layer == "default" else f"{self.layer} {self.name}"


@dataclass(frozen=True)
class Loaded:
    """Settings, the origin of every field, and [args] and [env] of the user's TOML file.

    `given` has every value of a field as it was written, the winning one last.
    """

    settings: Settings
    origins: Mapping[str, Origin]
    given: Mapping[str, tuple[tuple[Origin, Any], ...]]
    file_args: Mapping[str, Any]
    file_env: Mapping[str, str]
    notices: tuple[str, ...]


MODELS = "models"  # the table of several models in the user's file
DEFAULT = Origin("default", "nibble's default")


class _Layer(PydanticBaseSettingsSource):
    """One layer of collected values, as a source of pydantic-settings."""

    def __init__(self, cls: type[BaseSettings], values: Mapping[str, Any]) -> None:
        super().__init__(cls)
        self.values = dict(values)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.values


def load_settings(
    cli: Mapping[str, Any], environ: Mapping[str, str], notices: tuple[str, ...] = ()
) -> Loaded:
    """Resolve all layers.

    `cli` maps field names to values of the command line. `environ` has passed `environment.accept`.
    Raises USAGE for an invalid value, with the name that the user wrote; CONFIG for two names, or X
    and X_FILE, with different values.
    """
    from_env, env_names = _environment_layer(environ)
    path = cli.get("config") or from_env.get("config")
    from_file, file_args, file_env = _file_layer(Path(path)) if path else ({}, {}, {})
    given: dict[str, tuple[tuple[Origin, Any], ...]] = {}
    layers: tuple[tuple[LayerName, Mapping[str, Any], Callable[[str], str]], ...] = (
        ("file", from_file, lambda _: str(path)),
        ("environment", from_env, env_names.__getitem__),
        ("command line", cli, _cli_name),
    )
    for layer, values, name_of in layers:
        for field, value in values.items():
            given[field] = (*given.get(field, ()), (Origin(layer, name_of(field)), value))
    origins = {
        name: given[name][-1][0] if name in given else DEFAULT for name in Settings.model_fields
    }
    _reject_two_models(cli, from_env)

    class Bound(Settings):
        @classmethod
        def settings_customise_sources(cls, settings_cls: type[BaseSettings], *_: Any, **__: Any):  # type: ignore[override]
            return tuple(_Layer(settings_cls, layer) for layer in (cli, from_env, from_file))

    try:
        settings = Bound()
    except ValidationError as error:
        raise _usage_error(error, origins) from None
    return Loaded(settings, origins, given, file_args, file_env, notices)


def check_option(field: str, value: Any, written: str) -> None:
    """Check a vLLM flag's value against the limits of nibble's option; `written` names it in the
    error.
    """
    try:
        Settings.__pydantic_validator__.validate_assignment(
            Settings.model_construct(), field, value
        )
    except ValidationError as error:
        raise _usage_error(error, {field: Origin("command line", written)}) from None


def _cli_name(field: str) -> str:
    return options()[field].flag or "argument"


def _environment_layer(environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Field -> value, and field -> the name used. An empty variable counts as unset."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for field, option in options().items():
        found: dict[str, str] = {}
        for name in option.env:
            value = read_secret(name, environ) if option.secret else environ.get(name)
            if value is not None and value.strip() != "":
                found[name] = value
        if len(set(found.values())) > 1:
            shown = " and ".join(
                found if option.secret else [f"{n}={v!r}" for n, v in found.items()]
            )
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{shown} differ",
                expected="one of them, or the same value",
                action="unset one of them",
            )
        if found:
            names[field], values[field] = next(iter(found.items()))
    return values, names


def _file_layer(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The options, [args] and [env] of the user's TOML file."""

    try:
        table = (
            TomlConfigSettingsSource(Settings, toml_file=path).toml_data if path.is_file() else None
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NibbleError(
            ExitCode.CONFIG, what=f"{path} is not valid TOML: {error}", action="correct that line"
        ) from None
    except PermissionError:
        table = None
    if table is None:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"the settings file {path} cannot be read",
            expected="a TOML file",
            action="check NIBBLE_CONFIG",
        )
    table.pop(MODELS, None)  # settings/models.py reads it
    args, env = table.pop("args", {}), table.pop("env", {})
    for key, value in (("args", args), ("env", env)):
        if not isinstance(value, dict):
            what = f"{key} in {path} is {value!r}"
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                expected=f"a table [{key}] of names and values",
                action="correct that line",
            )
    for key in table:
        if key not in Settings.model_fields:
            hint = closest(key, [*Settings.model_fields, "args", "env", MODELS])
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{path} has the unknown key {key!r}",
                expected="an option of nibble",
                action=hint,
            )
        if options()[key].secret:
            action = f"write it to a file and set {options()[key].env[0]}_FILE to that file"
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"{path} holds the secret {key!r}",
                expected="a settings file without secrets",
                action=action,
            )
    return table, dict(args), {name: str(value) for name, value in env.items()}


def _reject_two_models(cli: Mapping[str, Any], from_env: Mapping[str, Any]) -> None:
    given, variable = cli.get("model"), from_env.get("model")
    if given and variable and given != variable:
        what = f"the command line has the model {given!r} and the environment has {variable!r}"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="one model",
            action="unset MODEL, HF_MODEL and MODEL_PATH or drop the argument",
        )


def _usage_error(error: ValidationError, origins: Mapping[str, Origin]) -> NibbleError:
    first = error.errors()[0]
    field = str(first["loc"][0])
    option, origin = options()[field], origins[field]
    written = f"{field} in {origin.name}" if origin.layer == "file" else origin.name
    shown = "not usable" if option.secret else repr(str(first["input"]))
    return NibbleError(
        ExitCode.USAGE,
        what=f"{written} is {shown}",
        expected=option.expected,
        action=f"correct or unset {written}",
    )

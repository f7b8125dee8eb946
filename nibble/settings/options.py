"""All options of nibble, each declared once in `groups/`.

`sources.py` resolves the values. Help, environment names and the table in docs/operations.md come
from the declarations.
"""

from __future__ import annotations

from typing import Any

from pydantic_settings import BaseSettings, SettingsConfigDict

from nibble.settings.declare import Option, option_of
from nibble.settings.groups.cluster import ClusterOptions
from nibble.settings.groups.engine import EngineOptions
from nibble.settings.groups.files import FilesOptions
from nibble.settings.groups.fleet import FleetOptions
from nibble.settings.groups.model import ModelOptions
from nibble.settings.groups.requests import RequestsOptions
from nibble.settings.groups.server import ServerOptions


# pydantic collects the fields of the last base first.
class Settings(
    FilesOptions,
    ClusterOptions,
    EngineOptions,
    RequestsOptions,
    FleetOptions,
    ServerOptions,
    ModelOptions,
    BaseSettings,
):
    """All options, typed. Construct them through `sources.load_settings`."""

    model_config = SettingsConfigDict(extra="forbid", protected_namespaces=())


def options() -> dict[str, Option]:
    """Field name -> declaration, in the order of the docs table."""
    return {name: option_of(field) for name, field in Settings.model_fields.items()}


def default_of(name: str) -> Any:
    """The default of an option by field name."""
    return Settings.model_fields[name].default

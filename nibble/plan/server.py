"""The flags of the server around the engine, which nibble owns. Pure."""

from __future__ import annotations

from pathlib import Path

from nibble.plan.choice import OURS, Choice, Choices
from nibble.plan.inputs import Ingredients

GATE = "nibble.engine.gate.asgi.Gate"
# Options that are these flags; a user sets the option, never the flag (engine/flags.py OWNED).
OPTIONS = {"host": "--host", "port": "--port", "drain_seconds": "--shutdown-timeout"}


def model_argument(parts: Ingredients) -> str:
    """What vLLM gets as the model: a folder where it is on this disk, else its Hub id."""
    if parts.local.model is not None:
        return str(parts.local.model)
    checkpoint = parts.checkpoint
    if checkpoint is not None and checkpoint.path is not None:
        return str(checkpoint.path)
    return str(parts.loaded.settings.model)


def served_names(parts: Ingredients) -> tuple[str, ...]:
    """NIBBLE_SERVED_MODEL_NAME, the model's id (a folder's name) and `default`."""
    model = str(parts.loaded.settings.model)
    name = Path(model).resolve().name if parts.checkpoint and parts.checkpoint.is_local else model
    extra = parts.loaded.settings.served_model_name
    return tuple(dict.fromkeys([*([extra] if extra else []), name, "default"]))


def server_flags(parts: Ingredients) -> Choices:
    """What no option sets by itself."""
    names = "every model answers to its id and to `default`"
    gate = "refuses requests without the key, before ready and while draining"
    return {
        "--served-model-name": Choice(list(served_names(parts)), OURS, names),
        "--middleware": Choice(GATE, OURS, gate),
    }

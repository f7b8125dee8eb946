"""The flags of the API server, which nibble sets itself. Pure."""

from __future__ import annotations

from pathlib import Path

from nibble.plan.choice import OURS, Choice, Choices
from nibble.plan.inputs import PlanInputs

GATE = "nibble.engine.gate.asgi.Gate"
# Options that set these flags. A user sets the option; nibble refuses the flag (engine/flags.py
# OWNED).
OPTIONS = {"host": "--host", "port": "--port", "drain_seconds": "--shutdown-timeout"}


def model_argument(inputs: PlanInputs) -> str:
    """vLLM's model argument: a folder if the model is on this disk, else its Hub id."""
    if inputs.local.model is not None:
        return str(inputs.local.model)
    checkpoint = inputs.checkpoint
    if checkpoint is not None and checkpoint.path is not None:
        return str(checkpoint.path)
    return str(inputs.loaded.settings.model)


def served_names(inputs: PlanInputs) -> tuple[str, ...]:
    """NIBBLE_SERVED_MODEL_NAME, the model's id (a folder's name) and `default`."""
    model = str(inputs.loaded.settings.model)
    name = Path(model).resolve().name if inputs.checkpoint and inputs.checkpoint.is_local else model
    extra = (inputs.loaded.settings.served_model_name or "").split(",")
    more = [one.strip() for one in extra if one.strip()]
    return tuple(dict.fromkeys([*more, name, "default"]))


def server_flags(inputs: PlanInputs) -> Choices:
    """Flags that no option sets."""
    names = "every model answers to its id and to `default`"
    gate = "refuses requests without the key, before ready and while draining"
    return {
        "--served-model-name": Choice(list(served_names(inputs)), OURS, names),
        "--middleware": Choice(GATE, OURS, gate),
    }

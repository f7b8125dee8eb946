"""The request limits of a plan: variables for the gate inside vLLM, with reasons. Pure."""

from __future__ import annotations

from dataclasses import fields

from nibble.checkpoint import Checkpoint
from nibble.engine.guard.limits import TEXT_BODY_BYTES, RequestLimits
from nibble.plan.choice import Choice, Choices
from nibble.settings.options import options
from nibble.settings.sources import Loaded

# Ten photographs of 9 MB, or a minute of video, in base64.
MEDIA_BODY_BYTES = 128 << 20
_MEDIA_KEYS = (
    *("vision_config", "vision_encoder", "audio_config"),
    *("audio_encoder_config", "encoder_config"),
)


def limits_environment(loaded: Loaded, checkpoint: Checkpoint | None) -> Choices:
    """The limits that the user set, and always the size of a body, whose default depends on the
    model.
    """
    limits: Choices = {}
    for field in fields(RequestLimits):
        origin, value = loaded.origins[field.name], getattr(loaded.settings, field.name)
        if value is not None and origin.layer != "default":
            limits[options()[field.name].env[0]] = Choice(str(value), str(origin))
    return {"NIBBLE_MAX_BODY_BYTES": _body_bytes(checkpoint)} | limits


def _body_bytes(checkpoint: Checkpoint | None) -> Choice:
    source = "nibble's default"
    if checkpoint is None:
        return Choice(
            str(MEDIA_BODY_BYTES), source, "the model may take images or audio; unknown until pull"
        )
    if checkpoint.has_vision or any(checkpoint.config.get(key) for key in _MEDIA_KEYS):
        return Choice(str(MEDIA_BODY_BYTES), source, "the model takes images, audio or video")
    return Choice(str(TEXT_BODY_BYTES), source, "the model takes only text")

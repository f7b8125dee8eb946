"""Finds the model that a request names: the field `model` of its JSON or of its form."""

from __future__ import annotations

import re

import msgspec

from nibble.engine.guard.refusal import Refused

_BOUNDARY = re.compile(rb'boundary="?([^";,\s]{1,200})"?')
_NAME = re.compile(rb'(?im)^content-disposition:[^\r\n]*[;\s]name="model"')
_LONGEST_HEAD = 1024


class _Named(msgspec.Struct):
    model: str | None = None


_DECODER = msgspec.json.Decoder(_Named)


def model_of(body: bytes, content_type: bytes) -> str | None:
    """The named model; None without one. Raises Refused for a body that is neither JSON nor a
    form.
    """
    if content_type.startswith(b"multipart/form-data"):
        return _of_form(body, content_type)
    try:
        return _DECODER.decode(body).model
    except msgspec.ValidationError as error:
        raise Refused(400, f"The field `model` is not usable: {str(error)[:200]}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not valid JSON in UTF-8: {str(error)[:200]}") from None


def _of_form(body: bytes, content_type: bytes) -> str | None:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise Refused(400, "The form has no boundary.")
    named = None
    start = 0
    delimiter = b"--" + found[1]
    while (at := body.find(delimiter, start)) >= 0:
        start = at + len(delimiter)
        head_end = body.find(b"\r\n\r\n", start, start + _LONGEST_HEAD)
        if head_end >= 0 and _NAME.search(body, start, head_end):
            end = body.find(b"\r\n" + delimiter, head_end + 2)
            # The last of equal fields counts, as in vLLM's form.
            named = body[head_end + 4 : end].decode(errors="replace") if end >= 0 else named
    return named or None

"""Prepares text from elsewhere (a log, a record, a server's answer) for a terminal."""

from __future__ import annotations

import re
import unicodedata

# ECMA-48: CSI with its parameters, OSC and other strings up to their end, and the two-character
# sequences.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*["
    r" -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_LAYOUT = "\n\t"
# Controls of the writing direction show text in another order than it has; line separators end a
# line.
_HIDDEN = frozenset(
    "\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def printable(text: str) -> str:
    """`text` without escape sequences and control characters; line breaks and tabs stay."""
    text = _ESCAPES.sub("", text)
    return "".join(one for one in text if one in _LAYOUT or not _is_control(one))


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in _HIDDEN

"""Prepares a text for TokenMonster's search: normalization, and the marks of capcode level 1."""

from __future__ import annotations

import re
import unicodedata

NFD, LOWER, NO_ACCENTS, PLAIN_QUOTES, COLLAPSE, TRIM, LEADING_SPACE, UNIX_LINES = (
    1 << bit for bit in range(8)
)
QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
SPACES = "".join(map(chr, range(33)))

# Capcode level 1: the mark means "delete the next character", which is an added space.
DELETE, SUBSTITUTE = "\x7f", "\x14"
APOSTROPHES = ("'", "\u2019")


def normalize(text: str, flags: int) -> str:
    """`text` normalized by the flags of a vocabulary, in upstream's order."""
    if flags & UNIX_LINES:
        text = text.replace("\r\n", "\n")
    if flags & PLAIN_QUOTES:
        text = text.translate(QUOTES)
    if flags & COLLAPSE:
        text = re.sub("  +", " ", text)
    if flags & TRIM:
        text = text.strip(SPACES)
    if flags & LEADING_SPACE and text and not text.startswith(" "):
        text = " " + text
    if flags & (NFD | NO_ACCENTS):
        text = unicodedata.normalize("NFD", text)
    if flags & NO_ACCENTS:
        text = "".join(c for c in text if unicodedata.category(c) != "Mn")
    return text.lower() if flags & LOWER else text


def mark_boundaries(text: str) -> str:
    """`text` with a mark and a space before each word and number that has no space before it."""
    marked: list[str] = []
    last = "\0"
    kind = last_kind = before_kind = "C"  # L letter, M mark, N number, …
    for character in text:
        kind = unicodedata.category(character)[0]
        follows = last == " "
        if kind == "L":
            follows |= last_kind in "LM" or (before_kind == "L" and last in APOSTROPHES)
        elif kind == "N":
            follows |= last_kind == "N"
        else:
            follows = True
        if not follows:
            marked.append(DELETE + " ")
        marked.append(SUBSTITUTE if character == DELETE else character)
        before_kind, last_kind, last = last_kind, kind, character
    return "".join(marked)


def unmark_boundaries(data: bytes) -> bytes:
    """`data` without the marks and the byte after each mark."""
    return re.sub(rb"\x7f.?", b"", data, flags=re.DOTALL)

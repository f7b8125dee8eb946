"""Reads a TokenMonster .vocab file, version 1. Integers are little-endian.

    u8   capcode, charset, normalization, level, reserve, 3 unused
    u24  id of the unknown token, number of ids in use, number of ids, number of tokens, id of the
         delete token
    u8   length of the longest token
    per token, shorter ones first: u8 length and bytes; u8 flags, u8 words; u24 first and u24 second
         alternative, each the place of a shorter token that it begins with; u24 id; f32 score
    u8   the class of each byte (256)
    u24  number of deleted tokens; per token: u8 length and bytes, u24 id, f32 score

16777215 stands for "none".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nibble.engine.plugin.tokenmonster import encoder
from nibble.engine.plugin.tokenmonster.text import mark_boundaries, normalize, unmark_boundaries

NONE = 0xFFFFFF
LONGEST_TOKEN = 40
RAW, UTF8 = 0, 1
NO_CAPCODE, BOUNDARIES = 0, 1
SPECIAL = 64


class VocabularyError(ValueError):
    """A file is not a vocabulary, or of a kind that nibble does not support."""


@dataclass(frozen=True)
class Token:
    """A token. `first` and `second` are the places of its alternatives in the vocabulary.

    flags: 1 ends with a letter, 2 begins with a letter, 4 begins with a space, 8 ends on capcode,
    16 begins on capcode, 32 one word after a space, 64 special, 128 all letters or no letters.
    """

    text: bytes
    flags: int
    words: int
    first: int | None
    second: int | None
    id: int


class Vocabulary:
    """The content of a vocabulary file. Immutable, so threads and forked processes may share it."""

    def __init__(
        self,
        tokens: Sequence[Token],
        begins: bytes,
        *,
        capcode: int = NO_CAPCODE,
        charset: int = UTF8,
        normalization: int = 0,
        unknown_id: int | None = None,
        delete_id: int | None = None,
    ) -> None:
        self.tokens = tuple(tokens)
        self.begins = begins
        self.capcode, self.charset, self.normalization = capcode, charset, normalization
        self.unknown_id, self.delete_id = unknown_id, delete_id
        self.text_of = {token.id: token.text for token in tokens}
        self.special_ids = frozenset(token.id for token in tokens if token.flags & SPECIAL)
        self.longest = max((len(token.text) for token in tokens), default=0)
        self._search = encoder.Prefixes([token.text for token in tokens])

    @property
    def max_id(self) -> int:
        return max(self.text_of, default=-1)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. A byte that no token begins with becomes the unknown token, if the
        vocabulary has one, and is otherwise left out.
        """
        data = normalize(text, self.normalization)
        if self.capcode == BOUNDARIES:
            data = mark_boundaries(data)
        return encoder.encode(self, self._search, data.encode(errors="replace"))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of a text. Unknown ids are ignored."""
        return self.unmark(b"".join(self.text_of.get(token, b"") for token in ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, with U+FFFD for bytes that are not UTF-8."""
        return self.decode_bytes(ids).decode(errors="replace")

    def unmark(self, data: bytes) -> bytes:
        """The bytes of tokens without capcode's marks and the spaces that they delete."""
        return unmark_boundaries(data) if self.capcode == BOUNDARIES else data


def load(path: Path) -> Vocabulary:
    """Read a vocabulary file. Raises VocabularyError if it is invalid or not supported."""
    try:
        return _parse(_Reader(path.read_bytes()))
    except (struct.error, IndexError, ValueError) as error:
        raise VocabularyError(
            f"{path} is not a readable TokenMonster vocabulary: {error}"
        ) from None


def _parse(reader: _Reader) -> Vocabulary:
    capcode, charset, normalization, _level, _reserve, *_ = (reader.u8() for _ in range(8))
    if charset > 2 or capcode > 2:
        raise VocabularyError(f"charset {charset} and capcode {capcode} do not exist")
    if charset not in (RAW, UTF8) or capcode not in (NO_CAPCODE, BOUNDARIES):
        raise VocabularyError("expected UTF-8 without capcode (…-nocapcode-…)")
    unknown, _in_use, ids, count, delete = (reader.u24() for _ in range(5))
    longest = reader.u8()
    tokens = [reader.token() for _ in range(count)]
    for place, token in enumerate(tokens):
        if token.id >= ids or len(token.text) > min(longest, LONGEST_TOKEN):
            raise VocabularyError(
                f"token {place} has id {token.id} of {ids} and {len(token.text)} bytes"
            )
        if any(other is not None and other >= place for other in (token.first, token.second)):
            raise VocabularyError(f"token {place} has an alternative behind it")
    begins = reader.take(256)
    for _ in range(reader.u24()):
        reader.take(reader.u8() + 3 + 4)
    if not reader.is_at_end:
        raise VocabularyError("it goes on after its end")
    return Vocabulary(
        tokens,
        begins,
        capcode=capcode,
        charset=charset,
        normalization=normalization,
        unknown_id=None if unknown == NONE else unknown,
        delete_id=None if delete == NONE else delete,
    )


class _Reader:
    """Reads fields in the order of the file. Raises IndexError past the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        if self.position + count > len(self.data):
            raise IndexError("it ends too early")
        self.position += count
        return self.data[self.position - count : self.position]

    def u8(self) -> int:
        return self.take(1)[0]

    def u24(self) -> int:
        return int.from_bytes(self.take(3), "little")

    def place(self) -> int | None:
        value = self.u24()
        return None if value == NONE else value

    def token(self) -> Token:
        text = self.take(self.u8())
        token = Token(text, self.u8(), self.u8(), self.place(), self.place(), self.u24())
        self.take(4)  # score, which only training uses
        return token

    @property
    def is_at_end(self) -> bool:
        return self.position == len(self.data)

"""TokenMonster's search: at each position it takes the longest token or one of two shorter
alternatives, whichever has the best score together with the token after it.

The score of a pair is upstream's: it counts characters and completed words, and subtracts for cut
words. After a delete token (capcode), the second token may also begin with a space that the text
does not have, which costs one point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nibble.engine.plugin.tokenmonster.vocabulary import Token, Vocabulary

(
    ENDS_WITH_LETTER,
    BEGINS_WITH_LETTER,
    BEGINS_WITH_SPACE,
    ENDS_ON_CAPCODE,
    BEGINS_ON_CAPCODE,
    ONE_WORD,
) = (1 << bit for bit in range(6))
# Values of Vocabulary.begins, the table of the class of each byte.
LETTER, SPACE = 1, 12


class Prefixes:
    """Finds the longest token that a text begins with."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.place = {text: place for place, text in enumerate(texts)}
        lengths: defaultdict[int, set[int]] = defaultdict(set)
        for text in texts:
            if text:
                lengths[text[0]].add(len(text))
        self.lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def longest(self, data: bytes, start: int, stop: int) -> tuple[int, int] | None:
        """(place, length) of the longest token at the start of data[start:stop], or None."""
        if start < stop:
            for length in self.lengths.get(data[start], ()):
                if start + length <= stop:
                    place = self.place.get(data[start : start + length])
                    if place is not None:
                        return place, length
        return None


class Choice(NamedTuple):
    """A token (`first`, its place) with the token after it, and the score of the pair."""

    score: int
    first: int
    advance: int
    next_place: int
    next_length: int
    is_deleted_space: bool


def encode(vocabulary: Vocabulary, prefixes: Prefixes, text: bytes) -> list[int]:
    """The ids of `text`, which is already normalized and marked."""
    search = _Search(vocabulary, prefixes, text)
    ids: list[int] = []
    position = 0
    while position < len(text):
        found = prefixes.longest(text, position, min(len(text), position + vocabulary.longest))
        if found is None:
            ids += [] if vocabulary.unknown_id is None else [vocabulary.unknown_id]
            position += 1
            continue
        place, length = found
        deleted = 0  # 1 if the current token begins with a space that the text does not have
        while (choice := search.best(position, place, length, deleted)) is not None:
            ids.append(vocabulary.tokens[choice.first].id)
            position += choice.advance
            place, length = choice.next_place, choice.next_length
            deleted = int(choice.is_deleted_space)
            if deleted and vocabulary.delete_id is not None:
                ids.append(vocabulary.delete_id)
        ids.append(vocabulary.tokens[place].id)
        position += length
    return ids


class _Search:
    def __init__(self, vocabulary: Vocabulary, prefixes: Prefixes, text: bytes) -> None:
        self.vocabulary, self.prefixes = vocabulary, prefixes
        self.end = len(text)
        self.text = text + b"\0"

    def best(self, position: int, place: int, length: int, deleted: int) -> Choice | None:
        """The best choice for the current token at `place`. None at the end of the text, and if a
        whole word is followed by a space.
        """
        token = self.vocabulary.tokens[place]
        after = position + length
        if after >= self.end or (
            token.flags & ONE_WORD and self.vocabulary.begins[self.text[after]] == SPACE
        ):
            return None
        choices = list(self._choices(position, place, length, deleted))
        # `max` returns the first of equal scores, so choices with a deleted space come last.
        choices.sort(key=lambda choice: choice.is_deleted_space)
        return max(choices, key=lambda choice: choice.score, default=None)

    def _choices(self, position: int, place: int, length: int, deleted: int) -> Iterator[Choice]:
        """Choices with the current token, then with its alternatives."""
        token = self.vocabulary.tokens[place]
        yield from self._followers(position, place, length, deleted, None)
        for other in (token.first, token.second):
            if other is None:
                return
            advance = len(self.vocabulary.tokens[other].text) - deleted
            yield from self._followers(position, other, advance, deleted, length)

    def _followers(
        self, position: int, place: int, advance: int, deleted: int, original: int | None
    ) -> Iterator[Choice]:
        """Choices for the token at `place`. `original`: length of the current token, if `place` is
        an alternative to it.
        """
        vocabulary, start = self.vocabulary, position + advance
        found = self.prefixes.longest(self.text, start, min(self.end, start + vocabulary.longest))
        if found is None:
            return
        next_place, next_length = found
        first, second = vocabulary.tokens[place], vocabulary.tokens[next_place]
        begins = vocabulary.begins[self.text[start + next_length]]
        score = _score(first, second, begins, advance + next_length, deleted, original, False)
        yield Choice(score, place, advance, next_place, next_length, False)
        if (
            vocabulary.delete_id is None
            or not second.flags & BEGINS_WITH_LETTER
            or begins != LETTER
            or second.words
        ):
            return
        spaced = b" " + self.text[start : min(self.end, start + vocabulary.longest - 1)]
        longer = self.prefixes.longest(spaced, 0, len(spaced))
        if longer is None or longer[1] <= next_length + 1:
            return
        next_place, next_length = longer[0], longer[1] - 1
        begins = vocabulary.begins[self.text[start + next_length]]
        score = _score(
            first,
            vocabulary.tokens[next_place],
            begins,
            advance + next_length,
            deleted,
            original,
            True,
        )
        yield Choice(score, place, advance, next_place, next_length, True)


def _score(
    first: Token,
    second: Token,
    begins: int,
    covered: int,
    deleted: int,
    original: int | None,
    spaced: bool,
) -> int:
    """Upstream's score of `first` and `second`, which cover `covered` bytes.

    begins: class of the byte after them; deleted: `first` begins with a space that the text does
    not have; spaced: `second` does.
    """
    words = first.words - deleted
    gain = (
        covered
        + (first.flags >> 7)
        + (second.flags >> 7)
        + max(0, words - 1)
        + max(0, second.words - 1)
    )
    gain += (begins >> 2 & 1) + (words + second.words + (begins >> 3)) * 100
    cut = first.flags & 1
    if not spaced:
        gain += second.flags >> 2 & 1
        cut &= second.flags >> 1
    loss = (
        cut * 103
        + (first.flags >> 3 & 1 & second.flags >> 4) * 100
        + (second.flags & 1 & begins) * 3
    )
    if original is not None:
        loss += (covered < original) * 100 + (covered == original) * 10000
    return gain - loss - spaced

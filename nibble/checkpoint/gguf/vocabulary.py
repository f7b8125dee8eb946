"""The vocabulary of a GGUF file, and how llama.cpp splits text with it.

`encode` is a plain reading of the file's tokens, merges and scores, independent of the library
that computes with the tokenizer nibble writes. Both must agree (check.py).
"""

from __future__ import annotations

import heapq
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from nibble.checkpoint.gguf.file import GgufFile
from nibble.errors import ExitCode, NibbleError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # SentencePiece writes a space so

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """What `tokenizer.ggml.pre` stands for.

    `patterns` cut the text one after the other. `whole_words`: a word that is a token is not
    merged from its characters. `begins`: a text begins with the BOS token unless the file says
    otherwise. `composed`: letters and combining marks are composed (NFC), as the models' own
    tokenizers do and llama.cpp does not.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False
    composed: bool = False


_DIGITS_AND_WORDS = Splitting((r"\p{N}", _WORDS))
_LLAMA_BPE = Splitting((_LLAMA3,), whole_words=True, begins=True)
# The names and what they do are llama.cpp's (src/llama-vocab.cpp, September 2026).
SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": Splitting((_WORDS,)),
    "smollm": _DIGITS_AND_WORDS,
    "starcoder": _DIGITS_AND_WORDS,
    "refact": _DIGITS_AND_WORDS,
    "command-r": _DIGITS_AND_WORDS,
    "codeshell": _DIGITS_AND_WORDS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "smaug-bpe": Splitting((_LLAMA3,)),
    "dbrx": Splitting((_LLAMA3,)),
    "qwen2": Splitting((_QWEN2,), composed=True),
    "deepseek-r1-qwen": Splitting((_QWEN2,), composed=True),
    "tekken": Splitting((_TEKKEN,), whole_words=True, begins=True),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file and how text becomes them.

    `splitting` is None for SentencePiece ("llama" in GGUF), which merges by `scores`; the others
    merge bytes by the order of `merges`. `bos` precedes every text, None for none; `eos` follows.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    splitting: Splitting | None
    merges: tuple[tuple[str, str], ...] = field(repr=False)
    scores: tuple[float, ...] = field(repr=False)
    bos: int | None
    eos: int | None
    space_prefix: bool

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The id of each token."""
        return {token: number for number, token in enumerate(self.tokens)}

    @cached_property
    def whole(self) -> Mapping[str, int]:
        """Tokens that are found in text before anything is merged, the longest first."""
        found = [
            (token, number)
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
        ]
        return dict(sorted(found, key=lambda item: -len(item[0].encode())))

    @cached_property
    def ranks(self) -> Mapping[tuple[str, str], int]:
        """The place of each merge; the first of two equal ones counts."""
        return {pair: rank for rank, pair in reversed(list(enumerate(self.merges)))}

    @cached_property
    def _patterns(self) -> list[Any]:
        import regex

        return [regex.compile(one) for one in (self.splitting.patterns if self.splitting else ())]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, special tokens in it read as such."""
        found = [] if self.bos is None else [self.bos]
        after_special = True
        for piece in self._fragments(text):
            if isinstance(piece, int):
                found.append(piece)
                after_special = True
                continue
            if self.splitting is None:
                prefix = " " if self.space_prefix and after_special else ""
                found += self._merge_scored((prefix + piece).replace(" ", SPACE))
            else:
                found += self._merge_bytes(piece)
            after_special = False
        return found if self.eos is None else [*found, self.eos]

    def _fragments(self, text: str) -> Iterable[int | str]:
        """The text cut at the tokens that are taken whole."""
        pieces: list[int | str] = [text] if text else []
        for token, number in self.whole.items():
            if token not in text:
                continue
            cut: list[int | str] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                for place, part in enumerate(piece.split(token)):
                    cut += [number] * (place > 0) + [part] * bool(part)
            pieces = cut
        return pieces

    def _merge_bytes(self, text: str) -> Iterable[int]:
        is_composed = self.splitting is not None and self.splitting.composed
        words = [unicodedata.normalize("NFC", text) if is_composed else text]
        for pattern in self._patterns:
            words = [part for word in words for part in _cut(pattern, word)]
        for word in words:
            spelled = "".join(BYTE_LETTERS[byte] for byte in word.encode())
            if self.splitting and self.splitting.whole_words and spelled in self.ids:
                yield self.ids[spelled]
                continue
            for part in self._merged(list(spelled)):
                # A merged piece may have no token of that name; bytes without a token are dropped
                letters = [part] if part in self.ids else part
                yield from (self.ids[one] for one in letters if one in self.ids)

    def _merged(self, parts: list[str]) -> list[str]:
        while len(parts) > 1:
            ranks = [self.ranks.get(pair, len(self.merges)) for pair in pairwise(parts)]
            best = min(ranks)
            if best == len(self.merges):
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts

    def _merge_scored(self, text: str) -> Iterable[int]:
        """SentencePiece's BPE: of all neighbours that make a token, merge the best-scored."""
        parts: list[str | None] = list(text)
        following = [*range(1, len(parts)), -1]
        before = list(range(-1, len(parts) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            joined = f"{parts[left]}{parts[right]}"
            if (number := self.ids.get(joined)) is not None:
                heapq.heappush(queue, (-self.scores[number], left, right, joined))

        for place in range(len(parts) - 1):
            offer(place, place + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if parts[left] is None or parts[right] is None:
                continue
            if f"{parts[left]}{parts[right]}" != joined:
                continue
            parts[left], parts[right] = joined, None
            following[left] = following[right]
            if following[right] >= 0:
                before[following[right]] = left
            offer(before[left], left)
            offer(left, following[left])
        for part in parts:
            if part is None:
                continue
            if part in self.ids:
                yield self.ids[part]
            else:
                yield from (self.ids[BYTE_TOKENS[byte]] for byte in part.encode())


def _cut(pattern: Any, text: str) -> Iterable[str]:
    """The matches and what lies between them."""
    at = 0
    for match in pattern.finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        if match.end() > match.start():
            yield match.group()
        at = match.end()
    if at < len(text):
        yield text[at:]


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte: itself, or one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {byte: chr(byte) for byte in printable}
    found |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [found[byte] for byte in range(256)]


BYTE_LETTERS = _byte_letters()
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece's


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """The vocabulary of `file`. Raises CONFIG for a kind that nibble does not know, MODEL for one
    that is incomplete.
    """
    data = file.metadata
    splitting = _splitting(file, data.get("tokenizer.ggml.model"))
    tokens = _values(file, "tokens", str)
    merges = _merges(file) if splitting else ()
    scores = () if splitting else _values(file, "scores", float, len(tokens))
    stated = "tokenizer.ggml.token_type" in data
    types = _values(file, "token_type", int, len(tokens)) if stated else [NORMAL] * len(tokens)
    if splitting is None and not set(BYTE_TOKENS) <= set(tokens):
        raise _incomplete(file.path, "tokenizer.ggml.tokens (of <0x00> to <0xFF> some are missing)")
    begins = data.get("tokenizer.ggml.add_bos_token", splitting.begins if splitting else True)
    bos = data.get("tokenizer.ggml.bos_token_id", 1 if splitting is None else None)
    eos = data.get("tokenizer.ggml.eos_token_id", 2 if splitting is None else None)
    return Vocabulary(
        tuple(tokens),
        tuple(types),
        splitting,
        merges,
        tuple(scores),
        bos if begins else None,
        eos if data.get("tokenizer.ggml.add_eos_token") else None,
        bool(data.get("tokenizer.ggml.add_space_prefix", splitting is None)),
    )


def _splitting(file: GgufFile, model: Any) -> Splitting | None:
    if model == "llama":
        return None
    if model != "gpt2":
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{file.path} has a tokenizer of the kind {model!r}",
            expected="gpt2 (byte-level BPE) or llama (SentencePiece)",
            action="convert the model from its Hugging Face format",
        )
    pre = str(file.metadata.get("tokenizer.ggml.pre"))
    if pre not in SPLITTINGS:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{file.path} splits text in a way that nibble does not know"
            f" (tokenizer.ggml.pre = {pre!r})",
            expected=f"one of {', '.join(SPLITTINGS)}",
            action="convert the model from its Hugging Face format",
        )
    return SPLITTINGS[pre]


def _values(file: GgufFile, name: str, kind: type, count: int | None = None) -> list[Any]:
    """A list of the tokenizer with values of one type, `count` of them if that is known."""
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    if not found or not isinstance(found, list) or len(found) != (count or len(found)):
        raise _incomplete(file.path, f"tokenizer.ggml.{name}")
    if not all(type(value) is kind for value in found):
        raise _incomplete(file.path, f"tokenizer.ggml.{name} (its values are of another type)")
    return found


def _merges(file: GgufFile) -> tuple[tuple[str, str], ...]:
    found = []
    for line in _values(file, "merges", str):
        left, _, right = line[1:].partition(" ")  # the first letter may be a space
        left = line[:1] + left
        if not right:
            raise _incomplete(file.path, f"tokenizer.ggml.merges (it has {line!r})")
        found.append((left, right))
    return tuple(found)


def _incomplete(path: Path, key: str) -> NibbleError:
    return NibbleError(
        ExitCode.MODEL,
        what=f"{path} has no complete {key}",
        expected="a tokenizer beside the weights",
        action="convert another GGUF file of this model",
    )

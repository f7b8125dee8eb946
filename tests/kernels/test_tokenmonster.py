"""TokenMonster vocabularies made here: read, encoded, decoded, and what is none refused.

Encoding was compared with the project's own JavaScript (ea8fd60, tokenize_bytes): 6 000 texts, 216
569 tokens with and without capcode, all equal. The published vocabulary of CloverLM could not be
had here.
"""

from __future__ import annotations

import pickle
import random
import re
import threading
import unicodedata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.models.tokenmonster_file import TEXT, tokens_of, u24, write_vocabulary

SAMPLES = (
    "",
    "the",
    " the",
    "The world of the people, and what he said about it.\n\nIn 1984 they had 12 little houses.",
    "thethe, he'd said; it’s 42x42 café and naïve… über",
    "日本語 text and 🐙 too",
    "a\x7fb",
    "  two  spaces and\ttabs\r\n",
    TEXT,
)


@pytest.fixture
def load(kernels: ModuleType) -> Any:
    from nibble.engine.plugin.tokenmonster import load

    return load


@pytest.mark.parametrize("capcode", [0, 1])
@pytest.mark.parametrize("text", SAMPLES)
def test_what_is_decoded_is_what_was_encoded(
    capcode: int, text: str, load: Any, tmp_path: Path
) -> None:
    vocabulary = load(write_vocabulary(tmp_path / "v.vocab", capcode=capcode))
    expected = unicodedata.normalize("NFD", text)
    if capcode:
        expected = expected.replace("\x7f", "\x14")  # the mark itself has a substitute
    assert vocabulary.decode(vocabulary.encode(text)) == expected


def test_random_texts_come_back(load: Any, tmp_path: Path) -> None:
    vocabulary = load(write_vocabulary(tmp_path / "v.vocab"))
    generator = random.Random(0)
    pieces = [*TEXT.split(), ",", ".", "\n", " ", "  ", "'", "7", "1984", "é", "–", "X"]
    for _ in range(300):
        text = "".join(generator.choice(pieces) + generator.choice(["", " "]) for _ in range(40))
        assert vocabulary.decode(vocabulary.encode(text)) == unicodedata.normalize("NFD", text)


def test_a_word_after_a_space_is_one_token_and_words_are_not_cut(load: Any, tmp_path: Path) -> None:
    vocabulary = load(write_vocabulary(tmp_path / "v.vocab", capcode=0))
    tokens = [vocabulary.text_of[token] for token in vocabulary.encode(" people other")]
    assert tokens == [b" people", b" other"]


def test_a_word_without_a_space_gets_one_and_the_mark_that_takes_it_away(
    load: Any, tmp_path: Path
) -> None:
    vocabulary = load(write_vocabulary(tmp_path / "v.vocab"))
    ids = vocabulary.encode("people")
    assert [vocabulary.text_of[token] for token in ids] == [b"\x7f", b" people"]
    assert vocabulary.decode(ids) == "people"


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        (1, "é", "e\u0301"),
        (2, "ABC", "abc"),
        (4, "éa", "ea"),
        (8, "“it’s”", '"it\'s"'),
        (16, "a   b", "a b"),
        (32, " a ", "a"),
        (64, "a", " a"),
        (128, "a\r\nb", "a\nb"),
    ],
)
def test_texts_are_normalized_as_the_file_says(
    flags: int, text: str, expected: str, load: Any, tmp_path: Path
) -> None:
    vocabulary = load(write_vocabulary(tmp_path / "v.vocab", capcode=0, normalization=flags))
    assert vocabulary.decode(vocabulary.encode(text)) == expected


def test_a_cut_character_is_shown_as_unknown_and_not_lost(load: Any, tmp_path: Path) -> None:
    vocabulary = load(write_vocabulary(tmp_path / "v.vocab", tokens_of([])))
    ids = vocabulary.encode("日")
    assert vocabulary.decode(ids[:-1]) == "\ufffd" and vocabulary.decode(ids) == "日"


def damaged(content: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "cut short": content[:-1],
        "longer": content + b"\0",
        "capcode 3": b"\x03" + content[1:],
        "capcode 2": b"\x02" + content[1:],
        "utf-16": content[:1] + b"\x02" + content[2:],
        "fewer ids than tokens": content[:14] + u24(5) + content[17:],
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(300),
    }


@pytest.mark.parametrize("what", list(damaged(b"")))
def test_a_file_that_cannot_be_read_is_refused_by_its_name(
    what: str, load: Any, tmp_path: Path
) -> None:
    from nibble.engine.plugin.tokenmonster import VocabularyError

    file = write_vocabulary(tmp_path / "v.vocab")
    file.write_bytes(damaged(file.read_bytes())[what])
    with pytest.raises(
        VocabularyError, match=r"v\.vocab is not a readable TokenMonster vocabulary"
    ):
        load(file)


def test_threads_share_one(load: Any, tmp_path: Path) -> None:
    vocabulary = load(write_vocabulary(tmp_path / "v.vocab"))
    expected, found = vocabulary.encode(TEXT), []
    threads = [
        threading.Thread(target=lambda: found.append(vocabulary.encode(TEXT))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8
    assert pickle.loads(pickle.dumps(vocabulary)).encode(TEXT) == expected


@pytest.fixture
def tokenizer(kernels: ModuleType, tmp_path: Path) -> Any:
    pytest.importorskip("vllm")
    from nibble.engine.plugin.cloverlm.tokenizer import TokenMonsterTokenizer

    count = len(tokens_of())
    write_vocabulary(tmp_path / f"made-here-eot%3D{count}.vocab")
    return TokenMonsterTokenizer.from_pretrained(tmp_path)


@pytest.mark.vllm
def test_eot_in_a_text_is_the_id_that_ends_a_document(tokenizer: Any) -> None:
    eot = tokenizer.eos_token_id
    assert eot == tokenizer.max_token_id == tokenizer.vocab_size - 1
    ids = tokenizer.encode("one<eot>two")
    assert ids.count(eot) == 1 and max(ids) == eot
    assert (
        tokenizer.decode(ids) == "one<eot>two"
        and tokenizer.decode(ids, skip_special_tokens=True) == "onetwo"
    )
    assert tokenizer.encode("") == [] and tokenizer.encode("<eot>") == [eot]


@pytest.mark.vllm
def test_streamed_text_is_the_whole_text(tokenizer: Any) -> None:
    from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

    prompt, answer = (
        tokenizer.encode("the people"),
        tokenizer.encode(" said: 日本 café, thethe. He<eot>came."),
    )
    text, tokens, prefix, read = "", None, 0, 0
    for end in range(1, len(answer) + 1):
        new, piece, prefix, read = detokenize_incrementally(
            tokenizer, prompt + answer[:end], tokens, prefix, read, skip_special_tokens=False
        )
        tokens = new if tokens is None else tokens + new
        text += piece
    assert text == tokenizer.decode(answer)


@pytest.mark.vllm
def test_truncation_keeps_the_side_that_vllm_asks_for(tokenizer: Any) -> None:
    whole = tokenizer.encode(TEXT)
    assert tokenizer.encode(TEXT, truncation=True, max_length=5) == whole[-5:]
    assert tokenizer(["one", TEXT])["input_ids"] == [tokenizer.encode("one"), whole]


@pytest.mark.vllm
def test_a_folder_without_a_vocabulary_names_what_to_provide(
    kernels: ModuleType, tmp_path: Path
) -> None:
    from nibble.engine.contract import VOCABULARY
    from nibble.engine.plugin.cloverlm.tokenizer import TokenMonsterTokenizer

    with pytest.raises(FileNotFoundError, match=VOCABULARY):
        TokenMonsterTokenizer.from_pretrained(tmp_path)


@pytest.mark.vllm
def test_a_smaller_vocabulary_than_its_eot_is_another_one(
    kernels: ModuleType, tmp_path: Path
) -> None:
    from nibble.engine.plugin.cloverlm.tokenizer import TokenMonsterTokenizer

    write_vocabulary(tmp_path / "short.vocab")
    with pytest.raises(ValueError, match="it is another one"):
        TokenMonsterTokenizer.from_pretrained(tmp_path)


def of_cloverlms_size(tmp_path: Path, eot: bytes | None = None) -> Path:
    """32000 ids under a name that does not say which of them ends a document; `eot` has
    CloverLM's.
    """
    tokens = [bytes([byte]) for byte in range(256)] + [
        f" {n:05}".encode() for n in range(32000 - 256)
    ]
    if eot is not None:
        tokens[14199] = eot
    return write_vocabulary(tmp_path / "renamed.vocab", tokens, eot=None)


def test_one_of_the_same_size_without_eot_is_another_one(load: Any, tmp_path: Path) -> None:
    from nibble.engine.plugin.tokenmonster import VocabularyError, eot_of

    vocabulary = load(of_cloverlms_size(tmp_path))
    with pytest.raises(
        VocabularyError, match=r"renamed\.vocab has b' 13943' as id 14199, which is <eot>"
    ):
        eot_of(vocabulary, "renamed.vocab")
    assert eot_of(vocabulary, "published-eot%3D14199.vocab") == 14199


@pytest.mark.parametrize("eot", [b"<eot>", b"<\x7f eot>"])
def test_a_renamed_one_is_known_by_what_its_last_token_spells(
    eot: bytes, load: Any, tmp_path: Path
) -> None:
    from nibble.engine.plugin.tokenmonster import eot_of

    assert eot_of(load(of_cloverlms_size(tmp_path, eot)), "renamed.vocab") == 14199


@pytest.fixture(params=[0, 1], ids=["no capcode", "marks"])
def of_a_kind(request: pytest.FixtureRequest, kernels: ModuleType, tmp_path: Path) -> Any:
    """A tokenizer, with and without tokens that take away a space."""
    pytest.importorskip("vllm")
    from nibble.engine.plugin.cloverlm.tokenizer import TokenMonsterTokenizer

    write_vocabulary(tmp_path / f"made-here-eot={len(tokens_of())}.vocab", capcode=request.param)
    return TokenMonsterTokenizer.from_pretrained(tmp_path)


REGEX = "the people: .{9}é"  # a dot would match the mark


def chosen(tokenizer: Any, allowed: list[int], generator: random.Random) -> int:
    """One of the tokens that may come next, with the mark if there is one."""
    marked = [token for token in allowed if b"\x7f" in tokenizer.vocabulary.text_of[token]]
    return generator.choice(marked or allowed)


@pytest.mark.vllm
def test_what_xgrammar_matched_is_what_the_answer_says(of_a_kind: Any) -> None:
    import xgrammar

    size, generator = of_a_kind.vocab_size, random.Random(0)
    info = xgrammar.TokenizerInfo.from_huggingface(of_a_kind, vocab_size=size)
    grammar = xgrammar.GrammarCompiler(info).compile_regex(REGEX)
    for _ in range(20):
        matcher = xgrammar.GrammarMatcher(grammar)
        mask = xgrammar.allocate_token_bitmask(1, size)
        ids: list[int] = []
        while not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask)
            allowed = [n for n in range(size) if mask[0, n // 32] >> (n % 32) & 1]
            ids.append(chosen(of_a_kind, allowed, generator))
            assert matcher.accept_token(ids[-1])
        assert ids.pop() == of_a_kind.eos_token_id
        assert re.fullmatch(REGEX, of_a_kind.decode(ids))


@pytest.mark.vllm
def test_what_outlines_matched_is_what_the_answer_says(of_a_kind: Any) -> None:
    import outlines_core
    from vllm.v1.structured_output.utils import get_outlines_vocabulary

    index = outlines_core.Index(REGEX, get_outlines_vocabulary(of_a_kind).inner)
    generator = random.Random(0)
    for _ in range(20):
        guide, ids = outlines_core.Guide(index), []
        while not guide.is_finished():
            ids.append(chosen(of_a_kind, guide.get_tokens(), generator))
            guide.advance(ids[-1])
        assert re.fullmatch(REGEX, of_a_kind.decode(ids))

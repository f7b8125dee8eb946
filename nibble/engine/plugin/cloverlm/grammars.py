"""Structured answers: TokenMonster's tokens for the programs that mask what a grammar, a schema or
a regex does not allow.

A token is the bytes that it adds. Tokens that add no bytes, except `<eot>`, are never
allowed, so that what was matched is what the answer says.
"""

from __future__ import annotations

import functools
from typing import Any

from xgrammar import TokenizerInfo, VocabType

from nibble.engine.plugin.cloverlm.tokenizer import TokenMonsterTokenizer
from nibble.engine.plugin.require import required


@functools.cache
def register_grammars() -> None:
    """Let xgrammar read our tokenizer, where it knows those of transformers only (vllm 0.32
    backend_xgrammar.py:69).
    """
    of_transformers = required(TokenizerInfo, "from_huggingface", "tokenizer", "vocab_size")

    def from_tokenizer(
        tokenizer: Any, *, vocab_size: int | None = None, **rest: Any
    ) -> TokenizerInfo:
        if not isinstance(tokenizer, TokenMonsterTokenizer):
            return of_transformers(tokenizer, vocab_size=vocab_size, **rest)
        return TokenizerInfo(
            tokenizer.spellings(),
            VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=tokenizer.eot,
        )

    setattr(TokenizerInfo, "from_huggingface", staticmethod(from_tokenizer))  # noqa: B010

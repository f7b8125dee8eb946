"""Structured outputs: passes TokenMonster's tokens to xgrammar.

A token is the bytes that it adds. Tokens that add no bytes, except `<eot>`, are never allowed, so
that the answer is exactly the text that the grammar matched.
"""

from __future__ import annotations

import functools
from typing import Any

from xgrammar import TokenizerInfo, VocabType

from nibble.engine.plugin.cloverlm.tokenizer import TokenMonsterTokenizer
from nibble.engine.plugin.require import required


@functools.cache
def register_grammars() -> None:
    """Make xgrammar accept TokenMonsterTokenizer; vLLM 0.32 passes it as a tokenizer of
    transformers (backend_xgrammar.py:69).
    """
    from_huggingface = required(TokenizerInfo, "from_huggingface", "tokenizer", "vocab_size")

    def from_tokenizer(
        tokenizer: Any, *, vocab_size: int | None = None, **rest: Any
    ) -> TokenizerInfo:
        if not isinstance(tokenizer, TokenMonsterTokenizer):
            return from_huggingface(tokenizer, vocab_size=vocab_size, **rest)
        return TokenizerInfo(
            tokenizer.spellings(),
            VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=tokenizer.eot,
        )

    setattr(TokenizerInfo, "from_huggingface", staticmethod(from_tokenizer))  # noqa: B010

"""TokenMonster vocabularies in Python: `load(path)`, then `encode(text)` and `decode(ids)`."""

from __future__ import annotations

from nibble_kernels.tokenmonster.vocabulary import Token, Vocabulary, VocabularyError, load

__all__ = ["Token", "Vocabulary", "VocabularyError", "load"]

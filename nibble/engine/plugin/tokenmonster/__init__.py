"""TokenMonster vocabularies in Python: `load(path)`, then `encode(text)` and `decode(ids)`."""

from __future__ import annotations

from nibble.engine.plugin.tokenmonster.documents import EOT, eot_of
from nibble.engine.plugin.tokenmonster.vocabulary import Token, Vocabulary, VocabularyError, load

__all__ = ["EOT", "Token", "Vocabulary", "VocabularyError", "eot_of", "load"]

"""`<eot>`, the token that ends a document, and its id in a vocabulary."""

from __future__ import annotations

import re
from urllib.parse import unquote

from nibble.engine.plugin.tokenmonster.vocabulary import Vocabulary, VocabularyError

EOT = "<eot>"
EOT_ID = 14199  # of CloverLM, where the file's name does not say


def eot_of(vocabulary: Vocabulary, name: str) -> int:
    """The id that the published file's name ends with ("…-eot=14199.vocab"), else CloverLM's.

    Raises VocabularyError for a vocabulary that ends before it, and, where the name does not say,
    for one in which that id is an ordinary token: upstream's vocabulary of the same size, without
    `<eot>`.
    """
    named = re.search(r"eot=(\d+)", unquote(name))
    eot = int(named[1]) if named else EOT_ID
    if eot > vocabulary.max_id:
        raise VocabularyError(
            f"the vocabulary {name} ends at id {vocabulary.max_id}, and {EOT} is {eot}: it is"
            " another one"
        )
    text = vocabulary.decode_bytes([eot])
    if not named and text not in (b"", EOT.encode()) and eot not in vocabulary.special_ids:
        raise VocabularyError(
            f"the vocabulary {name} has {text!r} as id {eot}, which is {EOT}: it is another one"
        )
    return eot

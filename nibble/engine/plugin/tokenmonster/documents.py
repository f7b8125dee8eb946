"""`<eot>`, the token that ends a document, and its id in a vocabulary."""

from __future__ import annotations

import re
from urllib.parse import unquote

from nibble.engine.plugin.tokenmonster.vocabulary import Vocabulary, VocabularyError

EOT = "<eot>"
EOT_ID = 14199  # CloverLM's, for file names without an id


def eot_of(vocabulary: Vocabulary, name: str) -> int:
    """The id in the file's name ("…-eot=14199.vocab"), else CloverLM's.

    Raises VocabularyError if the vocabulary has fewer ids, or if a file without an id in its name
    uses CloverLM's id for an ordinary token, as upstream's vocabulary of the same size does.
    """
    match = re.search(r"eot=(\d+)", unquote(name))
    eot = int(match[1]) if match else EOT_ID
    if eot > vocabulary.max_id:
        raise VocabularyError(
            f"the vocabulary {name} ends at id {vocabulary.max_id}, and {EOT} is {eot}: it is"
            " another one"
        )
    text = vocabulary.decode_bytes([eot])
    if not match and text not in (b"", EOT.encode()) and eot not in vocabulary.special_ids:
        raise VocabularyError(
            f"the vocabulary {name} has {text!r} as id {eot}, which is {EOT}: it is another one"
        )
    return eot

"""benchmarks/decode.py: the lengths of its context."""

from __future__ import annotations

import decode


def test_the_context_holds_every_prompt_and_needs_none() -> None:
    assert decode.context_tokens([]) == 1032
    assert decode.context_tokens([32, 128]) == 1032
    assert decode.context_tokens([2048, 32]) == 2056

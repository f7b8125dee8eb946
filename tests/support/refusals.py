"""What nibble refuses, and how."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nibble.errors import ExitCode, NibbleError


def refusal_of(call: Callable[[], object], code: ExitCode | None = None) -> NibbleError:
    """The error, of one line, with which `call` ends; with exit code `code` where one is given."""
    with pytest.raises(NibbleError) as caught:
        call()
    assert "\n" not in caught.value.line()
    assert code is None or caught.value.code is code
    return caught.value

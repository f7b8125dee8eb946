"""An error is one line that shows no secret of an address."""

from __future__ import annotations

import pytest

from nibble.errors import ExitCode, NibbleError


@pytest.mark.parametrize(
    "place", ["http://me:hush@hub:8080/x", "https://:hush@hub", "socks5://me:hush@[::1]:1"]
)
def test_a_password_in_an_address_is_not_printed(place: str) -> None:
    error = NibbleError(
        ExitCode.MODEL,
        what=f"{place} does not\nanswer",
        expected="an answer",
        action=f"look at {place}",
    )
    assert "hush" not in error.line() and "hush" not in str(error)
    assert "://…@" in error.line() and "\n" not in error.line()


def test_addresses_without_one_stay_as_they_are() -> None:
    line = "http://hub:8080/a@b does not answer, ask me@home: now"
    assert NibbleError(ExitCode.MODEL, what=line).line() == line

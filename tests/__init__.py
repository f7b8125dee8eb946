"""nibble's tests; `tests.support` holds what several of them use."""

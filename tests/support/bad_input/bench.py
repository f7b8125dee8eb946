"""Rows about `nibble bench` and `soak`: what they refuse before they ask a server."""

from __future__ import annotations

from tests.support.bad_input.case import Case, Row, file, row


def bench_rows() -> list[Row]:
    """Addresses, numbers, and files of earlier results."""
    return [
        row(
            "bench-no-server",
            "`nibble bench` or `soak` where no server runs",
            10,
            "no server answers at 127.0.0.1:… (Connection refused); expected a running server; …",
            Case(("bench",)),
            Case(("bench", "http://127.0.0.1:9")),
            Case(("soak", "--minutes", "1")),
        ),
        row(
            "bench-address",
            "`nibble bench` or `soak` with what is not the address of a server",
            2,
            "'…' is not the address of a server; expected http://HOST:PORT or https://HOST:PORT;"
            " correct the address",
            Case(("bench", "ftp://127.0.0.1")),
            Case(("bench", "http://127.0.0.1:none")),
            Case(("bench", "http://user@127.0.0.1")),
            Case(("soak", "http://127.0.0.1/other")),
        ),
        row(
            "bench-numbers",
            "a list of `nibble bench` that has something else than numbers above 0",
            2,
            "--… is '…'; expected whole numbers above 0, such as 128,1024; correct --…",
            Case(("bench", "--prompt-tokens", "128,x")),
            Case(("bench", "--output-tokens", "0")),
            Case(("bench", "--concurrency", "")),
        ),
        row(
            "bench-rounds",
            "`nibble bench` with no rounds, `nibble soak` with no time",
            2,
            "Invalid value for '--…': …; see `nibble --help`",
            Case(("bench", "--rounds", "0")),
            Case(("soak", "--minutes", "0")),
            Case(("soak", "--minutes", "many")),
        ),
        row(
            "bench-against",
            "`nibble bench --against` an unknown server, or flags for it that are not words",
            2,
            "--…; correct …",
            Case(("bench", "--against", "other")),
            Case(("bench", "--against", "stock", "--stock-flags", "'one")),
        ),
        row(
            "bench-compare-file",
            "`nibble bench --compare` with a file that is not a result",
            2,
            "… is not a result of `nibble bench` (…); expected a results.json that `nibble bench"
            " --out` wrote; correct --compare",
            Case(("bench", "--compare", "{tmp}/none.json")),
            Case(("bench", "--compare", "{tmp}/old.json"), {}, file("old.json", b"[1]")),
            Case(
                ("bench", "--compare", "{tmp}/old.json"), {}, file("old.json", b'{"format": "x"}')
            ),
        ),
    ]

"""Rows about `nibble bench`, `soak`, `eval` and `trace`: refusals before they ask a server."""

from __future__ import annotations

from tests.support.bad_input.case import Case, Row, file, row


def bench_rows() -> list[Row]:
    """Addresses, numbers, and files of earlier results."""
    return [
        row(
            "bench-no-server",
            "`nibble bench`, `soak`, `eval` or `trace` where no server runs",
            10,
            "no server answers at 127.0.0.1:… (Connection refused); expected a running server; …",
            Case(("bench",)),
            Case(("bench", "http://127.0.0.1:9")),
            Case(("soak", "--minutes", "1")),
            Case(("eval",)),
            Case(("eval", "http://127.0.0.1:9", "--tools")),
            Case(("trace", "--out", "{tmp}/trace")),
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
            "Invalid value for '--…': …; see `nibble … --help`",
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
            Case(("bench", "--against", "sglang", "--peer-flags", "'one")),
        ),
        row(
            "bench-gguf",
            "`nibble bench --against llama.cpp` without the model as GGUF",
            2,
            "--against llama.cpp needs a GGUF file, and --gguf names …; expected the model's"
            " weights as GGUF; llama.cpp loads no other checkpoint; name the file with --gguf",
            Case(("bench", "--against", "llama.cpp")),
            Case(("bench", "--against", "llama.cpp", "--gguf", "{tmp}/none.gguf")),
        ),
        row(
            "bench-peer-program",
            "`nibble bench --against` a server whose program is not here",
            5,
            "… is not a program that can be run here; expected a program that starts …; install it,"
            " or name it with --peer-program",
            Case(("bench", "--against", "sglang", "--peer-program", "{tmp}/none")),
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
        row(
            "eval-against",
            "`nibble eval --against` with a file that is not a recording",
            2,
            "… is not a recording of `nibble eval` (…); expected a file that `nibble eval --record`"
            " wrote; correct --against",
            Case(("eval", "--against", "{tmp}/none.json")),
            Case(("eval", "--against", "{tmp}/r.json"), {}, file("r.json", b"[1]")),
        ),
        row(
            "eval-text",
            "`nibble eval --text` with what is not a text",
            2,
            "… is not a text (…); expected UTF-8 of up to 1 MiB; correct --text",
            Case(("eval", "--text", "{tmp}/none.txt")),
            Case(("eval", "--text", "{tmp}/t.txt"), {}, file("t.txt", b"")),
            Case(("eval", "--text", "{tmp}/t.txt"), {}, file("t.txt", b"\xff\xfe")),
        ),
        row(
            "eval-task",
            "`nibble eval --task` without such a data set",
            2,
            "there is no data set …; expected words, choice or a file of JSON lines; correct"
            " --task",
            Case(("eval", "--task", "gsm8k")),
        ),
        row(
            "eval-task-content",
            "`nibble eval --task` with a file that is not a data set",
            2,
            "… is not a data set (…); expected lines such as …; correct --task",
            Case(("eval", "--task", "{tmp}/d.jsonl"), {}, file("d.jsonl", b"[1]")),
        ),
        row(
            "eval-parsers",
            "`nibble eval --parsers` with a parser that has no scripted answers",
            2,
            "no scripted answers are known for …; expected …; correct --parsers",
            Case(("eval", "--parsers", "other")),
        ),
        row(
            "trace-out",
            "`nibble trace --out` where nothing can be written",
            5,
            "a profile cannot be written to … (…); expected a folder that this user can write,"
            " without trace.json; name another folder with --out",
            Case(("trace", "--out", "{tmp}/f/x"), {}, file("f", b"")),
        ),
        row(
            "trace-start",
            "`nibble trace URL --start MODEL`, or flags for it that are not words",
            2,
            "--…",
            Case(("trace", "http://127.0.0.1:9", "--start", "nibble-demo")),
            Case(("trace", "--start", "nibble-demo", "--flags", "'one")),
        ),
        row(
            "verify-recipe",
            "`nibble recipes verify` without such a recipe",
            4,
            "there is no recipe for …; expected an id that `nibble recipes list` shows; correct"
            " the id",
            Case(("recipes", "verify", "acme/none")),
        ),
    ]

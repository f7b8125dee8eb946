"""Rows about words of the command line and of VLLM_EXTRA_ARGS."""

from __future__ import annotations

from nibble.engine.flags import OWNED
from tests.support.bad_input.case import (
    Row,
    env,
    row,
    serve,
)


def word_rows() -> list[Row]:
    """Words that cannot be read."""
    return [
        row(
            "quotes",
            "unbalanced quotes in `VLLM_EXTRA_ARGS`",
            5,
            "VLLM_EXTRA_ARGS cannot be split into words: no closing quotation; …",
            env(VLLM_EXTRA_ARGS="--dtype 'bfloat16"),
        ),
        row(
            "json",
            "a JSON value in `VLLM_EXTRA_ARGS` that does not parse",
            5,
            "the value of --compilation-config in VLLM_EXTRA_ARGS is not valid JSON (…); …",
            env(VLLM_EXTRA_ARGS="--compilation-config '{\"mode\": }'"),
        ),
        row(
            "json-key",
            "a nested key that vLLM does not have",
            5,
            "VLLM_EXTRA_ARGS: …cudagraph_moode…",
            env(VLLM_EXTRA_ARGS="--compilation-config '{\"cudagraph_moode\": 1}'"),
        ),
        row(
            "flag-in-variable",
            "a flag that `vllm serve` does not have, in `VLLM_EXTRA_ARGS`",
            5,
            "VLLM_EXTRA_ARGS has --max-modle-len, which vLLM 0.32.0 does not know; "
            "did you mean --max-model-len?",
            env(VLLM_EXTRA_ARGS="--max-modle-len 5"),
        ),
        row(
            "flag-on-command-line",
            "the same on the command line",
            5,
            "the command line has --max-modle-len, which vLLM 0.32.0 does not know; "
            "did you mean --max-model-len?",
            serve("{model}", "--max-modle-len", "5"),
        ),
        row(
            "flag-choice",
            "a value outside a flag's choices",
            5,
            "VLLM_EXTRA_ARGS: …--kv-cache-dtype…fp9…",
            env(VLLM_EXTRA_ARGS="--kv-cache-dtype fp9"),
        ),
        row(
            "flag-without-value",
            "a flag without its value",
            2,
            "--port has no value; …",
            serve("{model}", "--port"),
        ),
        row(
            "word-without-flag",
            "a word where a flag belongs",
            5,
            "VLLM_EXTRA_ARGS has 'eager' where a flag belongs; …",
            env(VLLM_EXTRA_ARGS="eager"),
        ),
        row(
            "model-after-flags",
            "the model after the flags",
            5,
            "the command line has '…' where a flag belongs; …; write MODEL, once, before the flags",
            serve("--port", "8470", "{model}"),
        ),
        row(
            "other-server",
            "`--grpc`, or `VLLM_USE_RUST_FRONTEND=1`: servers that nibble's gate does not guard",
            5,
            "… without nibble's gate; expected vLLM's HTTP API; …",
            serve("{model}", "--grpc"),
            env(VLLM_EXTRA_ARGS="--grpc"),
            env(VLLM_USE_RUST_FRONTEND="1"),
        ),
        row(
            "no-server",
            "`--headless` or `--api-server-count 0` on a machine that is to serve",
            5,
            "… starts engines without an API; …",
            serve("{model}", "--headless"),
            serve("{model}", "--api-server-count", "0"),
        ),
        row(
            "client-certificates",
            "`--ssl-cert-reqs 2`",
            5,
            "--ssl-cert-reqs 2 refuses requests without a client certificate, which nibble's"
            " requests do not have; …",
            serve("{model}", "--ssl-cert-reqs", "2"),
        ),
        row(
            "certificate",
            "a certificate or key for HTTPS that cannot be read",
            5,
            "/nonexistent cannot be used for HTTPS (No such file or directory); …",
            serve("{model}", "--ssl-certfile", "/nonexistent"),
        ),
    ]


def owned_rows() -> list[Row]:
    """One row for each flag that nibble sets itself."""
    return [
        row(
            "owned-" + flag.removeprefix("--"),
            f"`{flag}` in `VLLM_EXTRA_ARGS`",
            5,
            f"{flag} in VLLM_EXTRA_ARGS is a flag that nibble sets; use {instead} instead",
            env(VLLM_EXTRA_ARGS=f"{flag} 12345678"),
        )
        for flag, instead in OWNED.items()
    ]

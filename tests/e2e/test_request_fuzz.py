"""Seeded requests from vLLM's own OpenAPI and from lists of faults: 2xx or 4xx, the server alive,
/health within 1 s.

NIBBLE_FUZZ_SECONDS (600) bounds it, NIBBLE_FUZZ_SEED (18) repeats it. A failure names the requests
that caused it.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import hypothesis
import pytest
import schemathesis

from tests.support.models.slow_model import make_slow_model
from tests.support.paths import ROOT
from tests.support.servers.malformed import Malformed, malformed
from tests.support.servers.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
Record = Callable[[str, object], None]
SECONDS = float(os.environ.get("NIBBLE_FUZZ_SECONDS", "600"))
SEED = int(os.environ.get("NIBBLE_FUZZ_SEED", "18"))
HEALTH_S = 1.0
ANSWER_S = 60.0
_CHAT = [{"role": "user", "content": "word1 word2"}]
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "word1", "max_tokens": 4},
    "/v1/chat/completions": {"messages": _CHAT, "max_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [_CHAT, _CHAT], "max_tokens": 4},
    "/v1/responses": {"input": "word1", "max_output_tokens": 4},
    "/v1/messages": {"model": "default", "messages": _CHAT, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "default", "messages": _CHAT},
    "/tokenize": {"prompt": "word1"},
    "/detokenize": {"tokens": [1, 2]},
    "/generative_scoring": {"query": "word1", "items": ["word2"], "label_token_ids": [5, 6]},
    "/v1/systemone": {"state": "word1", "questions": {"a": {"type": "boolean"}}},
}
# What no schema says and clients send all the same.
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    "",
    "x",
    "é" * 300,
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"a": None},
    [1, "x"],
    "\x00",
    ["x"] * 300,
    list(range(300)),
    {str(n): n for n in range(300)},
    "word1 " * 3000,
    -(2**63),
    2**63,
    "NaN",
    {"type": "object"},
]


def vllm_openapi() -> dict[str, Any]:
    """What vLLM 0.32 says about its routes; a running server keeps it to itself."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    assert args
    found = build_app(args, ("generate",)).openapi()
    return {
        **found,
        "paths": {path: found["paths"][path] for path in SOUND if path in found["paths"]},
    }


def from_openapi(openapi: dict[str, Any], seed: int) -> Iterator[Malformed]:
    """Bodies that fit the schemas, ten of a route at a time, and each with one field made odd."""
    found: list[Any] = list(schemathesis.openapi.from_dict(openapi).get_all_operations())
    operations = [one.ok() for one in found]
    assert len(operations) >= 8, "vLLM's OpenAPI has lost routes"
    chance = random.Random(seed)
    for turn in itertools.count():
        for operation in operations:
            for body in bodies(operation, seed + turn):
                yield request(operation.path, body)
                if isinstance(body, dict):
                    name = chance.choice(
                        [*body, "n", "stop", "logprobs", "structured_outputs", "response_format"]
                    )
                    yield request(operation.path, {**body, name: chance.choice(ODD)})


def bodies(operation: Any, seed: int) -> list[Any]:
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=10, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    @hypothesis.given(operation.as_strategy())
    def collect(case: Any) -> None:
        found.append(case.body)

    collect()
    return found


def request(path: str, body: Any) -> Malformed:
    sound = {"model": "default"} if isinstance(body, dict) and "model" in body else {}
    try:
        text = json.dumps({**body, **sound} if isinstance(body, dict) else body)
    except (TypeError, ValueError):  # schemathesis also makes values that JSON does not have
        text = repr(body)
    return Malformed(path, text.encode(errors="surrogatepass"))


def with_odd_fields(openapi: dict[str, Any], seed: int) -> Iterator[Malformed]:
    """Sound bodies with one or two fields of the route's schema made odd: thousands a second,
    where schemathesis takes long.
    """
    chance = random.Random(seed)
    fields = {path: properties(openapi, path) for path in openapi["paths"]}
    while True:
        path = chance.choice(list(fields))
        odd = {
            name: chance.choice(ODD)
            for name in chance.sample(fields[path], min(2, len(fields[path])))
        }
        yield request(path, {**SOUND[path], **odd})


def properties(openapi: dict[str, Any], path: str) -> list[str]:
    """The names of a route's fields, in whichever of its schemas."""
    schema = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    found: set[str] = set()
    for one in schema.get("anyOf", [schema]):
        resolved = (
            openapi["components"]["schemas"][one["$ref"].rpartition("/")[2]]
            if "$ref" in one
            else one
        )
        found |= set(resolved.get("properties", {}))
    return sorted(found)


def all_requests(seed: int) -> Iterator[Malformed]:
    """From the schemas, and twenty quick ones after each."""
    openapi = vllm_openapi()
    quick = itertools.chain(malformed(1000, seed), with_odd_fields(openapi, seed))
    yield from itertools.islice(quick, 1500)
    for made in from_openapi(openapi, seed):
        yield made
        yield from itertools.islice(quick, 20)


def answer(server: Server, sent: Malformed) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    with closing(connection):
        connection.request("POST", sent.path, sent.body, {"Content-Type": sent.content_type})
        response = connection.getresponse()
        return response.status, response.read()


def health_s(server: Server) -> float:
    began = time.monotonic()
    assert server.ask("/health")[0] == 200
    return time.monotonic() - began


def test_every_answer_is_2xx_or_4xx_and_the_server_lives(
    tmp_path_factory: pytest.TempPathFactory, record_property: Record
) -> None:
    model = make_slow_model(ROOT / ".cache" / "fuzz_model", layers=1, hidden=128)
    server = Server(
        tmp_path_factory.mktemp("fuzz"),
        ["serve", str(model), "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16"],
        NIBBLE_MAX_SEQUENCES="64",
    )
    try:
        server.wait_until_ready()
        statuses, wrong, slowest = fuzz(server, all_requests(SEED), SECONDS)
        record_property("answers_by_status", dict(statuses))
        record_property("longest_health_s", round(slowest, 3))
        for status, sent, said in wrong[:50]:
            print(status, sent.path, sent.body[:2000], said[:300])
        assert not wrong, Counter(status for status, _, _ in wrong)
        assert slowest < HEALTH_S
        assert server.is_ready() and server.ask("/v1/models")[0] == 200
    finally:
        server.end()


Wrong = tuple[int, Malformed, bytes]


def is_answer(status: int, said: bytes) -> bool:
    """2xx and 4xx, and vLLM's 501 for an API that this model does not have (/v1/systemone)."""
    return (
        200 <= status < 300
        or 400 <= status < 500
        or (status == 501 and b"does not support" in said)
    )


def fuzz(
    server: Server, requests: Iterator[Malformed], seconds: float
) -> tuple[Counter[int], list[Wrong], float]:
    """Statuses, the answers that are neither 2xx nor 4xx (0: none came), and the slowest /health
    meanwhile.
    """
    statuses: Counter[int] = Counter()
    wrong: list[Wrong] = []
    slowest = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            slowest[0] = max(slowest[0], health_s(server))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    deadline = time.monotonic() + seconds
    for sent in requests:
        if not statuses:  # vLLM's OpenAPI takes half a minute
            deadline = time.monotonic() + seconds
        if time.monotonic() > deadline or server.process.poll() is not None:
            break
        try:
            status, said = answer(server, sent)
        except (OSError, http.client.HTTPException) as error:
            status, said = 0, repr(error).encode()
        statuses[status] += 1
        if not is_answer(status, said):
            wrong.append((status, sent, said))
    over.set()
    watcher.join(30)
    assert server.process.poll() is None, server.log()[-3000:]
    return statuses, wrong, slowest[0]

"""What a body may be: counted while it arrives, parsed strictly, and never more work than a few
milliseconds a piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from typing import Any

import pytest

from nibble.engine.guard.body import Bodies, Disconnected, Held, parse, replayed
from nibble.engine.guard.json_scan import JsonScan
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.pace import Pace
from nibble.engine.guard.refusal import Refused
from tests.support.processor_time import within

LIMITS = RequestLimits.from_environ(
    {"NIBBLE_MAX_BODY_BYTES": "200000", "NIBBLE_MAX_BUFFERED_BYTES": "300000"}
)


def count(value: Any, depth: int = 1) -> tuple[int, int, int]:
    """Depth, keys, and commas and opening brackets of a value, by walking it."""
    if not isinstance(value, dict | list):
        return depth - 1, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    keys = len(value) if isinstance(value, dict) else 0
    items = 1 + max(0, len(inner) - 1)
    deepest = depth
    for one in inner:
        below, more_keys, more_items = count(one, depth + 1)
        deepest, keys, items = max(deepest, below), keys + more_keys, items + more_items
    return deepest, keys, items


def random_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(6 if depth < 5 else 4)
    if kind < 3:
        return "".join(chance.choices('ab[]{},:"\\\n é', k=chance.randrange(12)))
    if kind == 3:
        return chance.choice([1, -2.5, None, True, 10**20])
    if kind == 4:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(5))]
    return {str(n) + '":{\\': random_value(chance, depth + 1) for n in range(chance.randrange(5))}


def verdict(text: bytes, cuts: list[int], scan: JsonScan) -> str | None:
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        if problem := scan.feed(text[start:end]):
            return problem
    return scan.problem_of(json.loads(text))


@pytest.mark.parametrize("seed", range(200))
def test_counts_agree_with_the_parsed_value_wherever_the_text_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    value = [random_value(chance), random_value(chance)]
    text = json.dumps(
        value, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1])
    ).encode()
    cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(8)))
    depth, keys, items = count(value)
    assert verdict(text, cuts, JsonScan(depth, keys, items)) is None
    assert verdict(text, cuts, JsonScan(depth, 10**6, 10**6)) is None
    assert depth < 2 or "deeper" in str(verdict(text, cuts, JsonScan(depth - 1, 10**6, 10**6)))
    for limits in ((depth - 1, keys, items), (depth, keys - 1, items), (depth, keys, items - 1)):
        assert verdict(text, cuts, JsonScan(*limits)) is not None or -1 in limits


@pytest.mark.parametrize(
    "piece",
    [b'"",' * 22_000, b'{"":' * 16_000, b"[]" * 32_768, b"]" * 65_536, b'\\"' * 32_768, b'"\\\\"' * 16_384, b" " * 65_536,  # noqa: E501
     b"[" * 65_536, b'"' * 65_536, b"," * 65_536],
    ids=lambda piece: piece[:6].decode(),
)  # fmt: skip
def test_no_piece_takes_long(piece: bytes) -> None:
    # 2 ms on a free core
    within(0.02, lambda: JsonScan(1 << 30, 1 << 30, 1 << 30).feed(piece))


@pytest.mark.parametrize("seed", range(100))
def test_heavy_texts_are_known_whether_or_not_they_were_counted(seed: int) -> None:
    chance = random.Random(seed)
    value = [random_value(chance) for _ in range(4)]
    text = json.dumps(value).encode()
    _, keys, items = count(value)
    cut = chance.randrange(len(text))
    for most in (10**6, len(text) // 2):  # uncounted, and counted while it came
        for number in (keys + items - 1, keys + items, chance.randrange(len(text))):
            scan = JsonScan(1 << 30, most, most)
            scan.feed(text[:cut])
            scan.feed(text[cut:])
            assert scan.has_more_than(number) is (keys + items > number)


def test_depth_is_refused_before_the_rest_comes() -> None:
    scan = JsonScan(64, 1000, 100_000)
    assert scan.feed(b" " * 4000) is None
    assert "nested deeper than 64" in str(scan.feed(b'{"a":' * 65))
    assert "closing bracket" in str(JsonScan(64, 10, 10).feed(b"[1] }  }}}}"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\ud800"}', b'{"a": "\\udc00\\ud800"}', b'{"\\ud800": 1}', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}',  # noqa: E501
        '{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32"), b'\xef\xbb\xbf{"a": 1}', b'{"a": "\xff"}', b"", b"{", b"{}x",  # noqa: E501
        b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\x01"}', b"[1,]", b"'a'",
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_what_vllm_would_read_otherwise_or_fail_on_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="not valid JSON in UTF-8") as refused:
        parse(body)
    assert refused.value.status == 400 and len(str(refused.value)) < 300


@pytest.mark.parametrize("seed", range(50))
def test_what_is_parsed_is_what_vllm_reads(seed: int) -> None:
    text = json.dumps(random_value(random.Random(seed)), ensure_ascii=seed % 2 == 0)
    assert parse(text.encode()) == json.loads(text)
    assert parse(b'{"n": 1, "n": 2, "m": 99999999999999999999}') == {
        "n": 2,
        "m": 99999999999999999999,
    }


def body_of(*pieces: bytes, ends: str = "http.request", declared: int = 0) -> bytes:
    """What is read of a body that comes in pieces."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": ends, "body": b"", "more_body": False})
    messages.reverse()

    async def receive() -> dict[str, Any]:
        return messages.pop()

    bodies = Bodies(LIMITS)
    try:
        with Held(bodies) as held:
            found = asyncio.run(held.read(declared, receive, JsonScan(9, 99, 99)))
            assert bodies.held_bytes == len(found)
            return found
    finally:
        assert bodies.held_bytes == 0


def test_a_body_is_joined_and_replayed_in_one_piece() -> None:
    body = body_of(b'{"a"', b": 1", b"}")
    assert body == b'{"a": 1}'

    async def later() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def all_messages() -> list[str]:
        receive = replayed(body, later)
        return [(await receive())["type"], (await receive())["type"]]

    assert asyncio.run(all_messages()) == ["http.request", "http.disconnect"]


def test_a_body_over_the_limit_is_refused_before_the_rest_is_read() -> None:
    with pytest.raises(Refused) as refused:
        body_of(*[b" " * 100_000] * 50)
    assert refused.value.status == 413
    with pytest.raises(Refused) as refused:
        body_of(b" ", declared=200_001)
    assert refused.value.status == 413


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1], ids=["small", "large"])
def test_all_bodies_together_have_a_limit_that_small_ones_pass(size: int) -> None:
    bodies = Bodies(LIMITS)
    bodies.held_bytes = 299_999

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * size, "more_body": False}

    with contextlib.ExitStack() as stack:
        held = stack.enter_context(Held(bodies))
        if size > 1 << 16:
            refused = stack.enter_context(pytest.raises(Refused, match="too many request bodies"))
        asyncio.run(held.read(size, receive, None))
    if size > 1 << 16:
        assert refused.value.status == 503
    assert bodies.held_bytes == 299_999


def test_a_client_that_goes_away_leaves_nothing() -> None:
    with pytest.raises(Disconnected):
        body_of(b"{", ends="http.disconnect")


def test_other_tasks_run_while_a_large_piece_is_counted() -> None:
    async def both() -> int:
        turns = 0
        limits = RequestLimits.from_environ({})

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * (4 << 20), "more_body": False}

        reading = asyncio.create_task(Held(Bodies(limits)).read(0, receive, JsonScan(9, 9, 9)))
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(both()) > 60


def test_heavy_bodies_leave_the_event_loop_to_others_in_between() -> None:
    """Of eight bodies that each hold the loop for 50 ms, a light task waits for a few."""

    async def run() -> int:
        pace, over = Pace(), 0

        async def heavy() -> None:
            nonlocal over
            await pace.turn()
            time.sleep(0.05)
            over += 1

        tasks = [asyncio.create_task(heavy()) for _ in range(8)]
        most = 0
        while not all(task.done() for task in tasks):
            before = over
            for _ in range(4):  # the steps of a request to /health
                await asyncio.sleep(0)
            most = max(most, over - before)
        return most

    assert asyncio.run(run()) < 6

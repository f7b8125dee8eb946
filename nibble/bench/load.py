"""The mixed load of a soak: short, long, streaming, aborted, seeded and structured requests."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nibble.bench.served import Served, reason_of
from nibble.printable import printable
from nibble.serve.endpoint import Endpoint

TIMEOUT_S = 600.0
REFUSALS = (429, 503)  # the server says that it is full, paused or draining
_AFTER_FAILURE_S = 0.5
_SHORT, _LONG_OUTPUT, _STREAMED, _ABORT_AFTER, _STRUCTURED = 12, 16, 48, 4, 64
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


class Failed(Exception):
    """A request that did not get what it asked for. `status` is 0 without an answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(printable(reason)[:160])
        self.status = status


@dataclass
class Counts:
    """What happened so far, by kind of request. Threads share it."""

    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seeded: Counter[str] = field(default_factory=Counter)  # answer -> how often
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str, failure: Failed | None) -> None:
        """One request that ended."""
        with self.lock:
            if failure is None:
                self.done[kind] += 1
            elif failure.status in REFUSALS:
                self.refused[kind] += 1
            else:
                self.failed[kind] += 1
                self.reasons[f"{kind}: {failure}"] += 1


@dataclass(frozen=True)
class Load:
    """Sends requests to one model. `ids` are some token ids of its vocabulary."""

    endpoint: Endpoint
    served: Served
    ids: Sequence[int]
    counts: Counts = field(default_factory=Counts)

    def short(self, dice: random.Random) -> None:
        """A short prompt and answer."""
        self._complete({"prompt": f"Question {dice.randrange(10**6)}:", "max_tokens": _SHORT})

    def long(self, dice: random.Random) -> None:
        """A prompt of up to half the context, different each time."""
        length = dice.randint(1, max(1, self.served.max_model_len // 2))
        begin = dice.randrange(len(self.ids))
        prompt = [self.ids[(begin + place * 7) % len(self.ids)] for place in range(length)]
        self._complete({"prompt": prompt, "max_tokens": _LONG_OUTPUT})

    def streamed(self, dice: random.Random) -> None:
        """A stream with all tokens, a count of them, and an end."""
        tokens = 0
        for event in self._stream(dice):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if tokens != _STREAMED:
            raise Failed(0, f"a stream of {tokens} tokens instead of {_STREAMED}")

    def aborted(self, dice: random.Random) -> None:
        """A stream that the client closes after a few tokens."""
        for number, _ in enumerate(self._stream(dice)):
            if number >= _ABORT_AFTER:
                return

    def seeded(self, _: random.Random) -> None:
        """A sampled answer with a fixed seed."""
        body = {"prompt": "Once", "max_tokens": _SHORT, "temperature": 1.0, "seed": 7}
        text = self._complete(body)["choices"][0]["text"]
        with self.counts.lock:
            self.counts.seeded[text] += 1

    def structured(self, dice: random.Random) -> None:
        """An answer that must follow a JSON schema."""
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        body = {
            "prompt": f"Is {dice.randrange(100)} even? Answer in JSON:",
            "max_tokens": _STRUCTURED,
            "response_format": schema,
        }
        choice = self._complete(body, ignore_eos=False)["choices"][0]
        if choice["finish_reason"] == "length":  # blanks are valid JSON, as many as fit
            return
        check_structured(choice["text"])

    def _complete(self, body: Mapping[str, Any], ignore_eos: bool = True) -> dict[str, Any]:
        whole = {"model": self.served.name, "ignore_eos": ignore_eos, **body}
        try:
            status, answer = self.endpoint.call("/v1/completions", whole, TIMEOUT_S)
        except OSError as error:
            raise Failed(0, f"no answer ({error.strerror or error})") from None
        if status != 200:
            raise Failed(status, f"status {status}: {reason_of(answer)}")
        try:
            found = json.loads(answer)
            _ = found["choices"][0]["text"]
            return found
        except (ValueError, KeyError, IndexError, TypeError):
            raise Failed(0, "an answer without a text") from None

    def _stream(self, dice: random.Random) -> Iterator[dict[str, Any]]:
        """Events of a stream. Raises Failed where it ends without [DONE]."""
        body = {
            "model": self.served.name,
            "prompt": f"Story {dice.randrange(10**6)}:",
            "max_tokens": _STREAMED,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = self.endpoint.connect(TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), self.endpoint.headers())
            response = connection.getresponse()
            if response.status != 200:
                reason = f"status {response.status}: {reason_of(response.read())}"
                raise Failed(response.status, reason)
            for line in response:
                text = line.decode(errors="replace").strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data: "):
                    yield _event(text.removeprefix("data: "))
            raise Failed(0, "a stream without an end")
        except (OSError, http.client.HTTPException) as error:
            raise Failed(0, f"a stream that broke ({type(error).__name__})") from None
        finally:
            connection.close()


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        raise Failed(0, "an event that is not JSON") from None
    if "error" in event:
        raise Failed(0, f"an error in a stream: {event['error'].get('message', '')}")
    return event


def check_structured(text: str) -> None:
    """Raises Failed where a text does not follow SCHEMA."""
    try:
        found = json.loads(text)
        follows = found.keys() == {"answer", "sure"} and found["answer"] in ("yes", "no")
        follows = follows and isinstance(found["sure"], bool)
    except (ValueError, AttributeError, RecursionError):
        follows = False
    if not follows:
        raise Failed(0, f"an answer against its JSON schema: {text[:60]!r}")


KINDS: Mapping[str, Callable[[Load, random.Random], None]] = {
    "short": Load.short,
    "long": Load.long,
    "streamed": Load.streamed,
    "aborted": Load.aborted,
    "seeded": Load.seeded,
    "structured": Load.structured,
}


def supported(load: Load) -> tuple[list[str], dict[str, str]]:
    """(kinds that the model can answer, reason of each other one), by one request of each."""
    can, cannot = [], {}
    for kind, send in KINDS.items():
        try:
            send(load, random.Random(0))
        except Failed as failure:
            if failure.status in (400, 404, 422, 501):
                cannot[kind] = str(failure)
                continue
        can.append(kind)
    load.counts.seeded.clear()
    return can, cannot


class Clients:
    """Threads that send requests one after another until `stop`."""

    def __init__(self, load: Load, kinds: Sequence[str], count: int, seed: int) -> None:
        self._load, self._kinds, self._over = load, kinds, threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(seed + number),), daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, limit_s: float) -> int:
        """Wait for running requests; how many are still running after `limit_s`."""
        self._over.set()
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _work(self, dice: random.Random) -> None:
        while not self._over.is_set():
            kind, failure = dice.choice(list(self._kinds)), None
            try:
                KINDS[kind](self._load, dice)
            except Failed as error:
                failure = error
            self._load.counts.count(kind, failure)
            if failure is not None:
                self._over.wait(_AFTER_FAILURE_S)

"""Reads and checks a request between the gate and vLLM, and refuses it or passes it on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nibble.engine.guard.body import Bodies, Header, Held, Receive, parse, replayed, with_field
from nibble.engine.guard.contents import Body
from nibble.engine.guard.fields import ModelFacts, count_sequences, field_problem, is_small
from nibble.engine.guard.grammar_worker import Limits
from nibble.engine.guard.grammars import Grammars
from nibble.engine.guard.json_scan import JsonScan
from nibble.engine.guard.limits import RequestLimits
from nibble.engine.guard.logprob_fields import answer_limit
from nibble.engine.guard.numbers import number_problem
from nibble.engine.guard.pace import HEAVY_BYTES, HEAVY_ITEMS, HEAVY_SEQUENCES, Pace
from nibble.engine.guard.refusal import Refused

_MULTIPART_PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})


class RequestGuard:
    """Checks the requests of one API process, before they go to vLLM."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.limits = RequestLimits.from_environ(environ)
        self._bodies = Bodies(self.limits)
        self._pace = Pace()
        self._facts: ModelFacts | None = None
        limits = self.limits
        self._grammars = Grammars(
            Limits(limits.grammar_seconds, limits.grammar_memory_mib, limits.grammar_bytes)
        )

    def held(self) -> Held:
        """A context manager for one request, from before `check` to the end of the answer."""
        return Held(self._bodies)

    async def check(
        self, path: str, scope: dict[str, Any], receive: Receive, held: Held
    ) -> Receive:
        """The ASGI `receive` to give to vLLM. Raises Refused, and Disconnected if the client left.

        path: as the router sees it (routes.router_path).
        """
        media_type, declared_bytes = _body_of(scope["headers"])
        if declared_bytes is None:
            return receive
        if path in _MULTIPART_PATHS:
            _expect(media_type == b"multipart/form-data", "multipart/form-data")
            return replayed(await held.read(declared_bytes, receive, None), receive)
        is_json = media_type == b"application/json" or media_type.endswith(b"+json")
        _expect(is_json, "application/json")
        facts = self._model_facts(scope)
        scan = JsonScan(
            self.limits.max_json_depth,
            self.limits.max_json_keys,
            facts.max_items(path, self.limits),
        )
        body = await held.read(declared_bytes, receive, scan)
        value = parse(body)
        if problem := scan.problem_of(value):
            raise Refused(400, problem)
        if not isinstance(value, dict):
            return replayed(body, receive)  # vLLM answers with status 400
        if problem := number_problem(value):
            raise Refused(400, problem)
        if is_small(path, value, len(body), self.limits):
            return replayed(body, receive)
        await self._check_fields(path, value, len(body), facts, scope)
        if limit := answer_limit(path, value, self.limits, facts.context_tokens):
            body = with_field(body, *limit)
        is_heavy = (
            len(body) > HEAVY_BYTES
            or scan.has_more_than(HEAVY_ITEMS)
            or count_sequences(path, value) > HEAVY_SEQUENCES
        )
        return replayed(body, receive, self._pace.turn if is_heavy else None)

    async def _check_fields(
        self, path: str, body: Body, size: int, facts: ModelFacts, scope: dict[str, Any]
    ) -> None:
        if problem := field_problem(path, body, size, self.limits, facts):
            raise Refused(400, problem)
        if problem := await self._grammars.problem(path, body, scope.get("app")):
            raise Refused(problem.status, problem)

    def _model_facts(self, scope: dict[str, Any]) -> ModelFacts:
        if self._facts is None:
            self._facts = ModelFacts.of_app(scope.get("app"))
        return self._facts


def _body_of(headers: list[Header]) -> tuple[bytes, int | None]:
    """(media type in lower case, declared bytes of the body), by RFC 9112 section 6.3.

    Bytes are 0 for a chunked body and None for a request without a body. The first of several media
    types counts, as in starlette 1.10 (datastructures.py Headers.__getitem__).
    """
    media_type, declared_bytes = None, None
    for name, value in headers:
        if name == b"content-type":
            if media_type is None:
                media_type = value.partition(b";")[0].strip().lower()
        elif name == b"content-length" and value != b"0":
            declared_bytes = int(value[:20]) if value.isdigit() else 0
        elif name == b"transfer-encoding":
            declared_bytes = declared_bytes or 0
    return media_type or b"", declared_bytes


def _expect(is_right: bool, media_type: str) -> None:
    if not is_right:
        raise Refused(415, f"Unsupported media type; this route takes {media_type}.")

"""One line for each way in which Ray does not start or ends, instead of Ray's tracebacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nibble.errors import ExitCode, NibbleError


def explain_failure(lines: Iterable[str], role: str, head: str) -> NibbleError:
    """The error behind the output `lines` of `ray start`. `head` is ADDRESS:PORT."""
    lines = list(lines)
    text = "\n".join(lines)
    if re.search(r"AuthenticationError|InvalidAuthToken|Unauthenticated|UNAUTHENTICATED", text):
        return NibbleError(
            ExitCode.CLUSTER,
            what=f"the Ray head at {head} refused this node's token",
            expected="the head's token",
            action="set RAY_AUTH_TOKEN_FILE to a copy of the head's file",
        )
    if re.search(r"already running at|Address already in use|already in use|EADDRINUSE", text):
        return NibbleError(
            ExitCode.CLUSTER,
            what=f"Ray cannot open its ports for {head}: another program uses one",
            expected="free ports",
            action="stop the other Ray node on this machine (`ray stop`)",
        )
    if role == "worker" and re.search(
        r"[Ff]ailed to connect|[Uu]nable to connect|[Tt]imed? ?out|ConnectionError", text
    ):
        return unreachable(head)
    return NibbleError(
        ExitCode.CLUSTER,
        what=f"Ray did not start: {_last_error(lines)[:300]}",
        action="run again with NIBBLE_DEBUG=1 to see its whole output",
    )


def _last_error(lines: list[str]) -> str:
    """The last line with an exception, else the last line with text."""
    errors = [
        line.strip() for line in lines if re.match(r"\s*(?:[\w.]+)?(?:Error|Exception)\b.*: ", line)
    ]
    if errors:
        return errors[-1]
    return next((line for line in reversed(lines) if line.strip()), "no message")


def unreachable(head: str, why: str = "") -> NibbleError:
    """The error for a head that does not answer; `head` is ADDRESS:PORT."""
    what = f"no Ray head answers at {head}" + (f" ({why})" if why else "")
    return NibbleError(
        ExitCode.CLUSTER,
        what=what,
        expected="a running `ray-head`",
        action="check HEAD_IP and the firewall between the nodes",
    )


def ended_processes(lines: Iterable[str]) -> str:
    """What `ray start --block` prints about its ended processes (ray 2.60 scripts.py), after a
    colon; empty if it prints nothing.
    """
    ended = [line.strip() for line in lines if re.search(r"\[exit code=", line)]
    texts = [re.sub(r"^.*ERR scripts\.py:\d+ -- ", "", line) for line in ended]
    return f": {'; '.join(texts)}" if texts else ""

"""The claim on a cluster's ports and GPUs: one starting server or one check at a time.

The head keeps the claim (`Roster.claim`) and drops it when its owner stops renewing it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading

from nibble.cluster.agent import AgentError
from nibble.cluster.preflight import Caller
from nibble.cluster.roster import BEAT_S
from nibble.errors import NibbleError


class Claim:
    """`what` tells others who has the nodes. The end of a `with` releases the claim."""

    def __init__(self, caller: Caller, what: str) -> None:
        self._caller = caller
        self._body = {"who": secrets.token_hex(8), "what": what}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def who(self) -> str:
        """A random id of this claim's owner."""
        return self._body["who"]

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self) -> None:
        """Claim the nodes and keep the claim. Raises AgentError: status 400 names the owner, other
        statuses are those of any call.
        """
        if self._thread is None:
            self._ask("/claim")
            self._over.clear()
            self._thread = threading.Thread(target=self._renew, name="claim", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Give the nodes back."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._over.set()
            thread.join()  # a renewal after the release would claim the nodes again
            with contextlib.suppress(AgentError, NibbleError):
                self._ask("/release")

    def _renew(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(AgentError, NibbleError):
                self._ask("/claim")

    def _ask(self, path: str) -> None:
        self._caller.ask(self._caller.head, path, self._body, 3.0)

"""Ends a vLLM that hangs: stops admission, logs the stacks, ends the clients' streams and the
engine.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence

from nibble.engine.gate.admission import Admission
from nibble.engine.process import Engine, Event, Failed
from nibble.errors import NibbleError
from nibble.machine.gpu_state import XidLog, gpu_report
from nibble.serve.failures import hung
from nibble.serve.hang.watch import Hang

CLIENTS_S = 5.0  # vLLM 0.32 ended 64 streams 0.4 s after its engine, and itself within 5 s
_POLL_S = 0.1


class HangEnd:
    """Ends vLLM; called once with the hang, in the watch's thread. `error` is then the server's."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        events: queue.SimpleQueue[Event],
        phase: Callable[[], str],
        say: Callable[[str], None],
        gpus: Sequence[int],
    ) -> None:
        self._engine, self._admission, self._events = engine, admission, events
        self._phase, self._say, self._gpus = phase, say, gpus
        self._xids = XidLog(gpus) if gpus else None
        self.error: NibbleError | None = None

    def __call__(self, hang: Hang) -> None:
        stall = hang.stall
        why = f"{stall.what} for {stall.waited_s:.0f} s"
        for state in ("ready", "paused"):
            self._admission.change(state, "paused", f"vLLM hangs: {why}")
        self._say(f"vLLM hangs: {why}; new requests get 503; nibble ends it")
        for name, text in hang.stacks.items():
            for line in text.splitlines():
                self._say(f"{name}: {line}")
        gpus = gpu_report(self._gpus, self._xids) if self._gpus else []
        self.error = hung(self._phase(), stall.what, stall.waited_s, gpus)
        if stall.kind != "api":
            self._engine.kill_below()
            self._until_clients_are_told()
        self._events.put(Failed(self.error))

    def _until_clients_are_told(self) -> None:
        """Wait for the API server, which ends once it has sent the error to its clients; do not
        wait for a stopped one.
        """
        deadline = time.monotonic() + CLIENTS_S
        while time.monotonic() < deadline and not self._engine.has_ended():
            time.sleep(_POLL_S)

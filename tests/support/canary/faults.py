"""A server of nibble's with the fault plugin, and what each mechanism of the canary says of each
fault.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from nibble.canary.client import Asker
from nibble.canary.references import References, record
from nibble.canary.run import Finding, run_canary
from nibble.engine.api import Api
from tests.support.servers.serving import Server
from tests.support.vllm_plugins import vllm_faults
from tests.support.vllm_plugins.install import install
from tests.support.vllm_plugins.vllm_faults import API_FAULTS, FAULTS, NONE

SECONDS = 60.0  # for tests, machines may be shared

ALL_FAULTS = (*FAULTS, *API_FAULTS)


def install_faults(folder: Path) -> dict[str, str]:
    """The variables of a server with the fault plugin, which reads and writes in `folder`."""
    return {**install(folder, vllm_faults), "FAULTS_FOLDER": str(folder)}


class Faulty:
    """A running server, one fault at a time."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder, self._serial = server, folder, 0
        self._api = Api("127.0.0.1", server.port, "")

    def asker(self) -> Asker:
        return Asker(self._api, "default", SECONDS)

    def inject(self, fault: str = NONE) -> list[dict]:
        """Undo the last fault, do this one; the workers' reports with it."""
        self._serial += 1
        (self.folder / "wanted").write_text(f"{self._serial} {fault}")
        # A new prompt, so that no cached prefix answers from a time before the fault.
        assert (
            self.server.ask(
                "/v1/completions",
                {"model": "default", "prompt": f"{self._serial}", "max_tokens": 1},
            )[0]
            == 200
        )
        until = time.monotonic() + SECONDS
        while not (self.folder / "done").exists() or (self.folder / "done").read_text() != str(
            self._serial
        ):
            assert time.monotonic() < until, fault
            time.sleep(0.02)
        return [json.loads((self.folder / "report.json").read_text())]

    def record(self, prompts: list) -> References:
        """References of the server as it is now."""
        return References(
            tuple(record(self.asker(), prompt, 16) for prompt in prompts), "this server"
        )

    def canary(
        self, fault: str, references: References | None, *, coherence: bool = False
    ) -> dict[str, Finding]:
        """Mechanism -> finding. Without references, coherence is asked only where the model has
        any.
        """
        reports = self.inject(fault)
        found = run_canary(self.asker(), reports, references)
        return {one.mechanism: one for one in found if coherence or one.mechanism != "coherence"}

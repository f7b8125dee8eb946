"""One download with Ray: nodes without the model's folder copy it from the server's machine.

A node's side is `Copies`: it offers a folder or fetches one, when the server asks (`distribute`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nibble.cluster.agent import AgentError, Handler, Sender
from nibble.cluster.facts import Problem, model_state
from nibble.cluster.file_server import Offers, fetch_model
from nibble.cluster.preflight import Caller
from nibble.cluster.roster import BEAT_S
from nibble.errors import NibbleError
from nibble.hub.access import access
from nibble.machine.paths import cache_dir

Tell = Callable[[str], None]


class Copies:
    """What a node gives away and what it fetches. `cache` is nibble's cache folder: nothing is
    written outside of it and of the Hub's.
    """

    def __init__(self, token: str, environ: Mapping[str, str], cache: Path | None) -> None:
        self._token, self._environ = token, environ
        self._places = [
            place.resolve() for place in (cache or cache_dir(environ), access(environ).cache)
        ]
        self._offers = Offers()
        self._lock = threading.Lock()
        self._states: dict[str, tuple[str, str]] = {}

    def handlers(self) -> dict[str, Handler]:
        """For the agent's POST paths.

        `/offer` {folder} -> {name}; `/fetch` {address, name, folder} -> {state, detail}: asked
        again and again, it begins the transfer once and says how far it is. "here" and "failed" are
        said once; a request after that begins anew.
        """
        return {"/offer": self._offer, "/fetch": self._fetch, **self._offers.handlers()}

    def senders(self) -> dict[str, Sender]:
        """For the agent's GET paths."""
        return self._offers.senders()

    def _offer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        folder = str(body["folder"])
        if (state := model_state(folder)) != "here":
            raise ValueError(f"{folder} is {state}")
        return {"name": self._offers.add(Path(folder))}

    def _fetch(self, body: Mapping[str, Any]) -> dict[str, Any]:
        address, name, folder = str(body["address"]), str(body["name"]), str(body["folder"])
        if not any(Path(folder).resolve().is_relative_to(place) for place in self._places):
            raise ValueError(f"{folder} is not in this node's cache folder ({self._places[0]})")
        with self._lock:
            if folder not in self._states:
                self._states[folder] = ("fetching", "")
                work = (address, name, folder)
                threading.Thread(target=self._receive, args=work, name="fetch", daemon=True).start()
            state, detail = self._states[folder]
            if state != "fetching":
                del self._states[folder]
        return {"state": state, "detail": detail}

    def _receive(self, address: str, name: str, folder: str) -> None:
        try:
            fetch_model(
                address,
                self._token,
                self._environ,
                Path(folder),
                lambda text: self._note(folder, "fetching", text),
                name,
            )
            self._note(folder, "here", "")
        except Exception as error:  # whatever it is, the server asks until it hears an end
            self._note(
                folder, "failed", error.what if isinstance(error, NibbleError) else str(error)
            )

    def _note(self, folder: str, state: str, detail: str) -> None:
        with self._lock:
            self._states[folder] = (state, detail)


def distribute(
    caller: Caller,
    nodes: Sequence[Mapping[str, Any]],
    source: str,
    folders: Sequence[str],
    over: threading.Event,
    tell: Tell,
) -> list[Problem]:
    """Give `folders` of the node at address `source` to those of `nodes` that lack them; returns
    when all have them, at the first problem, or when `over` is set.
    """
    for folder in folders:
        try:
            lacking = _lacking(caller, nodes, folder)
            name = caller.ask(source, "/offer", {"folder": folder})["name"] if lacking else ""
        except AgentError as error:
            action = "run `serve` beside a Ray node that sees the same files"
            return [
                Problem(source, f"it cannot offer {folder} to the other nodes ({error})", action)
            ]
        if problem := _give(
            caller, lacking, {"address": source, "name": name, "folder": folder}, over, tell
        ):
            return [problem]
    return []


def _lacking(
    caller: Caller, nodes: Sequence[Mapping[str, Any]], folder: str
) -> dict[str, Mapping[str, Any]]:
    """The nodes that have not all of `folder`, by address. Raises AgentError."""
    found = {}
    for node in nodes:
        answer = caller.ask(node["address"], "/facts", {"models": [folder]})
        if answer["models"][folder] != "here":
            found[node["address"]] = node
    return found


def _give(
    caller: Caller,
    lacking: Mapping[str, Mapping[str, Any]],
    body: Mapping[str, str],
    over: threading.Event,
    tell: Tell,
) -> Problem | None:
    """All of `lacking` fetch at the same time; their progress goes to `tell`."""
    waiting, said = dict(lacking), dict.fromkeys(lacking, "")
    for node in lacking.values():
        tell(f"{node['name']} fetches {body['folder']} from {body['address']}")
    while waiting and not over.is_set():
        for address, node in list(waiting.items()):
            try:
                answer = caller.ask(address, "/fetch", body)
            except AgentError as error:
                action = (
                    "copy the model to the same path on that node, or set the same"
                    " NIBBLE_CACHE_DIR on every node"
                )
                return Problem(
                    node["name"], f"it does not fetch {body['folder']} ({error})", action
                )
            if answer["state"] == "failed":
                action = "check that node's disk and network, and start again: finished files stay"
                return Problem(node["name"], answer["detail"], action)
            if answer["state"] == "here":
                del waiting[address]
            elif answer["detail"] not in ("", said[address]):
                said[address] = answer["detail"]
                tell(f"{node['name']}: {answer['detail']}")
        if waiting:
            over.wait(BEAT_S)
    return None

"""One download with Ray: nodes without the model's folder copy it from the server's machine.

`Copies` is a node's side: it offers or fetches a folder on request. `distribute` is the server's
side.
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
    """The folders that a node offers and fetches. `cache` is nibble's cache folder. A node writes
    only to that folder and to the Hub's cache.
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
        """The agent's POST paths.

        `/offer` {folder} -> {name}. `/fetch` {address, name, folder} -> {state, detail}: the first
        request begins the transfer, later ones return its progress. "here" and "failed" are
        returned once; a request after that begins a new transfer.
        """
        return {"/offer": self._offer, "/fetch": self._fetch, **self._offers.handlers()}

    def senders(self) -> dict[str, Sender]:
        """The agent's GET paths."""
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
                lambda text: self._set_state(folder, "fetching", text),
                name,
            )
            self._set_state(folder, "here", "")
        except Exception as error:  # the server polls until it reads an end state
            self._set_state(
                folder, "failed", error.what if isinstance(error, NibbleError) else str(error)
            )

    def _set_state(self, folder: str, state: str, detail: str) -> None:
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
    """Copy `folders` from the node at address `source` to the nodes that lack them.

    Returns when all nodes have them, at the first problem, or when `over` is set.
    """
    for folder in folders:
        try:
            lacking = _nodes_without(caller, nodes, folder)
            name = caller.ask(source, "/offer", {"folder": folder})["name"] if lacking else ""
        except AgentError as error:
            action = "run `serve` beside a Ray node that sees the same files"
            return [
                Problem(source, f"it cannot offer {folder} to the other nodes ({error})", action)
            ]
        if problem := _copy_to(
            caller, lacking, {"address": source, "name": name, "folder": folder}, over, tell
        ):
            return [problem]
    return []


def _nodes_without(
    caller: Caller, nodes: Sequence[Mapping[str, Any]], folder: str
) -> dict[str, Mapping[str, Any]]:
    """The nodes that do not have all files of `folder`, by address. Raises AgentError."""
    nodes_without = {}
    for node in nodes:
        answer = caller.ask(node["address"], "/facts", {"models": [folder]})
        if answer["models"][folder] != "here":
            nodes_without[node["address"]] = node
    return nodes_without


def _copy_to(
    caller: Caller,
    lacking: Mapping[str, Mapping[str, Any]],
    body: Mapping[str, str],
    over: threading.Event,
    tell: Tell,
) -> Problem | None:
    """Let all of `lacking` fetch at the same time; report their progress to `tell`. Returns the
    first problem.
    """
    waiting, last_details = dict(lacking), dict.fromkeys(lacking, "")
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
            elif answer["detail"] not in ("", last_details[address]):
                last_details[address] = answer["detail"]
                tell(f"{node['name']}: {answer['detail']}")
        if waiting:
            over.wait(BEAT_S)
    return None

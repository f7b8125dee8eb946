"""With Ray, nodes that lack the model get it from the server's machine, at the same path."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nibble.cluster import agent as agent_module
from nibble.cluster.agent import Agent, AgentError, call
from nibble.cluster.model_copies import Copies, distribute
from nibble.cluster.preflight import Caller
from tests.support.servers.serving import free_port

TOKEN = "0123456789abcdef"
SOURCE, TAKER = "127.0.0.1", "127.0.0.2"
WEIGHTS = bytes(range(256)) * 5000
FOLDER = "/var/cache/nibble/model"
NODES = [{"address": address, "name": address} for address in (SOURCE, TAKER)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "source" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes with separate cache folders."""
    monkeypatch.setattr(agent_module, "AGENT_PORT", free_port(SOURCE))
    agents: list[Agent] = []
    for address, name in ((SOURCE, "source"), (TAKER, "taker")):
        copies = Copies(TOKEN, {"HOME": str(tmp_path / name)}, tmp_path / name)
        agents.append(Agent(address, TOKEN, copies.handlers(), copies.senders()).start())
    yield
    for agent in agents:
        agent.close()


def fetched(body: Mapping[str, str]) -> dict[str, Any]:
    """The last answer of /fetch, asked until it is over."""
    while (answer := call(TAKER, "/fetch", TOKEN, body))["state"] == "fetching":
        time.sleep(0.02)
    return answer


def test_a_node_takes_a_folder_that_another_one_offers(
    nodes: None, model: Path, tmp_path: Path
) -> None:
    name = call(SOURCE, "/offer", TOKEN, {"folder": str(model)})["name"]
    body = {"address": SOURCE, "name": name, "folder": str(tmp_path / "taker" / "deep" / "model")}
    assert fetched(body)["state"] == "here"
    assert (Path(body["folder"]) / "model.safetensors").read_bytes() == WEIGHTS


def test_nothing_is_written_outside_of_the_cache(nodes: None, model: Path, tmp_path: Path) -> None:
    name = call(SOURCE, "/offer", TOKEN, {"folder": str(model)})["name"]
    for folder in (tmp_path / "elsewhere", tmp_path / "taker" / ".." / "elsewhere"):
        with pytest.raises(AgentError, match="not in this node's cache folder") as caught:
            call(TAKER, "/fetch", TOKEN, {"address": SOURCE, "name": name, "folder": str(folder)})
        assert caught.value.status == 400
    assert not (tmp_path / "elsewhere").exists()


def test_only_a_whole_model_is_offered(nodes: None, model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    for folder in (model, tmp_path / "none"):
        with pytest.raises(AgentError, match=r"is (incomplete|absent)"):
            call(SOURCE, "/offer", TOKEN, {"folder": str(folder)})


def test_a_transfer_that_fails_in_an_unknown_way_ends_too(
    nodes: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*given: Any) -> Path:
        raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")

    monkeypatch.setattr("nibble.cluster.model_copies.fetch_model", fetch)
    body = {"address": SOURCE, "name": "name", "folder": str(tmp_path / "taker" / "model")}
    answer = fetched(body)
    assert (answer["state"], "surrogates" in answer["detail"]) == ("failed", True)


def test_a_node_whose_disk_is_too_small_is_named_with_the_arithmetic(
    nodes: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nibble.cluster.file_server.free_bytes", lambda path: 1 << 30)
    name = call(SOURCE, "/offer", TOKEN, {"folder": str(model)})["name"]
    body = {"address": SOURCE, "name": name, "folder": str(tmp_path / "taker" / "model")}
    answer = fetched(body)
    assert answer["state"] == "failed"
    assert "needs 1.2 MiB and a margin of 1.0 GiB" in answer["detail"]
    assert not (tmp_path / "taker" / "model").exists()


def test_a_failed_transfer_is_said_once_and_begins_anew(
    nodes: None, model: Path, tmp_path: Path
) -> None:
    body = {"address": SOURCE, "name": "gone", "folder": str(tmp_path / "taker" / "model")}
    assert fetched(body) == {"state": "failed", "detail": "no model is offered yet"}
    name = call(SOURCE, "/offer", TOKEN, {"folder": str(model)})["name"]
    assert fetched(body | {"name": name})["state"] == "here"


class Answers(Caller):
    """Nodes whose answers to /fetch are given; the first one has the model."""

    def __init__(self, *answers: dict[str, Any] | AgentError) -> None:
        super().__init__(SOURCE, TOKEN, {})
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "answers", list(answers))

    def ask(
        self, address: str, path: str, body: Mapping[str, Any], timeout_s: float = 0.0
    ) -> dict[str, Any]:
        self.asked.append((address, path))  # pyright: ignore[reportAttributeAccessIssue]
        if path == "/facts":
            return {"models": {FOLDER: "here" if address == SOURCE else "absent"}}
        if path == "/offer":
            assert address == SOURCE
            return {"name": "name"}
        assert (address, body) == (TAKER, {"address": SOURCE, "name": "name", "folder": FOLDER})
        answer = self.answers.pop(0)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(answer, AgentError):
            raise answer
        return answer


def given(*answers: dict[str, Any] | AgentError) -> tuple[list[str], list[str]]:
    """(problems, what was told) of a distribution with these answers."""
    told: list[str] = []
    problems = distribute(
        Answers(*answers), NODES, SOURCE, [FOLDER], threading.Event(), told.append
    )
    return [f"{one.node}: {one.what}" for one in problems], told


def test_nodes_that_lack_the_model_fetch_it_and_say_how_far_they_are() -> None:
    going = {"state": "fetching", "detail": "fetching a"}
    told = [f"{TAKER} fetches {FOLDER} from {SOURCE}", f"{TAKER}: fetching a"]
    assert given(going, going, {"state": "here", "detail": ""}) == ([], told)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"state": "failed", "detail": "its sha256 is wrong"}, "its sha256 is wrong"),
        (AgentError(400, "not in this node's cache folder"), "not in this node's cache folder"),
        (AgentError(0, "timed out"), "timed out"),
    ],
)
def test_a_node_that_cannot_have_it_is_named(
    answer: dict[str, Any] | AgentError, words: str
) -> None:
    problems, _ = given(answer)
    assert problems[0].startswith(TAKER)
    assert words in problems[0]


def test_a_cluster_that_has_it_is_asked_for_nothing() -> None:
    caller = Answers()
    assert distribute(caller, NODES[:1], SOURCE, [FOLDER], threading.Event(), print) == []
    assert caller.asked == [(SOURCE, "/facts")]  # pyright: ignore[reportAttributeAccessIssue]

"""A node gives a model's files to another: ranges, sha256, resuming, and the token."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.cluster import agent as agent_module
from nibble.cluster import file_server
from nibble.cluster.agent import Agent, AgentError, call
from nibble.cluster.facts import model_state
from nibble.cluster.file_server import PARTIAL, Offers, fetch_from_head, fetch_model
from nibble.errors import ExitCode, NibbleError
from nibble.settings.sources import load_settings
from tests.support.servers.serving import free_port

TOKEN = "0123456789abcdef"
WEIGHTS = bytes(range(256)) * 100_000  # more than the buffers of a connection hold


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A snapshot as the Hub's cache has it: links to blobs."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    (folder / "sub").mkdir(parents=True)
    (blobs / "w").write_bytes(WEIGHTS)
    (folder / "model.safetensors").symlink_to(blobs / "w")
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "a b.txt").write_text("")
    return folder


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "AGENT_PORT", free_port())


@pytest.fixture
def offers(source: Path, port: None) -> Iterator[Offers]:
    found = Offers()
    found.add(source)
    agent = Agent("127.0.0.1", TOKEN, found.handlers(), found.senders()).start()
    yield found
    agent.close()


def quiet(text: str) -> None:
    """Says nothing."""


def get(path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", agent_module.AGENT_PORT, timeout=5)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def test_a_model_arrives_whole_and_a_second_time_nothing_is_sent(
    offers: Offers, tmp_path: Path
) -> None:
    said: list[str] = []
    there = fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "there", said.append)
    assert (there / "model.safetensors").read_bytes() == WEIGHTS
    assert (there / "sub" / "a b.txt").read_text() == ""
    assert len(said) == 3
    fetch_model("127.0.0.1", TOKEN, {}, there, said.append)
    assert len(said) == 3


def test_a_broken_transfer_goes_on_where_it_ended(
    offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / f"model.safetensors{PARTIAL}").write_bytes(WEIGHTS[:1000])
    asked: list[int] = []
    receive = file_server._receive

    def watched(address, token, environ, path, first):
        asked.append(first)
        return receive(address, token, environ, path, first)

    monkeypatch.setattr(file_server, "_receive", watched)
    fetch_model("127.0.0.1", TOKEN, {}, there, quiet)
    assert (there / "model.safetensors").read_bytes() == WEIGHTS
    assert 1000 in asked


def test_a_transfer_that_breaks_again_and_again_comes_to_its_end(
    offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "PAUSE_S", 0)
    receive = file_server._receive

    def broken(address, token, environ, path, first):
        for data in receive(address, token, environ, path, first):
            yield data[: len(WEIGHTS) // 20]
            raise ConnectionError("reset")

    monkeypatch.setattr(file_server, "_receive", broken)
    there = fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "there", quiet)
    assert (there / "model.safetensors").read_bytes() == WEIGHTS


def test_a_node_that_sends_nothing_is_exit_4(
    offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "PAUSE_S", 0)
    monkeypatch.setattr(file_server, "_receive", lambda *given: iter(()))
    with pytest.raises(NibbleError, match="the connection ended early") as caught:
        fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "there", quiet)
    assert caught.value.code == ExitCode.MODEL


def test_a_disk_too_small_is_refused_with_the_arithmetic_before_a_byte_comes(
    offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / f"model.safetensors{PARTIAL}").write_bytes(WEIGHTS[:25_000_000])  # does not come again
    monkeypatch.setattr(file_server, "free_bytes", lambda path: 1 << 30)
    with pytest.raises(NibbleError) as caught:
        fetch_model("127.0.0.1", TOKEN, {}, there, quiet)
    assert caught.value.code == ExitCode.NO_FIT
    assert "needs 0.6 MiB and a margin of 1.0 GiB" in caught.value.what
    assert f"{there} has 1.0 GiB free, 0.6 MiB too little" in caught.value.what
    assert "NIBBLE_CACHE_DIR" in caught.value.line()
    assert [path.name for path in there.iterdir()] == [f"model.safetensors{PARTIAL}"]
    monkeypatch.setattr(file_server, "free_bytes", lambda path: (1 << 30) + 600_002)
    fetch_model("127.0.0.1", TOKEN, {}, there, quiet)
    monkeypatch.setattr(file_server, "free_bytes", lambda path: 0)  # all of it is there already
    fetch_model("127.0.0.1", TOKEN, {}, there, quiet)


def test_a_link_that_the_hubs_cache_left_is_replaced_and_its_blob_is_not_touched(
    offers: Offers, tmp_path: Path
) -> None:
    there, blob = tmp_path / "there", tmp_path / "there-blob"
    there.mkdir()
    blob.write_text("[]")
    (there / "config.json").symlink_to(blob)
    (there / "model.safetensors").symlink_to(tmp_path / "nowhere")
    fetch_model("127.0.0.1", TOKEN, {}, there, quiet)
    assert (there / "config.json").read_text() == "{}"
    assert (there / "model.safetensors").read_bytes() == WEIGHTS
    assert blob.read_text() == "[]"


def test_half_of_a_model_is_seen_to_be_one(
    offers: Offers, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption before the last shard leaves the index that names it."""
    (source / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard in shards:
        (source / shard).write_bytes(b"w")
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    fetch = file_server._fetch_file

    def interrupted(address, token, environ, name, file, target):
        if file["path"] == shards[1]:
            raise KeyboardInterrupt
        fetch(address, token, environ, name, file, target)

    monkeypatch.setattr(file_server, "_fetch_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "there", quiet)
    assert model_state(str(tmp_path / "there")) == f"incomplete: {shards[1]} is missing"


def test_who_takes_a_model_is_seen(offers: Offers, tmp_path: Path) -> None:
    assert offers.idle_s() == float("inf")
    fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "there", quiet)
    assert offers.idle_s() < 5


@pytest.mark.parametrize("asked", ["bytes=x-", "bytes=-5", "bytes=0-3", "lines=1-"])
def test_a_range_that_is_not_understood_is_the_whole_file(
    offers: Offers, source: Path, asked: str
) -> None:
    path = f"/files/{offers.add(source)}/config.json"
    assert get(path, Authorization=f"Bearer {TOKEN}", Range=asked) == (200, b"{}")


def test_a_folder_that_cannot_be_made_is_exit_4(offers: Offers, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NibbleError, match="cannot be made") as caught:
        fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "file" / "there", quiet)
    assert caught.value.code == ExitCode.MODEL


def test_wrong_bytes_are_never_kept(offers: Offers, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    # Then fetched again from the beginning
    (there / f"model.safetensors{PARTIAL}").write_bytes(b"x" * 1000)
    (there / "config.json").write_text("[]")
    fetch_model("127.0.0.1", TOKEN, {}, there, quiet)
    assert (there / "model.safetensors").read_bytes() == WEIGHTS
    assert (there / "config.json").read_text() == "{}"


def test_files_that_never_come_right_are_exit_4(
    offers: Offers, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        file_server, "describe", lambda folder, path: {"path": str(path), "size": 2, "sha256": "0"}
    )
    with pytest.raises(NibbleError, match=r"config\.json did not come .*sha256 is wrong") as caught:
        fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "there", quiet)
    assert caught.value.code == ExitCode.MODEL


@pytest.mark.parametrize(
    "path", ["config.json/../../blobs/w", "../blobs/w", "%2e%2e/blobs/w", "/etc/passwd", "none"]
)
def test_only_the_models_own_files_are_given(offers: Offers, source: Path, path: str) -> None:
    name = offers.add(source)
    allowed = {"Authorization": f"Bearer {TOKEN}"}
    assert get(f"/files/{name}/config.json", **allowed) == (200, b"{}")
    assert get(f"/files/{name}/{path}", **allowed)[0] == 404


def test_nothing_is_given_without_the_token(offers: Offers, source: Path) -> None:
    assert get(f"/files/{offers.add(source)}/config.json")[0] == 401
    with pytest.raises(AgentError) as caught:
        fetch_model("127.0.0.1", "wrong", {}, source / "x", quiet)
    assert caught.value.status == 401


@pytest.mark.parametrize("path", ["../evil", "/evil", "sub/..", "sub/../../evil", ".", "link/evil"])
def test_a_node_that_offers_a_path_outside_is_not_trusted(
    offers: Offers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "there" / "sub").mkdir(parents=True)
    (tmp_path / "there" / "link").symlink_to(tmp_path)
    evil = {"name": "n", "files": [{"path": path, "size": 1, "sha256": "0"}]}
    monkeypatch.setattr(file_server, "call", lambda *given: evil)
    with pytest.raises(NibbleError, match="outside of the model"):
        fetch_model("127.0.0.1", TOKEN, {}, tmp_path / "there", quiet)
    assert not (tmp_path / "evil").exists()


def test_a_head_without_a_model_is_waited_for_and_then_an_error(port: None, tmp_path: Path) -> None:
    environ = {
        "MODEL": "org/model",
        "NIBBLE_CLUSTER_TOKEN": TOKEN,
        "NIBBLE_CACHE_DIR": str(tmp_path),
        "NIBBLE_CLUSTER_WAIT_SECONDS": "1",
    }
    with pytest.raises(NibbleError, match=r"offers no model .* after 1 s") as caught:
        fetch_from_head(load_settings({}, environ).settings, environ, "127.0.0.1", quiet)
    assert caught.value.code == ExitCode.CLUSTER


def certificate(folder: Path, name: str) -> dict[str, str]:
    """Ray's TLS variables with a self-signed certificate, its own authority."""
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command = [*words, "-keyout", str(key), "-out", str(cert), "-subj", f"/CN={name}"]
    subprocess.run(command, check=True, capture_output=True)
    files = {"RAY_TLS_SERVER_CERT": cert, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": cert}
    return {"RAY_USE_TLS": "1", **{variable: str(path) for variable, path in files.items()}}


def test_with_tls_only_a_certificate_of_the_clusters_authority_gets_an_answer(
    source: Path, port: None, tmp_path: Path
) -> None:
    ours, other = certificate(tmp_path, "ours"), certificate(tmp_path, "other")
    offered = Offers()
    offered.add(source)
    agent = Agent("127.0.0.1", TOKEN, offered.handlers(), offered.senders(), ours).start()
    try:
        there = fetch_model("127.0.0.1", TOKEN, ours, tmp_path / "there", quiet)
        assert (there / "model.safetensors").read_bytes() == WEIGHTS
        for stranger in (other, other | {"RAY_TLS_CA_CERT": ours["RAY_TLS_CA_CERT"]}, {}):
            with pytest.raises(AgentError) as caught:
                call("127.0.0.1", "/model", TOKEN, {}, environ=stranger)
            assert caught.value.status == 0
            assert "not a nibble node" not in str(caught.value)
    finally:
        agent.close()

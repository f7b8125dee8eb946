from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.serve.api_key import KEY_FILE, is_loopback, resolve_api_key
from tests.support.other_users import open_to_others


def fails(cache_dir: Path, match: str, given_key: str | None = None) -> str:
    """The one-line message of the CONFIG error that resolving for a public bind raises."""
    with pytest.raises(NibbleError, match=match) as caught:
        resolve_api_key("0.0.0.0", given_key, False, cache_dir)
    assert caught.value.code is ExitCode.CONFIG
    assert "\n" not in caught.value.line()
    return caught.value.line()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "::1", "[::1]", "::ffff:127.0.0.1"]
)
def test_loopback_bind_needs_no_key(tmp_path: Path, host: str) -> None:
    decision = resolve_api_key(host, None, False, tmp_path)
    assert (decision.key, decision.source, decision.path) == (None, "loopback", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org", "127.0.0.1.nip.io"],
)
def test_any_other_bind_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_public_bind_generates_a_key_once_and_reuses_it(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    first = resolve_api_key("0.0.0.0", None, False, cache)
    second = resolve_api_key("0.0.0.0", None, False, cache)
    assert first.key
    assert first.key.startswith("nbl-")
    assert len(first.key) >= 40
    assert (first.source, second.source) == ("generated", "stored")
    assert second.key == first.key
    assert first.path == second.path == cache / KEY_FILE
    assert [entry.name for entry in cache.iterdir()] == [KEY_FILE]


def test_stored_key_is_private_under_an_open_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        resolve_api_key("0.0.0.0", None, False, tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_simultaneous_starts_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        decisions = list(
            pool.map(lambda _: resolve_api_key("0.0.0.0", None, False, tmp_path), range(32))
        )
    assert len({decision.key for decision in decisions}) == 1
    assert sum(decision.source == "generated" for decision in decisions) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [KEY_FILE]


def test_two_machines_get_different_keys(tmp_path: Path) -> None:
    keys = {resolve_api_key("0.0.0.0", None, False, tmp_path / name).key for name in "ab"}
    assert len(keys) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_given_key_is_used_on_every_bind_and_not_stored(tmp_path: Path, host: str) -> None:
    decision = resolve_api_key(host, "given-key", True, tmp_path)
    assert (decision.key, decision.source, decision.path) == ("given-key", "given", None)
    assert list(tmp_path.iterdir()) == []


def test_anonymous_access_must_be_asked_for(tmp_path: Path) -> None:
    decision = resolve_api_key("0.0.0.0", None, True, tmp_path)
    assert (decision.key, decision.source) == (None, "anonymous")
    assert "NIBBLE_ALLOW_ANONYMOUS" in decision.reason


def test_key_shows_in_no_representation_reason_or_error(tmp_path: Path) -> None:
    decision = resolve_api_key("0.0.0.0", None, False, tmp_path)
    assert decision.key
    assert decision.key not in f"{decision!r} {decision!s} {decision.reason}"
    given = resolve_api_key("0.0.0.0", "sesame-open", False, tmp_path)
    assert "sesame-open" not in f"{given!r} {given.reason}"
    assert "sesame" not in fails(tmp_path, "HTTP header", given_key="sesame open")


@pytest.mark.parametrize("key", ["two words", "tab\t", "line\n", "schlüssel", "nul\0", "x" * 2000])
def test_given_key_no_header_can_carry_is_refused(tmp_path: Path, key: str) -> None:
    fails(tmp_path, "HTTP header", given_key=key)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660])
def test_key_file_open_to_others_is_tightened_and_said_so(tmp_path: Path, mode: int) -> None:
    key = resolve_api_key("0.0.0.0", None, False, tmp_path).key
    (tmp_path / KEY_FILE).chmod(mode)
    decision = resolve_api_key("0.0.0.0", None, False, tmp_path)
    assert decision.key == key
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert "mode 0600 now" in decision.reason


def test_key_file_anyone_could_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_text("nbl-" + "x" * 40)
    (tmp_path / KEY_FILE).chmod(0o666)
    fails(tmp_path, "writable by every user")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"short\n", b"nbl-with space in the key\n", b"\xff" * 40]
)
def test_empty_or_damaged_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / KEY_FILE).write_bytes(content)
    (tmp_path / KEY_FILE).chmod(0o600)
    assert str(tmp_path / KEY_FILE) in fails(tmp_path, "empty or damaged")


def test_key_file_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("nbl-" + "x" * 40)
    (tmp_path / KEY_FILE).symlink_to(tmp_path / "elsewhere")
    fails(tmp_path, "cannot be read")


def test_key_file_that_is_a_folder_or_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / KEY_FILE).mkdir(parents=True)
    fails(tmp_path / "a", "regular file")
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / KEY_FILE)
    fails(tmp_path / "b", "regular file")


def test_cache_that_cannot_hold_the_key_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = fails(tmp_path / "file" / "cache", "cannot be made")
    assert "NIBBLE_API_KEY" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_key_file_of_another_user_is_unreadable_in_one_line(tmp_path: Path) -> None:
    resolve_api_key("0.0.0.0", None, False, tmp_path)
    open_to_others(tmp_path)
    os.seteuid(65534)
    try:
        fails(tmp_path, "cannot be read")
    finally:
        os.seteuid(0)


def shared(folder: Path) -> Path:
    """A folder as the image's volume is: its group may write, and what is made in it belongs to
    that group.
    """
    folder.mkdir()
    folder.chmod(0o2775)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_users_of_one_group_share_the_key_of_a_folder_they_share(tmp_path: Path) -> None:
    cache = shared(tmp_path / "cache")
    open_to_others(tmp_path)
    cache.chmod(0o2775)
    os.seteuid(12345)
    try:
        first = resolve_api_key("0.0.0.0", None, False, cache)
    finally:
        os.seteuid(0)
    assert stat.S_IMODE((cache / KEY_FILE).stat().st_mode) == 0o640
    os.seteuid(2000)
    try:
        assert resolve_api_key("0.0.0.0", None, False, cache).key == first.key
    finally:
        os.seteuid(0)


def test_in_a_shared_folder_a_private_key_is_opened_to_the_group_and_others_stay_out(
    tmp_path: Path,
) -> None:
    cache = shared(tmp_path / "cache")
    key = resolve_api_key("0.0.0.0", None, False, cache).key
    for mode in (0o600, 0o664, 0o644):
        (cache / KEY_FILE).chmod(mode)
        decision = resolve_api_key("0.0.0.0", None, False, cache)
        assert decision.key == key
        assert stat.S_IMODE((cache / KEY_FILE).stat().st_mode) == 0o640
        assert ("mode 0640 now" in decision.reason) is (mode != 0o600)
    (cache / KEY_FILE).chmod(0o666)
    fails(cache, "writable by every user")

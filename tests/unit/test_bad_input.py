"""Every row of docs/bad-input.md: exit code, exactly one line on stderr, no traceback, nothing
started.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nibble.cli import app as cli
from tests.support.bad_input.case import Case, Ignored, Place, Row, pattern
from tests.support.bad_input.table import DOCUMENT, IGNORED, all_rows, document
from tests.support.models.tiny_model import write_model
from tests.support.other_users import open_to_others
from tests.support.paths import ROOT
from tests.support.servers.hub import Hub
from tests.support.servers.serving import free_port

KEPT_VARIABLES = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "SSL_CERT_FILE")
STARTING = ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "os.system")


class _Starts:
    """Records every attempt to start a process while armed, and stops it: a row that fails must
    not serve. `convert` may check a GGUF file's tokenizer in one.
    """

    ALLOWED = ("-m", "nibble.checkpoint.gguf.others")

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and event in STARTING and not self._is_allowed(*arguments):
            self.seen.append(f"{event} {arguments[0]!r}")
            raise RuntimeError(f"bad input started a process: {event}")

    def _is_allowed(self, _file: object = None, words: object = (), *_rest: object) -> bool:
        return isinstance(words, list | tuple) and tuple(words[1:3]) == self.ALLOWED


STARTS = _Starts()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = write_model(tmp_path_factory.mktemp("hub") / "tiny")
    with Hub() as server:
        server.add("acme/tiny", folder)
        server.add("acme/gated", folder, gated=True)
        server.add("acme/corrupt", folder, faults={"model.safetensors": "corrupt"})
        server.add("acme/huge", folder, huge={"merges.txt": 10**16})
        yield server


@pytest.fixture
def place(tmp_path: Path, hub: Hub) -> Place:
    return Place(tmp_path, hub, write_model(tmp_path / "model"))


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def filled(text: str, place: Place, used_port: int) -> str:
    """A word or value of a case with its placeholders replaced."""
    names = {"tmp": place.tmp, "model": place.model, "hub": place.hub.url, "used_port": used_port}
    for name, value in names.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def environment(case_env: Mapping[str, str], place: Place, used_port: int) -> dict[str, str]:
    """A clean environment, whatever the machine that runs the tests has set, and the case's
    variables.
    """
    base = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    base |= {"HOME": str(place.tmp), "HF_ENDPOINT": place.hub.url, "NIBBLE_TARGET": "cpu"}
    base |= {"PORT": str(free_port()), "NIBBLE_CONTROL_PORT": str(free_port())}
    return base | {name: filled(value, place, used_port) for name, value in case_env.items()}


def run(words: list[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """`nibble WORDS` through its real entry point in this process; its exit code."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["nibble", *words])
    STARTS.seen.clear()
    STARTS.armed = True
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        STARTS.armed = False
    return int(ended.value.code or 0)


def cases() -> list[object]:
    """Every case of every row, named after the row."""
    return [
        pytest.param(row, case, id=f"{row.id}-{number}" if len(row.cases) > 1 else row.id)
        for row in all_rows()
        for number, case in enumerate(row.cases, 1)
        if not case.as_another_user
    ]


def assert_refused(row: Row, code: int, stderr: str) -> None:
    """One error line that matches the table, nothing else that looks like an error."""
    errors = [line for line in stderr.splitlines() if not line.startswith("[nibble] ")]
    assert len(errors) == 1, stderr
    assert errors[0].startswith("nibble: error: "), stderr
    assert pattern(row.message).fullmatch(errors[0].removeprefix("nibble: error: ")), errors[0]
    assert code == row.code
    assert "Traceback" not in stderr


@pytest.mark.parametrize(("row", "case"), cases())
def test_bad_input_ends_in_one_line_with_its_exit_code(
    row: Row, case: Case, place: Place, used_port: int, monkeypatch, capfd
) -> None:
    if case.prepare:
        case.prepare(place)
    words = [filled(word, place, used_port) for word in case.words]
    code = run(words, environment(case.env, place, used_port), monkeypatch)
    captured = capfd.readouterr()
    assert STARTS.seen == []
    assert_refused(row, code, captured.err)
    assert captured.out == ""


# The same through a real process: one row of each exit code, since `main` in this process proves
# the rest.
PROCESS_ROWS = ("no-model", "target-elsewhere", "unknown-model", "quotes", "disk")


@pytest.mark.parametrize(
    "row", [row for row in all_rows() if row.id in PROCESS_ROWS], ids=lambda row: row.id
)
def test_bad_input_as_a_real_process(row: Row, place: Place, used_port: int) -> None:
    words = [filled(word, place, used_port) for word in row.cases[0].words]
    env = environment(row.cases[0].env, place, used_port)
    result = subprocess.run(
        [sys.executable, "-m", "nibble", *words],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert_refused(row, result.returncode, result.stderr)
    assert result.stdout == ""


# The interpreter may lie in a folder closed to other users, so root's run of a refused command
# loads every module.
AS_ANOTHER_USER = """
import contextlib, io, os, sys
from nibble.cli import app as cli
words, sys.argv[1:] = sys.argv[1:], ["serve", *os.environ.pop("WARM_UP").split()]
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    cli.main()
os.setgroups([]); os.setgid(0); os.setuid(2000)
sys.argv[1:] = words
cli.main()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    "row", [row for row in all_rows() if row.cases[0].as_another_user], ids=lambda row: row.id
)
def test_bad_input_of_a_user_who_is_not_root(row: Row, place: Place, used_port: int) -> None:
    case = row.cases[0]
    open_to_others(place.tmp)
    assert case.prepare is not None
    case.prepare(place)
    home = place.tmp / "home"
    home.mkdir()
    home.chmod(0o777)
    words = [filled(word, place, used_port) for word in case.words]
    env = environment(case.env, place, used_port) | {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    env["WARM_UP"] = f"{place.model} --port {used_port}"
    command = [sys.executable, "-c", AS_ANOTHER_USER, *words]
    result = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert_refused(row, result.returncode, result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("entry", IGNORED, ids=lambda entry: entry.id)
def test_harmless_input_is_ignored_with_a_notice(
    entry: Ignored, place: Place, used_port: int, monkeypatch, capfd
) -> None:
    env = environment(dict(entry.env), place, used_port) | {"NIBBLE_TARGET": "hopper"}
    if entry.prepare:
        entry.prepare(place)
    model = place.tmp / "broken" if entry.prepare else place.model
    code = run(["plan", str(model), "--json"], env, monkeypatch)
    captured = capfd.readouterr()
    assert (code, captured.err) == (0, "")
    assert entry.notice in captured.out


def test_the_documentation_is_this_table() -> None:
    assert DOCUMENT.read_text() == document(all_rows(), IGNORED), (
        "run `python -m tests.support.bad_input`"
    )


def test_every_row_has_a_case_and_a_name_of_its_own() -> None:
    rows = all_rows()
    assert all(row.cases for row in rows)
    assert len({row.id for row in rows}) == len(rows)
    assert len({(row.input, row.message) for row in rows}) == len(rows)

"""The status page in a real browser in front of a real server: start, ready, chat, a killed engine.

One server for all; the tests run in order.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.servers.browser import Page, browser, find_chromium
from tests.support.servers.serving import START_TIMEOUT_S, Server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_chromium() is None, reason="needs Chromium"),
]
KEY = "nbl-the-key-of-this-page"
QUESTION = "What is NVFP4?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    server = Server(folder, ["serve", "nibble-demo-nvfp4"], NIBBLE_API_KEY=KEY)
    yield server
    server.end()


@pytest.fixture(scope="module")
def page(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


def shots(page: Page, name: str) -> None:
    """Pictures for people, where PAGE_PICTURES names a folder."""
    if folder := os.environ.get("PAGE_PICTURES"):
        for scheme in ("light", "dark"):
            page.screenshot(Path(folder) / f"{name}-{scheme}.png", scheme)


def submit(page: Page, field: str, text: str) -> None:
    """Type into a field and press Enter, as users of a keyboard do."""
    page.run(f"document.querySelector('{field}').focus()")
    page.send("Input.insertText", text=text)
    for kind in ("keyDown", "keyUp"):
        page.send(
            "Input.dispatchKeyEvent",
            **{"type": kind, "key": "Enter", "code": "Enter", "text": "\r"},
            windowsVirtualKeyCode=13,
        )


def test_a_start_shows_phases_then_ready(server: Server, page: Page) -> None:
    server.wait_for_status()
    page.open(f"http://127.0.0.1:{server.control_port}/")
    page.wait(lambda: page.text("#state").startswith("starting"), 30)
    page.wait(lambda: "load" in page.text("#phases"), START_TIMEOUT_S)
    shots(page, "starting")
    page.wait(lambda: page.text("#state") == "ready", START_TIMEOUT_S)
    page.wait(lambda: "--host" in page.text("#plan"), 30)
    assert "passed" in page.text("#facts")
    assert page.text("#problems") == ""


def test_behind_the_gate_the_page_asks_for_the_key_and_answers_a_chat(
    server: Server, page: Page
) -> None:
    page.open(f"http://127.0.0.1:{server.port}/nibble")
    page.wait(lambda: page.text("#state") == "key needed", 30)
    assert page.text("#model") == ""
    submit(page, "#key", "a wrong key")
    page.wait(lambda: "refused" in page.text("#key-note"), 30)
    submit(page, "#key", KEY)
    page.wait(lambda: page.text("#state") == "ready", 30)
    submit(page, "#question", QUESTION)
    page.wait(lambda: page.run("document.querySelector('#answer').ariaBusy") == "false", 60)
    answer = page.text("#answer")
    assert "E2M1" in answer
    page.wait(lambda: "2 answered" in page.text("#tiles"), 30)  # the first is nibble's
    assert re.search(r"Time to first token\s+[\d.]+ m?s", page.text("#tiles"))
    page.run("document.querySelector('#start').open = true")
    shots(page, "ready")


def test_the_control_port_passes_a_chat_on_with_the_key_only(server: Server, page: Page) -> None:
    page.open(f"http://127.0.0.1:{server.control_port}/")
    page.wait(lambda: page.text("#state") == "ready", 30)
    submit(page, "#question", QUESTION)
    page.wait(lambda: "enter the API key" in page.text("#answer"), 30)
    assert "API key" in page.text("#key-form")
    submit(page, "#key", KEY)
    submit(page, "#question", "")  # the question is still there
    page.wait(lambda: "E2M1" in page.text("#answer"), 60)


def test_metrics_have_nibbles_beside_vllms(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}/metrics"
    headers = {"Authorization": f"Bearer {KEY}", "Accept-Encoding": "gzip"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        text = answer.read().decode()
    assert 'nibble_phase{phase="ready"} 1' in text
    assert "nibble_canary_passed -1" in text  # off in tests
    assert "vllm:num_requests_running{" in text


def test_a_killed_engine_is_shown_in_red(server: Server, page: Page) -> None:
    server.status()
    for process in server.engine_processes():
        if "EngineCore" in process.name or process.pid != server.engine_pid:
            os.kill(process.pid, signal.SIGKILL)
    page.wait(lambda: page.run("document.querySelectorAll('.problem.red').length"), 60)
    assert "red" in page.run("document.querySelector('#state').className")
    assert server.wait(60) == 10
    page.wait(lambda: "cannot be reached" in page.text("#problems"), 60)
    assert "nibble logs" in page.text("#problems")
    shots(page, "ended")


def test_no_request_left_for_another_host_and_no_key_stood_in_a_url(
    server: Server, page: Page
) -> None:
    addresses = [one["url"] for one in page.requests]
    hosts = {urlsplit(url).netloc for url in addresses if urlsplit(url).scheme != "data"}
    assert hosts == {f"127.0.0.1:{server.port}", f"127.0.0.1:{server.control_port}"}
    assert not any(KEY in url for url in addresses)
    assert any(KEY in json.dumps(one["headers"]) for one in page.requests)
    assert not [one for one in page.messages if "Content Security Policy" in one]
    assert not [one for one in page.messages if "exception" in one.lower()], page.messages

"""Headless Chromium through its DevTools protocol: pages, scripts, screenshots, requests."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
START_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """The browser's path, or None."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One tab. `requests` has the URL and headers of each request, `messages` errors and refusals
    of the Content-Security-Policy.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.requests: list[dict[str, Any]] = []
        self.messages: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result; events that arrive before it are kept."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif event["method"] == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(params["exceptionDetails"]))

    def open(self, url: str) -> None:
        """Go to `url`, without waiting for the page."""
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """The visible text of an element; empty if it is hidden or missing."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def wait(self, look: Callable[[], Any], timeout_s: float) -> Any:
        """The first true value of `look`."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < deadline, (self.text("body")[:2000], self.messages)
            time.sleep(0.2)
        return found

    def screenshot(self, path: Path, scheme: str, width: int = 1100) -> None:
        """The whole page as PNG in the light or dark color scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a fresh profile in `folder`, closed at the end."""
    program = find_chromium()
    assert program is not None
    words = [
        *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"),
    ]
    with (folder.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        port_file = folder / "DevToolsActivePort"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (port_file.exists() and re.match(r"\d+\n", port_file.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, "no browser"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
            tabs = json.load(answer)
        address = next(one["webSocketDebuggerUrl"] for one in tabs if one["type"] == "page")
        with connect(address, max_size=1 << 26) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)

"""The status page's files, with headers that keep its browser from every other host.

The page holds no data about the server. Its script asks for data, with the key in a header.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

PAGE_PATH = "/nibble"
LIVE_PATH, STATUS_PATH = "/nibble/live", "/nibble/status"

_FILES = {
    PAGE_PATH: ("page.html", "text/html; charset=utf-8"),
    "/nibble/page.css": ("page.css", "text/css; charset=utf-8"),
    "/nibble/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
FILE_PATHS = frozenset(_FILES)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),  # after an upgrade the browser asks for the new script
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page and its media type."""

    body: bytes
    content_type: str


@cache
def page_file(path: str) -> PageFile | None:
    """The file at a path of FILE_PATHS, or None."""
    if path not in _FILES:
        return None
    name, content_type = _FILES[path]
    return PageFile(resources.files("nibble.engine.page").joinpath(name).read_bytes(), content_type)

"""What the server under test serves, and whether it still does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.serve.endpoint import Endpoint, error_message

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Served:
    """A model of /v1/models. `root` is its folder or Hub id as the server knows it."""

    name: str
    root: str
    max_model_len: int

    @property
    def folder(self) -> Path | None:
        """The model's folder on this machine."""
        path = Path(self.root)
        return path if path.is_absolute() and path.is_dir() else None

    @property
    def id(self) -> str:
        """The Hub's id, also of a snapshot in its cache; else the folder's name."""
        parts = Path(self.root).parts
        cached = [part for part in parts if part.startswith("models--")]
        if cached:
            return cached[-1].removeprefix("models--").replace("--", "/")
        return Path(self.root).name if self.root.startswith("/") else self.root

    def to_json(self) -> dict[str, Any]:
        """What identifies the model in a result."""
        return {
            "id": self.id,
            "fingerprint": self.folder and fingerprint(self.folder),
            "max_model_len": self.max_model_len,
        }


def fingerprint(folder: Path) -> str | None:
    """Identifies a checkpoint by its configuration and the names and sizes of its weights."""
    try:
        weights = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
        config = (folder / "config.json").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(config + json.dumps(weights).encode()).hexdigest()[:16]


def find_served(
    endpoint: Endpoint, environ: Mapping[str, str], verb: str, wanted: str | None = None
) -> Served:
    """The model `wanted`, else the server's first. Raises ENGINE_DIED where no server answers or
    it is not ready, USAGE for a wrong key, MODEL where it does not serve the model.
    """
    try:
        status, body = endpoint.call("/v1/models", timeout_s=_TIMEOUT_S)
    except OSError as error:
        raise endpoint.no_answer(error, environ, verb) from None
    if status != 200:
        raise _refused(endpoint, status, body)
    return choose(read_models(endpoint, body), wanted)


def read_models(endpoint: Endpoint, body: bytes) -> list[Served]:
    """The models of an answer to /v1/models. Raises ENGINE_DIED where it is not one."""
    try:
        return [
            Served(one["id"], one.get("root") or one["id"], _length(one))
            for one in json.loads(body)["data"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NibbleError(
            ExitCode.ENGINE_DIED,
            what=f"another program answers at {endpoint.address}",
            expected="a server of nibble or vLLM",
            action="correct the address, or PORT",
        ) from None


def _length(model: Mapping[str, Any]) -> int:
    """The context's length; llama.cpp gives that of the model's training."""
    return int(model.get("max_model_len") or model["meta"]["n_ctx_train"])


def choose(models: list[Served], wanted: str | None) -> Served:
    """The model `wanted`, else the first. Raises MODEL without it."""
    for model in models:
        if wanted in (None, model.name):
            return model
    names = ", ".join(model.name for model in models) or "none"
    raise NibbleError(
        ExitCode.MODEL,
        what=f"the server does not serve {wanted or 'a model'}; it serves {names}",
        action="name one of these with --model" if models else "start the server again",
    )


def _refused(endpoint: Endpoint, status: int, body: bytes) -> NibbleError:
    said = reason_of(body)
    if status in (401, 403):
        return NibbleError(
            ExitCode.USAGE,
            what=f"the server at {endpoint.address} refuses the key ({status}: {said})",
            action="set NIBBLE_API_KEY to the server's key",
        )
    return NibbleError(
        ExitCode.ENGINE_DIED,
        what=f"the server at {endpoint.address} is not ready ({status}: {said})",
        expected="a server that is ready",
        action="wait for `ready`; see `nibble status`",
    )


def reason_of(body: bytes) -> str:
    """The message of an error's body, or its beginning, in one line of up to 200 characters."""
    return " ".join(error_message(body).split())[:200].rstrip(". ")


def is_alive(endpoint: Endpoint) -> bool:
    """Whether /health answers 200 within 10 s."""
    try:
        return endpoint.call("/health", timeout_s=_TIMEOUT_S)[0] == 200
    except OSError:
        return False

"""The Hub's settings and errors: cache, endpoint, token, and one line for each failure."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from nibble.errors import PASSWORD_IN_ADDRESS, ExitCode, NibbleError
from nibble.machine.disk import not_writable
from nibble.machine.paths import demo_models, home
from nibble.settings.secrets import read_secret

DEFAULT_ENDPOINT = "https://huggingface.co"
TRUE = ("1", "on", "yes", "true")  # huggingface_hub 2.4 constants.py ENV_VARS_TRUE_VALUES


@dataclass(frozen=True)
class Access:
    """How to reach the Hub: cache folder, endpoint, token (never printed), and whether to stay
    offline.
    """

    cache: Path
    endpoint: str
    token: str | None
    offline: bool

    @property
    def address(self) -> str:
        """The endpoint without user and password, for messages."""
        scheme, _, rest = self.endpoint.partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"

    def page(self, model: str) -> str:
        """The model's page, where terms are accepted."""
        return f"{self.address}/{model}"


def access(environ: Mapping[str, str]) -> Access:
    """What huggingface_hub uses for these variables.

    Raises CONFIG when HF_TOKEN_FILE cannot be read, USAGE for a token that a header cannot carry
    and for an endpoint that is not an address.
    """
    home = hub_home(environ)
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or str(home / "hub")
    offline = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    return Access(
        Path(os.path.expanduser(cache)),
        _address(environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT),
        _sendable(
            read_secret("HF_TOKEN", environ)
            or environ.get("HUGGING_FACE_HUB_TOKEN")
            or _stored_token(environ, home)
        ),
        offline.strip().lower() in TRUE,
    )


def hub_home(environ: Mapping[str, str]) -> Path:
    """HF_HOME, else the XDG cache's huggingface folder."""
    caches = environ.get("XDG_CACHE_HOME") or f"{home(environ)}/.cache"
    return Path(os.path.expanduser(environ.get("HF_HOME") or f"{caches}/huggingface"))


def _stored_token(environ: Mapping[str, str], home: Path) -> str | None:
    """The token that `hf auth login` stored, or the one in the file HF_TOKEN_PATH."""
    try:
        return Path(environ.get("HF_TOKEN_PATH") or home / "token").read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _address(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, an unclosed bracket
        usable = False
    if not usable:
        expected = "an address such as https://huggingface.co"
        raise NibbleError(
            ExitCode.USAGE,
            what="HF_ENDPOINT is not an address",
            expected=expected,
            action="correct or unset HF_ENDPOINT",
        )
    return endpoint.rstrip("/")


def _sendable(token: str | None) -> str | None:
    """`token` without blanks around it, as huggingface_hub takes it.

    Raises USAGE for a token that a header cannot carry. The message shows none of it; the HTTP
    library's would.
    """
    clean = (token or "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", clean):
        expected = "one token, of visible ASCII characters"
        raise NibbleError(
            ExitCode.USAGE,
            what="HF_TOKEN is not usable",
            expected=expected,
            action="correct or unset HF_TOKEN",
        )
    return clean or None


def is_model_id(text: str) -> bool:
    """Whether `text` can be an id on the Hub: `name` or `namespace/name`."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text)) and ".." not in text and "--" not in text


def not_an_id(model: str) -> NibbleError:
    """The error for a word that is neither a folder nor an id."""
    what = f"{model!r} is neither a folder nor a Hugging Face id"
    return NibbleError(
        ExitCode.MODEL,
        what=what,
        expected="an id such as nvidia/Qwen3-8B-NVFP4 or a folder",
        action="correct MODEL",
    )


def hub_error(error: BaseException, model: str, revision: str | None, hub: Access) -> NibbleError:
    """The NibbleError for an exception of huggingface_hub: exit 4; 7 for a full disk; 5 without
    permission.
    """
    from huggingface_hub import errors

    chain = list(_chain(error))
    for part in chain:
        if isinstance(part, NibbleError):
            return part
    for part in chain:
        if isinstance(part, errors.GatedRepoError):
            return _gated(model, hub)
        if isinstance(part, errors.RevisionNotFoundError):
            what = f"{model} does not have the revision {revision!r}"
            return NibbleError(
                ExitCode.MODEL,
                what=what,
                expected="a commit, branch or tag of this model",
                action="correct NIBBLE_REVISION or unset it",
            )
        if isinstance(part, errors.HFValidationError):
            return not_an_id(model)
        if isinstance(part, (errors.OfflineModeIsEnabled, errors.IncompleteSnapshotError)):
            return not_cached(model, hub)
        if isinstance(part, errors.HfHubHTTPError) and (found := _refused(part, model, hub)):
            return found
    return _local_or_network(chain, model, hub)


def similar(model: str) -> str:
    """A question that names the model of nibble's which a misspelled word may mean, or nothing."""
    import difflib

    from nibble.hub.packaged import PACKAGED  # which needs this module

    ours = [*demo_models(), *PACKAGED]
    match = difflib.get_close_matches(model, ours, 1, 0.8)
    return f"did you mean {match[0]}? else " if match else ""


def not_cached(model: str, hub: Access) -> NibbleError:
    """The error for an offline start without the complete model in the cache."""
    what = f"{model} is not complete in {hub.cache} and HF_HUB_OFFLINE is set"
    action = f"unset HF_HUB_OFFLINE, or run `nibble pull {model}` on a machine with a network"
    action = similar(model) + action
    return NibbleError(ExitCode.MODEL, what=what, action=action, unreachable=True)


def unreachable(detail: str, model: str, hub: Access) -> NibbleError:
    """The error for a Hub that does not answer or answers badly."""
    what = f"{model} is not complete in {hub.cache} and {hub.address} cannot be used ({detail})"
    action = (
        f"{similar(model)}check the network, HTTPS_PROXY and HF_ENDPOINT, then run it again: the"
        " cache keeps finished files"
    )
    return NibbleError(ExitCode.MODEL, what=what, action=action, unreachable=True)


def in_words(error: BaseException) -> str:
    """Why a server did not answer, without errno's numbers, as a clause about "it"."""
    chain = list(_chain(error))
    for part in chain:
        if isinstance(part, socket.gaierror):
            answers = part.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None))
            return "its name is not known to DNS" if answers else "DNS does not answer"
        if isinstance(part, ConnectionRefusedError):
            return "it refused the connection"
        if isinstance(part, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {part.verify_message}"
        if isinstance(part, TimeoutError):
            return "it did not answer in time"
    last = chain[-1]
    told = last.strerror if isinstance(last, OSError) and last.strerror else str(last)
    return PASSWORD_IN_ADDRESS.sub("…", " ".join(told.split()))[:160] or type(last).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what caused it."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _gated(model: str, hub: Access) -> NibbleError:
    if hub.token is None:
        action = (
            f"accept its terms at {hub.page(model)}, then give a token in HF_TOKEN or HF_TOKEN_FILE"
        )
        return NibbleError(
            ExitCode.MODEL, what=f"{model} is a gated model and HF_TOKEN is not set", action=action
        )
    what = f"{model} is a gated model and the account of this HF_TOKEN has no access to it"
    return NibbleError(
        ExitCode.MODEL, what=what, action=f"request access at {hub.page(model)} with that account"
    )


def _refused(error: BaseException, model: str, hub: Access) -> NibbleError | None:
    """The error for an HTTP status about authorization; None for any other."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if "Invalid credentials" in str(error):
        action = "create a token at https://huggingface.co/settings/tokens or unset HF_TOKEN"
        return NibbleError(
            ExitCode.MODEL,
            what=f"{hub.address} refuses this HF_TOKEN (invalid or expired)",
            action=action,
        )
    if status in (401, 404):  # without a token the Hub answers 401, not 404
        if hub.token is None:
            what, action = (
                f"{hub.address} has no public model {model}",
                "check the spelling; a private model needs HF_TOKEN",
            )
        else:
            what = f"{hub.address} has no model {model} that this HF_TOKEN can read"
            action = "check the spelling and the token's permissions"
        return NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="the id of an existing model",
            action=similar(model) + action,
        )
    if status == 403:
        what = f"{hub.address} forbids access to {model}"
        return NibbleError(
            ExitCode.MODEL,
            what=what,
            action=f"check the permissions of HF_TOKEN and {hub.page(model)}",
        )
    return None


def _local_or_network(chain: list[BaseException], model: str, hub: Access) -> NibbleError:
    """The error for a full disk or a folder that cannot be written, else for the network."""
    for part in chain:
        number = part.errno if isinstance(part, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(part):
            action = (
                "free space or move the cache with HF_HOME, then run it again: the cache keeps"
                " finished files"
            )
            return NibbleError(
                ExitCode.NO_FIT,
                what=f"{hub.cache} is full during the download of {model}",
                action=action,
            )
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            return not_writable(hub.cache, part.strerror or "no permission", "HF_HOME")  # type: ignore[union-attr]
    return unreachable(in_words(chain[0]), model, hub)

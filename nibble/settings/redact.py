"""Removes secrets from reports.

Only variables on a list show their values, since a program may keep a secret under any name. From
all text it removes the known secrets of this machine by value, and likely secrets by their name and
form.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nibble.engine.schema import load_schema
from nibble.settings.environment import nibble_names
from nibble.settings.secrets import MAX_SECRET_BYTES

HIDDEN = "[removed]"
# Variables other than nibble's and vLLM's whose values a report shows: they change how a server
# runs, or name its files and network.
_SHOWN = frozenset(
    (
        *("CC", "CXX", "DO_NOT_TRACK", "HF_ENDPOINT", "HF_HOME", "HOME", "HOSTNAME", "LANG"),
        *("LOGNAME", "MAX_JOBS", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "TZ", "USER"),
        *("VIRTUAL_ENV", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"),
        *("HF_TOKEN_PATH", "ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    )
)
_SHOWN_PREFIXES = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "CUTE_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "NVSHMEM_"),
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "FLASHINFER_"),
    *("FLASH_ATTENTION_", "DG_", "TRANSFORMERS_", "TOKENIZERS_", "HF_HUB_", "RAY_", "PIP_"),
    *("HF_XET_", "NVCC_", "PYTHON", "XDG_", "LC_", "OMP_", "KMP_", "MKL_", "MALLOC_", "LD_"),
)
SHORTEST = 6  # a shorter value would take ordinary words out of every file
# Names whose values are secrets, in variables, TOML, JSON, YAML, URLs, command lines.
_WORDS = (
    "token|secret|passw(?:or)?d|passphrase|(?:api|access|account|private)[_-]?key|credential|auth|cookie|webhook"
    "|[_-](?:key|pass|pwd|pat)(?![\\w-])|(?<=\\w)(?<!by)(?<!com)pass(?![\\w-])"
)
_NAME = rf"(?>[\w.-]*(?:{_WORDS})[\w.-]*)"  # whole, so that a long word is read once
_SECRET_NAME = re.compile(rf"(?i)^{_NAME}$|^key$")
# Names that only look so: what a tokenizer is called, how a cluster authenticates, and files that
# are named but not shown.
_HARMLESS = re.compile(r"(?i)tokenizer|auth_mode$|_(?:file|path)$|^ssh_auth_sock$")
_PASSWORD_IN_URL = re.compile(r"(?:\w+://)?[^\s/@:]*:(?!//|\d+/)([^\s@]+)@(?!sha256:)")
_COUNT = re.compile(r"[\d.,]{1,12}")  # of tokens
_QUOTED = r"""\"[^\"\n]*\"|'[^'\n]*'"""
_TEXT = rf"b?\\*(?:{_QUOTED})"  # of bytes too, and of JSON within a text
# A list, an object, the arguments of a call, with the quoted text in them.
_GROUP = "|".join(
    rf"""\{opens}(?:{_QUOTED}|[^\{closes}\"']){{0,4096}}\{closes}"""
    for opens, closes in ("[]", "{}", "()")
)
# Words up to a comma, the end of the line or the next name: a passphrase may have blanks.
_WORD = rf"""(?:{_GROUP}|[^\s,;}}&\"'])+"""
_BARE = rf"""{_WORD}(?:[ \t]+(?![\w.-]+\s*[=:]|--){_WORD})*"""
_NAMED = re.compile(
    rf"(?i)(?P<before>[\"']?(?<![\w.-])(?P<name>{_NAME})\\*[\"']?\s*[=:]\s*)(?P<value>{_TEXT}|{_BARE})"
)
_FLAG = re.compile(
    rf"(?i)(?P<before>(?<![\w.-])--(?P<name>{_NAME})(?:\s+|\0|[\"'],\s*[\"']))(?P<value>{_TEXT}|[^\s\"',\0]+)"
)
_FORMS = (  # the group `before` precedes the secret and stays
    re.compile(r"\bhf_[A-Za-z0-9_]{8,}"),
    re.compile(r"\bnbl-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:sk|pk|rk|nvapi)-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"),
    re.compile(r"\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}|\bxox[a-z]-[\w-]{10,}"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(r"(?i)(?<=bearer )[^\s\"']{4,}"),
    re.compile(  # headers: as they are, in a dict, and in pairs
        r"""(?i)(?P<before>(?:(?:cookie|authorization)(?:[\\\"']*[ \t]*[:=]|[\"'],)|api-key[\"'],)[ \t]*b?[\\\"']*)[^\n\"'\\]+"""  # noqa: E501
    ),
    re.compile(r"""(?<=://)[^\s/\"']+(?=@)"""),
    # The same with a slash in the password (a port and a path are none), and as proxies are written
    # too, without a scheme.
    re.compile(r"""(?<=://)[^\s/@:\"']*:(?!\d+/)[^\s\"']+(?=@)"""),
    re.compile(r"""(?<![\w/@:.-])[\w.%+-]+:[^\s/@:\"',]+(?=@(?!sha256:)\w)"""),
    re.compile(
        r"""(?i)(?P<before>(?:[?&;]|u0026)(?:[\w.-]*sig(?:nature)?|key|code)=)[^\s&;\"'<>\\]+"""
    ),
    # curl's user and password; numbers are the user and group of a container.
    re.compile(
        r"""(?m)(?P<before>(?:^|(?<=[\s\"'\[,]))(?:-[uU]|--(?:proxy-)?user)(?:[ \t]+|=|[\"'],\s*)?(?P<quote>[\"'])?)"""  # noqa: E501
        r"""(?!\d+:\d+\b)(?(quote)[^\n\"':]+:(?!//)[^\n\"']+|[^\s\"':]+:(?!//)[^\s\"']+)"""
    ),
    # vLLM takes several
    re.compile(r"(?P<before>--api[_-]key(?:=|[ \t]+))(?!-)\S+(?:[ \t]+(?!-)\S+)+"),
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
    ),
)


def is_shown(name: str) -> bool:
    """Whether a report shows the value of a variable with that name. Proxies may be lower case."""
    if is_secret_name(name):
        return False
    if name in nibble_names() or name in load_schema().envs or name.startswith(_SHOWN_PREFIXES):
        return True
    return name in _SHOWN or (name.endswith("_proxy") and name.upper() in _SHOWN)


def shown_variables(environ: Mapping[str, Any]) -> dict[str, Any]:
    """The names of all variables, with the values of those that `is_shown` allows."""
    return {
        name: value if is_shown(name) else _hidden(name, value) for name, value in environ.items()
    }


class Redactor:
    """Removes a set of known secret values, and what looks like a secret, from text."""

    def __init__(self, values: Iterable[str]) -> None:
        forms = {
            form
            for value in values
            if len(value.strip()) >= SHORTEST
            for form in _written(value.strip())
        }
        longest_first = sorted(forms, key=len, reverse=True)
        self._values = (
            re.compile("|".join(re.escape(form) for form in longest_first)) if forms else None
        )

    def text(self, text: str) -> str:
        """`text` without known values, values of secret names, and text in the form of a secret."""
        if self._values is not None:
            text = self._values.sub(HIDDEN, text)
        for form in _FORMS:
            text = form.sub(lambda found: (found.groupdict().get("before") or "") + HIDDEN, text)
        return _NAMED.sub(_hide, _FLAG.sub(_hide, text))

    def data(self, value: Any) -> Any:
        """Plain data without values of secret names; environments in it (`env`) as
        `shown_variables`, other text as `text`.
        """
        if isinstance(value, Mapping):
            if isinstance(env := value.get("env"), Mapping):
                value = {**value, "env": shown_variables(env)}
            return {
                str(name): _hidden(str(name), one) if is_secret_name(str(name)) else self.data(one)
                for name, one in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.data(one) for one in value]
        return self.text(value) if isinstance(value, str) else value


def is_secret_name(name: str) -> bool:
    """Whether a variable or key with that name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS.search(name)


def _hidden(name: str, value: Any) -> Any:
    """The replacement for the value of a secret name; a token count is not a secret."""
    if (
        value is None
        or isinstance(value, bool)
        or ("token" in name.lower() and isinstance(value, (int, float)))
    ):
        return value
    return HIDDEN if value not in ("", {}, []) else value


def secret_values(data: Any, is_secret: bool = False) -> Iterator[str]:
    """Every text under a secret name in plain data."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from secret_values(value, is_secret or is_secret_name(str(name)))
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from secret_values(value, is_secret)
    elif is_secret and isinstance(data, str):
        yield data


def _hide(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"].strip("\"'")
    is_count = "token" in name.lower() and _COUNT.fullmatch(value)
    if _HARMLESS.search(name):  # the names within its value may be others
        return match["before"] + _NAMED.sub(_hide, match["value"])
    if is_count or value in ("", "null", "None", "true", "false", HIDDEN):
        return match[0]
    return match["before"] + HIDDEN


def _written(value: str) -> set[str]:
    """The forms of a secret in a file: plain, in a URL, in JSON, in base64."""
    encoded = base64.b64encode(value.encode()).decode().rstrip("=")
    return {value, quote(value, safe=""), value.replace("\\", "\\\\").replace('"', '\\"'), encoded}


def known_secrets(environ: Mapping[str, str], files: Iterable[Path]) -> set[str]:
    """Values of secret variables, of the files that X_FILE and X_PATH name, and of `files`."""
    values = {value for name, value in environ.items() if is_secret_name(name)}
    values |= {found[1] for value in environ.values() if (found := _PASSWORD_IN_URL.match(value))}
    named = [
        Path(value)
        for name, value in environ.items()
        if re.search(r"(?i)(key|token|secret|password)_(file|path)$", name)
    ]
    for path in [*named, *files]:
        try:
            if path.is_file() and path.stat().st_size <= MAX_SECRET_BYTES:
                text = path.read_text(errors="ignore")
                values |= {text.strip(), *text.split()}
        except OSError:
            continue
    return values

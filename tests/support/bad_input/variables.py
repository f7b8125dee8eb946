"""Rows about environment variables, the settings file, secrets and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nibble.settings.options import Settings, options
from tests.support.bad_input.case import (
    Case,
    Ignored,
    Place,
    Row,
    env,
    file,
    row,
    serve,
)


def name_rows() -> list[Row]:
    """Variables and files that mean nothing, or nothing any more."""
    return [
        row(
            "misspelled",
            "a misspelled `NIBBLE_*` variable",
            2,
            "unknown variable NIBBLE_DRAIN_SECOND; expected a name from `nibble serve --help`; "
            "did you mean NIBBLE_DRAIN_SECONDS?",
            env(NIBBLE_DRAIN_SECOND="5"),
        ),
        row(
            "unknown-vllm",
            "a `VLLM_*` variable that vLLM 0.32 does not have",
            5,
            "vLLM 0.32 has no variable VLLM_LOGING_LEVEL; …did you mean VLLM_LOGGING_LEVEL?",
            env(VLLM_LOGING_LEVEL="DEBUG"),
        ),
        row(
            "dead",
            "a variable of old guides without a successor",
            5,
            "VLLM_NVFP4_SPARSE_V7=1 has no effect in vLLM 0.32 and no replacement: …; "
            "unset VLLM_NVFP4_SPARSE_V7",
            env(VLLM_NVFP4_SPARSE_V7="1"),
        ),
        row(
            "toml-key",
            "an unknown key in the user's TOML file",
            5,
            "… has the unknown key 'prot'; …did you mean port?",
            serve("{model}", NIBBLE_CONFIG="{tmp}/user.toml", prepare=_toml("prot = 9000")),
        ),
        row(
            "toml-secret",
            "a secret in the user's TOML file",
            5,
            "… holds the secret 'api_key'; …",
            serve(
                "{model}",
                NIBBLE_CONFIG="{tmp}/user.toml",
                prepare=_toml('api_key = "long-enough-secret"'),
            ),
        ),
        row(
            "toml-broken",
            "a user file that is not TOML",
            5,
            "…/user.toml is not valid TOML: …",
            serve("{model}", NIBBLE_CONFIG="{tmp}/user.toml", prepare=_toml("port = ")),
        ),
        row(
            "toml-table",
            "`args` or `env` of the user's TOML file that is not a table",
            5,
            "env in …/user.toml is 'A=1'; expected a table [env] of names and values; correct"
            " that line",
            serve("{model}", NIBBLE_CONFIG="{tmp}/user.toml", prepare=_toml("env = 'A=1'")),
        ),
        row(
            "toml-absent",
            "a user file that is not there",
            5,
            "the settings file …/user.toml cannot be read; …",
            serve("{model}", NIBBLE_CONFIG="{tmp}/user.toml"),
            serve("{model}", "--config", "{tmp}/user.toml"),
        ),
        row(
            "unknown-verb",
            "a command nibble does not have",
            2,
            "No such command 'sevre'.…",
            Case(("sevre",)),
        ),
        row(
            "unknown-option",
            "an option it does not have",
            2,
            "No such option: --jsno…",
            Case(("doctor", "--jsno")),
        ),
    ]


def _toml(text: str) -> Callable[[Place], Any]:
    return lambda place: (place.tmp / "user.toml").write_text(text)


def secret_rows() -> list[Row]:
    """Each secret given twice, or in a file that cannot be read."""
    rows: list[Row] = []
    for option in options().values():
        for name in option.env if option.secret else ():
            rows.append(
                row(
                    f"{name}-twice",
                    f"`{name}` and `{name}_FILE` both set",
                    5,
                    f"{name} and {name}_FILE are both set; …",
                    Case(
                        env={name: "some-long-value", f"{name}_FILE": "{tmp}/secret"},
                        prepare=file("secret", b"x" * 20),
                    ),
                )
            )
            rows.append(
                row(
                    f"{name}-unreadable",
                    f"`{name}_FILE` names no readable file",
                    5,
                    f"the secret file … of {name}_FILE cannot be read (…); …",
                    Case(env={f"{name}_FILE": "{tmp}/absent"}),
                    Case(env={f"{name}_FILE": "{tmp}"}),
                )
            )
            rows.append(
                row(
                    f"{name}-empty",
                    f"`{name}_FILE` is empty, too large or not text",
                    5,
                    f"the secret file … of {name}_FILE is empty, too large or not text; …",
                    Case(env={f"{name}_FILE": "{tmp}/secret"}, prepare=file("secret", b"\n")),
                    Case(
                        env={f"{name}_FILE": "{tmp}/secret"},
                        prepare=file("secret", b"\xff\xfe\x00"),
                    ),
                )
            )
    return rows


def value_rows() -> list[Row]:
    """One row for every option whose values can be wrong: not a number, out of range, not a
    choice.
    """
    rows: list[Row] = []
    for name, option in options().items():
        bad = bad_values(name)
        if not bad:
            continue
        variable = option.env[0]
        shown = "not usable" if option.secret else "…"
        listed = ", ".join(f"`{value}`" for value in bad)
        message = f"{variable} is {shown}; expected {option.expected}; correct or unset {variable}"
        cases = tuple(Case(env={variable: value}) for value in bad)
        rows.append(row(f"value-{variable}", f"`{variable}` is {listed}", 2, message, *cases))
    return rows


def bad_values(name: str) -> list[str]:
    """Values that the option `name` must refuse, from its type and limits; empty for free text."""
    info = Settings.model_fields[name]
    limits = {
        key: getattr(item, key)
        for item in info.metadata
        for key in ("ge", "gt", "le")
        if hasattr(item, key)
    }
    kind = str(info.annotation)
    if "int" in kind or "float" in kind:
        low = [limits["ge"] - 1] if "ge" in limits else [limits["gt"]] if "gt" in limits else []
        high = [limits["le"] + 1] if "le" in limits else []
        words = ["many", "nan"] if "float" in kind else ["many", "1.5"]
        return [*words, *(str(value) for value in (*low, *high))]
    if "bool" in kind:
        return ["maybe", "2"]
    if "Literal" in kind:
        return ["other"]
    return {
        "api_key": ["short", "has blanks in it"],
        "head_ip": ["nowhere!"],
        "worker_ip": ["nowhere!"],
    }.get(name, [])


SERVICE_LINK = (
    "is a Kubernetes service link; nibble ignores it (enableServiceLinks: false avoids it)"
)


IGNORED_VARIABLES = (
    Ignored(
        "service-host",
        "`NIBBLE_SERVICE_HOST` and other Kubernetes service links",
        f"NIBBLE_SERVICE_HOST {SERVICE_LINK}",
        {"NIBBLE_SERVICE_HOST": "10.0.0.1"},
    ),
    Ignored(
        "service-port",
        "`NIBBLE_PORT_8000_TCP` and its kind",
        f"NIBBLE_PORT_8000_TCP {SERVICE_LINK}",
        {"NIBBLE_PORT_8000_TCP": "tcp://10.0.0.1:8000"},
    ),
    Ignored(
        "vllm-port",
        "`VLLM_PORT=tcp://…` of a service named vllm",
        f"VLLM_PORT {SERVICE_LINK}",
        {"VLLM_PORT": "tcp://10.0.0.1:8000"},
    ),
    Ignored(
        "host-name",
        "a native `HOST` that is not an address (shells export the machine's name)",
        "HOST=my-laptop is not an address; nibble ignores it. Set --host to listen on another"
        " address",
        {"HOST": "my-laptop"},
    ),
    Ignored(
        "translated",
        "a variable of old guides with a successor",
        "vLLM 0.32 does not read VLLM_ATTENTION_BACKEND=FLASHINFER; nibble uses --attention-backend"
        " FLASHINFER",
        {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
    ),
)

"""Sorts environment variables into nibble's, vLLM's, dead ones and misspelled ones.

`accept` runs before settings are resolved. It refuses misspelled names, translates variables that
vLLM 0.32 does not read, and drops what Kubernetes injects for services named `nibble` or `vllm`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nibble.engine import contract
from nibble.errors import ExitCode, NibbleError
from nibble.settings.declare import closest
from nibble.settings.older_guides import DEAD_VARIABLES, Successor, successor_of
from nibble.settings.options import options

# Names with nibble's prefix that are not options of the server: installer, image build, and what
# the supervisor hands to the processes that it starts.
OTHER_NIBBLE_NAMES: Mapping[str, str] = {
    "NIBBLE_VLLM_CPU_WHEEL": "installer: URL or path of the official CPU wheel, with #sha256=…",
    "NIBBLE_TORCH_INDEX": "installer: index that has the CPU build of torch",
    "NIBBLE_KERNELS_WHEEL": (
        "installer: path of a nibble-kernels wheel to install instead of compiling"
    ),
    "NIBBLE_KERNELS_COMPILE": "installer: 0 leaves nibble-kernels at plain torch code",
    "NIBBLE_KERNELS_TARGET_PACKAGES": (
        "nibble-kernels' build: site-packages of another processor, to compile for it"
    ),
    "NIBBLE_RUNTIME": "installer: auto, cpu or cuda",
    "NIBBLE_BUILD_NETWORK": "build.sh: network of the image build, such as host",
    "NIBBLE_BUILD_WHEELS": "build.sh: folder of wheels that no index has",
    "NIBBLE_ENGINE_DIR": "setup/docker_engine.sh: where the engine keeps its data",
    "NIBBLE_ENGINE_SOCKET": "setup/docker_engine.sh: the engine's socket",
    "NIBBLE_RUN_IMAGE": "scripts/serve*.sh: image to run instead of nibble:TARGET",
    "NIBBLE_ROOT": "folder that holds targets/, recipes/, rules/ and models/",
    "NIBBLE_IMAGE": "set in an image to its target",
    "NIBBLE_GATE_STATE": "supervisor to gate: the state file",
    "NIBBLE_GATE_CONTROL": "supervisor to gate: the control port",
    "NIBBLE_GATE_PROFILER": "supervisor to gate: whether the routes of the profiler exist",
    "NIBBLE_GATE_INTERNAL": "supervisor to gate: the token of warm-up requests",
    contract.REPORT_FOLDER: (
        "supervisor to vLLM's workers: the folder of their reports of the kernels that ran"
    ),
    contract.PULSE_FOLDER: "supervisor to vLLM's processes: the folder where they report progress",
    "NIBBLE_WATCHED_ABOVE": (
        "server of several models to their engines: it watches the memory in their place"
    ),
    "NIBBLE_RUN": "supervisor to vLLM's processes: marks those of one run",
    "NIBBLE_DETACHED": (
        "`nibble serve --detach` to the server it starts: keep a record and rotate the log"
    ),
}

# A Service called "nibble" makes Kubernetes set these in every pod of the namespace
# (enableServiceLinks).
_SERVICE_LINK = re.compile(
    r"_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_SERVICE_URL = re.compile(r"^(tcp|udp|sctp)://")


@dataclass(frozen=True)
class Accepted:
    """`environ` for settings and vLLM, flags translated from dead variables, and notices."""

    environ: Mapping[str, str]
    flags: Mapping[str, object]
    flag_origins: Mapping[str, str]
    notices: tuple[str, ...]


def accept(
    environ: Mapping[str, str], known_vllm_names: Collection[str], in_image: bool
) -> Accepted:
    """Sort the environment. Raises USAGE for a misspelled name, CONFIG for a dead variable without
    a successor.
    """
    kept = dict(environ)
    notices: list[str] = []
    flags: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name in sorted(environ):
        if not name.startswith(("NIBBLE_", "VLLM_")):
            continue
        if is_service_link(name, environ[name]):
            del kept[name]
            notices.append(
                f"{name} is a Kubernetes service link; nibble ignores it (enableServiceLinks: false"
                " avoids it)"
            )
        elif successor_of(name) is None and not _is_known(name, known_vllm_names):
            raise _unknown_name(name, known_vllm_names)
    for name in (*DEAD_VARIABLES, *sorted(set(environ) - set(DEAD_VARIABLES))):
        if (successor := successor_of(name)) and (value := kept.pop(name, "")).strip():
            new = _translate(name, value, successor)
            flags |= new
            origins |= dict.fromkeys(new, name)
            variables = successor.variables(value)
            kept = variables | kept  # today's name wins
            notices.append(_translation_notice(name, value, new, variables))
    if (host := kept.get("HOST")) and not in_image and not _is_address(host):
        # zsh, tcsh and other shells export HOST=<machine name> without a request of the user.
        del kept["HOST"]
        notices.append(
            f"HOST={host} is not an address; nibble ignores it. Set --host to listen on another"
            f" address"
        )
    return Accepted(kept, flags, origins, tuple(notices))


def check_file_environment(
    names: Collection[str], file: str, known_vllm_names: Collection[str]
) -> None:
    """Check the [env] table of the user's TOML file, which is for vLLM and its ecosystem.

    `nibble plan` shows it. Raises CONFIG for a secret or another option of nibble, a dead variable,
    and a name that vLLM does not have.
    """
    secrets = {
        "HUGGING_FACE_HUB_TOKEN",
        *(name for o in options().values() if o.secret for name in o.env),
    }
    for name in sorted(names):
        if name in secrets:
            action = "set it in the environment or name its file there"
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"[env] of {file} holds the secret {name}",
                expected="a table without secrets",
                action=action,
            )
        if name in nibble_names() or name.startswith("NIBBLE_"):
            what = f"[env] of {file} has {name}, which is not for vLLM"
            raise NibbleError(
                ExitCode.CONFIG, what=what, action="write the option itself at the top of the file"
            )
        if successor_of(name):
            action = (
                "set it in the environment, where nibble translates it, or write vLLM's flag in"
                " [args]"
            )
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"[env] of {file} has {name}, which vLLM 0.32 does not read",
                action=action,
            )
        if name.startswith("VLLM_") and not _is_known(name, known_vllm_names):
            raise _unknown_name(name, known_vllm_names)


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable for a Service of any name."""
    if name in nibble_names() and not _SERVICE_URL.match(value):
        return False
    return bool(_SERVICE_LINK.search(name)) or (
        name.endswith("_PORT") and bool(_SERVICE_URL.match(value))
    )


def nibble_names() -> set[str]:
    """Every variable with nibble's prefix, and every alias of an option."""
    names = {name for option in options().values() for name in option.env}
    secrets = {
        f"{name}_FILE" for option in options().values() if option.secret for name in option.env
    }
    return names | secrets | set(OTHER_NIBBLE_NAMES)


def _is_known(name: str, known_vllm_names: Collection[str]) -> bool:
    # Without a schema of vLLM (every release has one) nibble cannot check its names: they pass.
    if name.startswith("VLLM_") and (name in known_vllm_names or not known_vllm_names):
        return True
    return name in nibble_names()


def _unknown_name(name: str, known_vllm_names: Collection[str]) -> NibbleError:
    if name.startswith("NIBBLE_"):
        bare = name.removeprefix("NIBBLE_")
        is_bare = bare in nibble_names()
        hint = f"did you mean {bare}?" if is_bare else closest(name, sorted(nibble_names()))
        return NibbleError(
            ExitCode.USAGE,
            what=f"unknown variable {name}",
            expected="a name from `nibble serve --help`",
            action=hint,
        )
    hint = closest(name, sorted(known_vllm_names))
    return NibbleError(
        ExitCode.CONFIG,
        what=f"vLLM 0.32 has no variable {name}",
        expected="a variable of vLLM",
        action=f"unset it; {hint}",
    )


def _translate(name: str, value: str, successor: Successor) -> dict[str, object]:
    try:
        flags = successor.flags(value)
    except ValueError as error:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{name} is {value!r}",
            expected=str(error),
            action=f"correct or unset {name}",
        ) from None
    if flags is None:
        what = f"{name}={value} has no effect in vLLM 0.32 and no replacement: {successor.note}"
        raise NibbleError(ExitCode.CONFIG, what=what, action=f"unset {name}")
    return flags


def _translation_notice(
    name: str, value: str, flags: Mapping[str, object], variables: Mapping[str, str]
) -> str:
    words = [f"{flag} {content}" for flag, content in flags.items()]
    words += [f"{variable}={content}" for variable, content in variables.items()]
    if not words:
        successor = successor_of(name)
        note = f" ({successor.note})" if successor else ""
        return f"vLLM 0.32 does not read {name}={value}; it needs no replacement{note}"
    return f"vLLM 0.32 does not read {name}={value}; nibble uses {' '.join(words)}"


def _is_address(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

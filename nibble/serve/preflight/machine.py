"""Finds what would stop a start later, before vLLM starts: hardware, ports, folders, model files.

Decisions are functions of facts; `run_checks` collects the facts.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nibble.engine.installed import missing_plugin
from nibble.errors import ExitCode, NibbleError
from nibble.hub.files import missing_weights
from nibble.machine.disk import (
    free_bytes,
    gib,
    is_noexec,
    nearest_existing,
    not_readable,
    not_writable,
    unreadable_file,
    write_problem,
)
from nibble.machine.hardware import Hardware
from nibble.machine.host import (
    BindProblem,
    bind_problem,
    cpu_problem,
    open_files_limit,
    open_files_problem,
    shm_free_bytes,
    vllm_cache,
)
from nibble.machine.paths import cache_dir
from nibble.machine.targets import Target
from nibble.plan.budget import is_shared
from nibble.plan.memory import arithmetic, show_gib
from nibble.plan.plan import Plan
from nibble.plan.shared_memory import check_shared_memory, has_queues, needed_bytes
from nibble.serve.failures import steps

LITTLE_DISK_BYTES = 2 << 30  # compiled graphs and logs of one model


def run_checks(plan: Plan, environ: Mapping[str, str]) -> list[str]:
    """Warnings for a start of `plan`; raises NibbleError for what would make it fail.

    It starts nothing. Exit codes: 3 hardware, 4 model files, 5 ports, addresses and folders, 7
    memory.
    """
    check_hardware(plan.target, plan.hardware)
    warnings = check_driver(plan.target, plan.hardware.driver)
    warnings += check_memory(plan)
    settings = plan.settings
    if not plan.topology.is_headless:
        check_port("PORT", settings.host, settings.port, bind_problem(settings.host, settings.port))
    control = bind_problem("127.0.0.1", settings.control_port)
    check_port("NIBBLE_CONTROL_PORT", "127.0.0.1", settings.control_port, control)
    check_certificate({flag: str(choice.value) for flag, choice in plan.args.items()})
    child = plan.vllm_environ(environ)
    warnings += check_folders(settings.cache_dir or cache_dir(environ), vllm_cache(child))
    if (
        plan.checkpoint is not None and plan.checkpoint.is_local
    ):  # one from the Hub was verified by the pull
        check_model_folder(Path(plan.model))
    if has_queues(plan.target, plan.args, child, plan.topology):
        needed = needed_bytes(plan.topology, child, missing_plugin(child) is None)
        warnings += check_shared_memory(shm_free_bytes(), needed, plan.topology.ranks_here)
    if problem := open_files_problem(open_files_limit()):
        warnings.append(problem)
    return warnings + vllm_port_warning(child, settings.port)


def check_hardware(target: Target, hardware: Hardware) -> None:
    """Raise NO_HARDWARE unless this machine has the plan's hardware."""
    if target.device == "cpu":
        if problem := cpu_problem(hardware.cpu_arch, hardware.cpu_flags):
            raise NibbleError(
                ExitCode.NO_HARDWARE,
                what=problem,
                expected="AVX2 for vLLM on the CPU",
                action="use a newer machine",
            )
        return
    wrong = [gpu for gpu in hardware.gpus if gpu.capability not in target.capabilities]
    if hardware.gpus and not hardware.assumed and not wrong:
        return
    wanted = " or ".join(f"{major}.{minor}" for major, minor in target.capabilities)
    expected = f"a GPU of compute capability {wanted}"
    if hardware.nvml_error:
        what = f"the NVIDIA driver does not answer ({hardware.nvml_error})"
        action = "run `nvidia-smi`; a container needs --gpus all"
    elif wrong and not hardware.assumed:
        major, minor = wrong[0].capability
        what = (
            f"{wrong[0].name} has compute capability {major}.{minor} but the target is"
            f" {target.name}"
        )
        action = "unset NIBBLE_TARGET"
    else:
        what = f"the target is {target.name}, but this machine does not have its GPU"
        action = (
            "run a container with --gpus all; elsewhere unset NIBBLE_TARGET, or use `nibble plan`"
            " to plan for another machine"
        )
    raise NibbleError(ExitCode.NO_HARDWARE, what=what, expected=expected, action=action)


def check_driver(target: Target, driver: str | None) -> list[str]:
    """Warnings about `driver`; raises NO_HARDWARE for one known to fail on this target."""
    warnings: list[str] = []
    for bad in target.known_bad:
        if bad.component != "driver" or driver is None or not driver.startswith(bad.version):
            continue
        sentence = f"driver {driver} on {target.name}: {bad.reason} ({bad.evidence})"
        if bad.severity == "error":
            raise NibbleError(
                ExitCode.NO_HARDWARE,
                what=sentence,
                expected="another driver",
                action="install the driver that this line names",
            )
        warnings.append(sentence)
    return warnings


def check_memory(plan: Plan) -> list[str]:
    """Warnings about memory; raises NO_FIT, with the sum, for a start that cannot fit.

    On shared memory the estimate decides: a machine that hangs is worse than a refusal. A discrete
    GPU's driver refuses excess itself, so nibble refuses only what is certain (weights and one
    sequence).
    """
    budget = plan.budget
    if budget.weights_bytes is None or budget.allowed_bytes is None or budget.room_bytes is None:
        return []
    if "--cpu-offload-gb" in plan.args:
        return []
    missing = budget.least_kv_bytes - budget.room_bytes
    certain = missing - (0 if is_shared(plan.target) else budget.overhead_bytes)
    if certain > 0:
        what = f"{plan.checkpoint.id if plan.checkpoint else plan.model} does not fit: "
        what += arithmetic(budget, budget.least_kv_bytes) + f": {show_gib(missing)} too little"
        raise NibbleError(
            ExitCode.NO_FIT, what=what, action=f"try, in this order: {steps(plan.ladder)}"
        )
    if missing > 0:
        left = show_gib(max(0, budget.room_bytes))
        return [
            f"one sequence of {budget.sequence_tokens} tokens takes"
            f" {show_gib(budget.least_kv_bytes)}, about {left} are left; reduce memory, in this"
            f" order:"
            f" {steps(plan.ladder)}"
        ]
    return []


def check_port(variable: str, host: str, port: int, problem: BindProblem | None) -> None:
    """Raise CONFIG for what `bind_problem` found."""
    if problem is None:
        return
    if problem == "in use":
        what, action = (
            f"{variable} {port} is in use on {host}",
            f"stop what listens there or set another {variable}",
        )
    elif problem == "not permitted":
        what, action = (
            f"{variable} {port} is not permitted for uid {os.getuid()}",
            f"set {variable} to 1024 or higher",
        )
    else:
        what, action = (
            f"HOST {host} is not an address of this machine",
            "set HOST to 127.0.0.1, 0.0.0.0 or an address of this machine",
        )
    raise NibbleError(ExitCode.CONFIG, what=what, action=action)


def check_certificate(args: Mapping[str, str]) -> None:
    """Raise CONFIG for an unusable certificate or key, which vLLM reads only after the load."""
    certificate, key, authorities = (
        args.get(f"--ssl-{name}") for name in ("certfile", "keyfile", "ca-certs")
    )
    if certificate is None and key is None:
        return
    if certificate is None:
        raise NibbleError(
            ExitCode.CONFIG,
            what="--ssl-keyfile is set without --ssl-certfile",
            expected="both",
            action="set --ssl-certfile too",
        )
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Else OpenSSL would ask on the terminal
        context.load_cert_chain(certificate, key, password="")
        if authorities:
            context.load_verify_locations(authorities)
    except OSError as error:  # SSLError too
        named = " and ".join(name for name in (certificate, key, authorities) if name)
        why = getattr(error, "reason", None) or error.strerror or error
        what = f"{named} cannot be used for HTTPS ({why})"
        expected = (
            "a certificate and its key without a passphrase, as PEM files that this user can read"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected=expected,
            action="correct --ssl-certfile and --ssl-keyfile",
        ) from None


def check_folders(own: Path, engine: Path) -> list[str]:
    """Warnings about little disk; raises CONFIG for a folder that nibble or vLLM cannot write."""
    # Below nibble's cache the engine's folder is an entry that only a start creates.
    probed = nearest_existing(engine) if engine.is_relative_to(own) else engine
    for folder, variable in ((own, "NIBBLE_CACHE_DIR"), (probed, "VLLM_CACHE_ROOT")):
        if problem := write_problem(folder):
            raise not_writable(folder, problem, variable)
    if re.search(r"\s", str(engine)):  # torch 2.13 gives g++ its command as one text
        what = f"the path of the cache, {engine}, has a blank, which breaks compilation there"
        raise NibbleError(
            ExitCode.CONFIG, what=what, action="name a folder without blanks with NIBBLE_CACHE_DIR"
        )
    if is_noexec(engine):
        what = (
            f"{nearest_existing(engine)} is mounted noexec: no compiled kernel can be loaded"
            " from it"
        )
        action = (
            "mount it with exec (docker run --tmpfs PATH:exec), or name another folder with"
            " NIBBLE_CACHE_DIR"
        )
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a cache whose file system permits exec",
            action=action,
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        what = "no folder for temporary files is writable"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a writable /tmp",
            action="mount a tmpfs on /tmp or set TMPDIR",
        ) from None
    free = free_bytes(engine)
    if free < LITTLE_DISK_BYTES:
        return [f"only {gib(free)} of disk are free for compiled graphs in {engine}"]
    return []


def check_model_folder(folder: Path) -> None:
    """Raise MODEL for a model folder that lacks files or holds one this user may not read."""
    if blocked := unreadable_file(folder):
        raise not_readable(blocked)
    if missing := missing_weights(folder):
        what = f"{folder} lacks {', '.join(missing[:3])}" + (
            f" and {len(missing) - 3} more" if missing[3:] else ""
        )
        raise NibbleError(
            ExitCode.MODEL,
            what=what,
            expected="a complete model",
            action="copy or download it again",
        )


def vllm_port_warning(child: Mapping[str, str], port: int) -> list[str]:
    """A warning about VLLM_PORT: it is the port of vLLM's processes, not of the API."""
    given = child.get("VLLM_PORT", "")
    if not given.isdigit():
        return []
    clash = f" and is PORT {port} too" if int(given) == port else ""
    return [
        f"VLLM_PORT={given} sets a port between vLLM's processes{clash}; PORT is the port of"
        f" the API"
    ]

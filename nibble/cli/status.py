"""`nibble status`: the state, kernels and canary of this machine's server, by its control port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.machine.host import elsewhere_hint, start_command
from nibble.plan.gather import read_wishes
from nibble.plan.memory import show_gib
from nibble.printable import printable
from nibble.serve.control import ADDRESS
from nibble.serve.endpoint import Endpoint
from nibble.settings.options import options

_TIMEOUT_S = 5.0


def read_status(environ: Mapping[str, str]) -> dict[str, Any]:
    """/status of the server at the configured control port. Raises ENGINE_DIED where no server of
    nibble answers.
    """
    port = read_wishes([], environ).settings.control_port
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/status")
        response = connection.getresponse()
        status = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise _no_server(port, why) from None
    finally:
        connection.close()
    if (
        response.status != HTTPStatus.OK
        or not isinstance(status, dict)
        or not {"state", "phase"} <= status.keys()
    ):
        raise _no_server(port, "another program answers there")
    return status


def status_at(endpoint: Endpoint, environ: Mapping[str, str]) -> dict[str, Any]:
    """/status of the server at `endpoint`; empty where it is not nibble's on this machine."""
    if endpoint.is_local:
        with contextlib.suppress(NibbleError, AttributeError):
            status = read_status(environ)
            port = (status.get("plan") or {}).get("choices", {}).get("port", {}).get("value")
            return status if port == endpoint.port else {}
    return {}


def _no_server(port: int, why: str) -> NibbleError:
    what = f"nibble does not answer on control port {port} ({why})"
    action = (
        f"start a server with {start_command(os.environ)}, or set"
        f" {options()['control_port'].env[0]} to the running one's"
    )
    action += elsewhere_hint(os.environ, "status")
    return NibbleError(ExitCode.ENGINE_DIED, what=what, action=action)


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines for the terminal, one part of the status each, without control characters."""
    return (printable(line) for line in _lines(status))


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    phase = f"{status['state']}" + (
        f", {status['phase']}" if status["phase"] != status["state"] else ""
    )
    since = (
        f", {status['seconds_in_phase']:.0f} s in this phase"
        if "seconds_in_phase" in status
        else ""
    )
    yield f"state     {phase}{since}{_eta(status)}"
    if isinstance(status.get("detail"), str) and status["detail"]:
        yield f"          {status['detail']}"
    if "url" in status:
        yield f"serving   {', '.join(status['served_names'])} at {status['url']}"
    for model in status.get("models", ()):
        yield from _model_lines(model)
    if last := status.get("last_start_s"):
        yield "last start " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in last.items())
    if (memory := status.get("memory")) and memory.get("available_bytes") is not None:
        yield f"memory    {show_gib(memory['available_bytes'])} available"
    if assertion := status.get("assertion"):
        yield f"kernels   {assertion['verdict']}"
        yield from (f"          {line}" for line in assertion["deviations"])
        choices = (status.get("plan") or {}).get("choices", {})
        for name, layers in (("linear_kernel", "linear kernel"), ("moe_kernel", "experts")):
            choice = choices.get(name)
            if choice and choice["reason"].startswith("measured"):
                yield f"          {layers} {choice['value']}, {choice['reason']}"
        if assertion["ran"]:
            yield from (f"          {line}" for line in ran_lines(assertion["ran"][0]))
    if canary := status.get("canary"):
        yield f"canary    {canary['verdict']}"
        for found in canary["findings"]:
            warning = f"; {found['warning']}" if found["warning"] else ""
            yield f"          {found['mechanism']}: {found['verdict']}: {found['detail']}{warning}"


def _model_lines(model: Mapping[str, Any]) -> Iterator[str]:
    """One of several models."""
    phase = f" ({model['phase']})" if model["state"] == "loading" and "phase" in model else ""
    requests = f"{model['running']} running, {model['waiting']} waiting"
    yield (
        f"model     {', '.join(model['names'])}: {model['state']}{phase},"
        f" {show_gib(model['total_bytes'])}, {requests}"
    )
    if model["reason"]:
        yield f"          {model['reason']}"


def _eta(status: Mapping[str, Any]) -> str:
    eta = status.get("eta_s")
    return (
        ""
        if eta is None
        else (f"; ready in about {eta:.0f} s if it takes as long as the last start")
    )


def ran_lines(ran: Mapping[str, Any]) -> Iterator[str]:
    """The kernels that ran, as a worker reported them."""
    for part in ("linear", "moe", "attention"):
        for name, layers in ran[part].items():
            yield f"{part}: {name} in {layers} layer(s)"
    graphs = ran["cudagraph_mode"] + (
        f" ({ran['cudagraphs_captured']} captured)" if ran["cudagraphs_captured"] else ""
    )
    cache = ", ".join(ran["kv_cache_dtype"]) or "none"
    yield (
        f"KV cache {cache}; CUDA graphs {graphs}; compilation {ran['compilation_mode']}; sampler"
        f" {ran['sampler']}"
    )

"""`nibble serve A B`: plans each model, divides the memory, and runs their engines behind one
port.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.machine.host import bind_problem
from nibble.machine.memory import MemorySource
from nibble.plan.gather import Asked, plan_for, read_wishes
from nibble.plan.memory import KV, ONE_SEQUENCE_MARGIN
from nibble.plan.plan import Plan
from nibble.serve.api_key import resolve_api_key
from nibble.serve.fleet.budgets import MIB, Need, Share, divide
from nibble.serve.fleet.placement import group_size, place
from nibble.serve.fleet.unloading import Sleeper, choose_ways, obstacle
from nibble.serve.port_lock import hold_port
from nibble.serve.preflight.machine import check_memory, check_port
from nibble.serve.run_folder import make_run_folder
from nibble.settings.models import (
    ModelWish,
    Several,
    equal_names,
    settings_file,
    without_model,
)

SWITCHES = ("--json", "--detach")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Planned:
    """One model with its request, words and plan."""

    wish: ModelWish
    asked: Asked
    words: tuple[str, ...]
    plan: Plan
    environ: Mapping[str, str] = field(default_factory=dict)  # for its process, beside the common
    group: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of its requests except `default`: its id last."""
        return tuple(name for name in self.plan.served_names if name != "default")


def plan_all(
    asked: Asked,
    several: Several,
    environ: Mapping[str, str],
    folder: Path,
    fetch: Callable[[Plan, Asked], Plan] = lambda plan, _: plan,
) -> list[Planned]:
    """A plan for each model, with its files on disk after `fetch`. Writes their settings files to
    `folder`.
    """
    _refuse_common(asked)
    found = []
    for number, wish in enumerate(several.models):
        file = folder / f"model-{number}.toml"
        file.write_text(settings_file(several, wish))
        words = [wish.model, *_without_switches(several.words)]
        own = ["--config", str(file), "--served-model-name", ",".join(wish.aliases)]
        own = own if wish.aliases else own[:2]
        for_vllm = words.index("--") if "--" in words else len(words)
        words = [*words[:for_vllm], *own, *words[for_vllm:]]
        with _named(wish.model, file, asked.settings.config):
            one = read_wishes(words, without_model(environ))
            plan = fetch(plan_for(one), one)
        found.append(Planned(wish, one, tuple(words), plan))
    _refuse_equal_names(found)
    found = _placed(found, asked, environ, fetch)
    for number, one in enumerate(found):
        with _named(one.wish.model, folder / f"model-{number}.toml", asked.settings.config):
            check_memory(one.plan)
    return found


def _placed(
    planned: list[Planned],
    asked: Asked,
    environ: Mapping[str, str],
    fetch: Callable[[Plan, Asked], Plan],
) -> list[Planned]:
    """The models on their GPUs, each planned for these alone."""
    gpus = planned[0].plan.hardware.gpus
    own = any(VISIBLE in one.wish.env for one in planned)
    ranks = [one.plan.topology.ranks_here for one in planned]
    if len(gpus) < 2 or own or planned[0].plan.target.device != "cuda":
        return planned
    size = group_size(ranks, len(gpus))
    needs = [need_of(one, 0) for one in planned]
    if asked.settings.loading == "together":
        needs = [replace(need, stays=True) for need in needs]
    found = []
    for one, group in zip(planned, place(needs, len(gpus) // size), strict=True):
        chosen = gpus[group * size : (group + 1) * size][: one.plan.topology.ranks_here]
        seen = {VISIBLE: ",".join(str(gpu.index) for gpu in chosen)}
        found.append(_on(one, group, seen, environ, fetch))
    return found


def _on(
    one: Planned,
    group: int,
    seen: Mapping[str, str],
    environ: Mapping[str, str],
    fetch: Callable[[Plan, Asked], Plan],
) -> Planned:
    if one.plan.hardware.assumed:
        return replace(one, group=group, environ=seen)
    asked = read_wishes(one.words, {**without_model(environ), **seen})
    plan = fetch(plan_for(asked), asked)
    return replace(one, asked=asked, plan=plan, group=group, environ=seen)


def shares(planned: Sequence[Planned], asked: Asked) -> tuple[tuple[Share, ...], int]:
    """The share of each model, and the bytes that all models of a group may take. Raises NO_FIT."""
    allowed = [p.plan.budget.allowed_bytes for p in planned if p.plan.budget.allowed_bytes]
    allowed_bytes = min(allowed, default=0)
    needs = [need_of(one, allowed_bytes) for one in planned]
    sleepers = {one.names[-1]: sleeper_of(one.plan) for one in planned}
    if asked.settings.unload == "sleep":
        _refuse_sleep(sleepers)
    reserve_bytes = max(one.plan.memory_limits.reserve_bytes for one in planned)
    room_bytes = available_host_bytes() - reserve_bytes
    found: dict[str, Share] = {}
    for group in sorted({one.group for one in planned}):
        own = [need for need, one in zip(needs, planned, strict=True) if one.group == group]
        divided = divide(own, allowed_bytes, asked.settings.loading)
        ways = choose_ways(divided, sleepers, asked.settings.unload, allowed_bytes, room_bytes)
        room_bytes -= sum(sleepers[one.model].host_bytes for one in ways if one.sleeps)
        found |= {one.model: one for one in ways}
    return tuple(found[need.model] for need in needs), allowed_bytes


def sleeper_of(plan: Plan) -> Sleeper:
    """What decides whether the plan's model may sleep."""
    budget = plan.budget
    return Sleeper(
        plan.target.name,
        plan.target.memory.kind,
        plan.topology.ranks_here,
        budget.overhead_bytes,
        budget.weights_bytes or 0,
    )


def available_host_bytes() -> int:
    """Memory of this machine that is available now."""
    source = MemorySource()
    try:
        return source.read().available_bytes
    finally:
        source.close()


def need_of(planned: Planned, allowed_bytes: int) -> Need:
    """What a plan needs on one device."""
    plan = planned.plan
    budget, ranks = plan.budget, ranks_of(plan)
    base_bytes = (budget.weights_bytes or 0) + budget.overhead_bytes
    least = int((budget.sequence_bytes or 0) * (1 + ONE_SEQUENCE_MARGIN))
    chosen = plan.args.get(KV)
    if budget.kv_cache_bytes is not None:
        least = full = budget.kv_cache_bytes
    elif chosen is not None:  # nibble's own choice for the whole machine
        full = int(chosen.value) * ranks
        least = min(least or full, full)
    else:
        full = budget.full_kv_bytes or allowed_bytes
    least = -(-least // (MIB * ranks)) * MIB * ranks
    return Need(planned.names[-1], base_bytes, least, max(least, full), planned.wish.keep)


def ranks_of(plan: Plan) -> int:
    """On a CPU all ranks share one memory, and the flag is for one of them."""
    return plan.topology.ranks_here if plan.target.memory.kind == "host" else 1


# --- nibble serve A B ---


def serve_several(
    asked: Asked,
    several: Several,
    environ: dict[str, str],
    fetch: Callable[[Plan, Asked], Plan],
    on_ready: Callable[[], None],
) -> int:
    """Serve until a stop; the exit code of the whole."""
    settings = asked.settings
    folder = make_run_folder()
    try:
        with hold_port(settings.host, settings.port):
            for name, host, port in (
                ("PORT", settings.host, settings.port),
                ("NIBBLE_CONTROL_PORT", "127.0.0.1", settings.control_port),
            ):
                check_port(name, host, port, bind_problem(host, port))
            planned = plan_all(asked, several, environ, folder, fetch)
            parts, allowed_bytes = shares(planned, asked)
            given = settings.api_key.get_secret_value() if settings.api_key else None
            key = resolve_api_key(settings.host, given, settings.allow_anonymous, asked.cache)
            if "--json" in asked.command.rest:
                _print_start(asked, planned, parts)
            # uvicorn and the event loop: not for planning
            from nibble.cli.fleet_server import FleetServer

            server = FleetServer(asked, planned, parts, allowed_bytes, key, folder, environ)
            return server.run(on_ready)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _print_start(asked: Asked, planned: Sequence[Planned], parts: Sequence[Share]) -> None:
    """One line, the first on stdout; a program that started us follows `status` from there."""
    start = {
        "status": f"http://127.0.0.1:{asked.settings.control_port}/status",
        "models": fleet_json(planned, parts),
    }
    print(json.dumps(start, default=str), flush=True)


def fleet_json(planned: Sequence[Planned], parts: Sequence[Share]) -> list[dict[str, Any]]:
    """Each model with its names, share and plan as plain data."""
    return [
        {"model": one.wish.model, "names": list(one.names), "gpus": one.environ.get(VISIBLE)}
        | _of_share(share)
        | {"plan": one.plan.to_json()}
        for one, share in zip(planned, parts, strict=True)
    ]


def _of_share(share: Share) -> dict[str, Any]:
    names = ("kv_bytes", "total_bytes", "stays", "sleeps", "asleep_bytes", "unloading")
    return {name: getattr(share, name) for name in names}


# --- refusals ---


def _refuse_common(asked: Asked) -> None:
    settings = asked.settings
    if settings.nnodes or settings.node_rank or settings.head_ip or settings.cluster == "ray":
        raise NibbleError(
            ExitCode.CONFIG,
            what="several models on several machines",
            expected="one model, or one machine",
            action="unset the cluster's options, or serve one model",
        )
    if settings.served_model_name:
        raise NibbleError(
            ExitCode.CONFIG,
            what="one additional name is set for several models",
            expected="a name for each",
            action="write ALIAS=MODEL, or aliases in [[models]]",
        )
    if any(name.startswith("--ssl-") for name in asked.command.flags):
        raise NibbleError(
            ExitCode.CONFIG,
            what="vLLM's TLS flags with several models",
            expected="one model, or TLS in a proxy",
            action="put a proxy with TLS before nibble",
        )


def _refuse_sleep(sleepers: Mapping[str, Sleeper]) -> None:
    """NIBBLE_UNLOAD=sleep where no model can sleep."""
    reasons = {model: obstacle(one) for model, one in sleepers.items()}
    if all(reasons.values()):
        model, why = next(iter(reasons.items()))
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"NIBBLE_UNLOAD is sleep, and {model} cannot sleep: {why}",
            expected="stop or auto on this machine",
            action="unset NIBBLE_UNLOAD",
        )


def _refuse_equal_names(planned: Sequence[Planned]) -> None:
    seen: set[str] = set()
    for name in (name for one in planned for name in one.names):
        if name in seen:
            raise equal_names(name)
        seen.add(name)


def _without_switches(words: Sequence[str]) -> list[str]:
    """The words without switches of `serve`, which are for the whole server."""
    for_vllm = words.index("--") if "--" in words else len(words)
    return [word for word in words[:for_vllm] if word not in SWITCHES] + list(words[for_vllm:])


@contextlib.contextmanager
def _named(model: str, file: Path, config: Path | None) -> Iterator[None]:
    """Name the model in an error, and the user's file in place of the written one."""
    try:
        yield
    except NibbleError as error:
        shown = str(config) if config else "the settings of this model"
        what = error.what.replace(str(file), shown)
        what = what if model in what else f"{model}: {what}"
        raise NibbleError(
            error.code,
            what=what,
            expected=error.expected.replace(str(file), shown),
            action=error.action.replace(str(file), shown),
            unreachable=error.unreachable,
        ) from None

"""`nibble serve`: from the request to plan, model on disk, checks and vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nibble.cli.common import say, say_new
from nibble.cli.early_phase import early_phase
from nibble.cli.fleet import SWITCHES, serve_several
from nibble.cli.on_disk import on_disk
from nibble.cli.reference import beside_the_load, references_for
from nibble.cluster.network import resolve
from nibble.errors import ExitCode, NibbleError
from nibble.hub.packaged import Unobtainable
from nibble.machine.cpus import compute_cores
from nibble.machine.processes import survive_memory_pressure
from nibble.machine.read_bandwidth import measure_and_store
from nibble.plan.gather import (
    Asked,
    plan_for,
    read_wishes,
    with_default_model,
    with_embedded_model,
)
from nibble.plan.memory import UNWATCHED
from nibble.plan.moe_tuning import make_folder
from nibble.plan.plan import Plan
from nibble.plan.reference import is_beside
from nibble.serve.above import is_watched_above
from nibble.serve.api_key import KeyDecision, resolve_api_key
from nibble.serve.background import VARIABLE, Place, detach, registered
from nibble.serve.compile_cache import Use
from nibble.serve.crash_loop import Breaker, Verdict, plan_key
from nibble.serve.first_trials import should_try, try_kernels
from nibble.serve.hold import hold
from nibble.serve.port_lock import hold_port
from nibble.serve.prebuild import prebuilding
from nibble.serve.preflight.machine import run_checks
from nibble.serve.preflight.model import check_model_files
from nibble.serve.start_times import StartTimes
from nibble.serve.supervisor import serve as launch
from nibble.settings.models import Several, read_several, without_model
from nibble.settings.options import default_of

if TYPE_CHECKING:
    from nibble.cluster.watch import Watch


def serve(words: Sequence[str], environ: dict[str, str]) -> int:
    """Serve until a stop, or start a server in the background; the exit code of the whole."""
    several = read_several(words, environ, SWITCHES)
    if several is None:
        asked = with_default_model(read_wishes(words, environ, SWITCHES))
        run, name = partial(_serve, asked), str(asked.settings.model)
    else:
        asked = read_wishes(several.words, without_model(environ, "model"), SWITCHES)
        run = partial(_serve_several, asked, several, environ)
        name = ", ".join(wish.model for wish in several.models)
    place = _place(asked)
    if "--detach" in asked.command.rest:
        return _detach(place, words, environ, "--json" in asked.command.rest)
    if VARIABLE not in environ:
        return run(lambda: None)
    code = int(ExitCode.INTERNAL)
    settings = asked.settings
    with registered(place, name, settings.control_port, settings.drain_seconds) as note:
        try:
            code = run(place.log.keep_rotating)
        except NibbleError as error:
            code = int(error.code)
            raise
        except SystemExit as end:  # a stop signal before the start
            code = int(end.code or 0)
            raise
        finally:
            note(code)
    return code


def _serve_several(
    asked: Asked, several: Several, environ: dict[str, str], on_ready: Callable[[], None]
) -> int:
    said: set[str] = set()
    return serve_several(
        asked, several, environ, lambda plan, one: on_disk(plan, one, said), on_ready
    )


def background_place(port: int | None, environ: dict[str, str]) -> Place:
    """The record and log of the server on a port (None: PORT, else 8000)."""
    return _place(read_wishes([] if port is None else ["--port", str(port)], environ))


def _place(asked: Asked) -> Place:
    return Place(asked.cache, asked.settings.port)


def _detach(place: Place, words: Sequence[str], environ: dict[str, str], as_json: bool) -> int:
    for_vllm = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:for_vllm] if word not in ("--detach", "--json")]
    record = detach(place, [*kept, *words[for_vllm:]], environ)
    if as_json:
        status = f"http://127.0.0.1:{record.control_port}/status"
        print(
            json.dumps(
                {
                    "pid": record.pid,
                    "port": record.port,
                    "status": status,
                    "log": str(place.log.path),
                }
            )
        )
    port = f" --port {record.port}" if record.port != default_of("port") else ""
    say(
        f"pid {record.pid} in the background; follow it with `nibble logs -f{port}`, end it with"
        f" `nibble stop{port}`"
    )
    return ExitCode.OK


def _serve(asked: Asked, on_ready: Callable[[], None]) -> int:
    """Hold the port from the first second: vLLM takes it some seconds after its start."""
    settings = asked.settings
    if settings.node_rank:  # only rank 0 has an API
        return _serve_here(asked, on_ready)
    with hold_port(settings.host, settings.port):
        return _serve_here(asked, on_ready)


def _serve_here(asked: Asked, on_ready: Callable[[], None]) -> int:
    accepted = dict(asked.accepted.environ)
    plan = plan_for(asked)
    if plan.topology.head:
        resolve(plan.topology.head, "HEAD_IP")  # before a download of hours
    said: set[str] = set()
    try:
        plan = on_disk(plan, asked, said)
    except Unobtainable as error:
        if (embedded := with_embedded_model(asked)) is None:
            raise
        say(f"{error.what}: serving the embedded demo {embedded.settings.model} in its place")
        asked = embedded
        plan = on_disk(plan_for(asked), asked, said)
    plan = _tried(_checked(plan, accepted, said), asked, said)
    settings = plan.settings
    given = settings.api_key.get_secret_value() if settings.api_key else None
    cache = asked.cache
    key = resolve_api_key(settings.host, given, settings.allow_anonymous, cache)
    link_moe_configs(plan)
    _announce(plan)
    if "--json" in asked.command.rest:
        # One line, the first on stdout; a program that started us follows `status` from there.
        start = {
            "status": f"http://127.0.0.1:{settings.control_port}/status",
            "plan": plan.to_json(),
        }
        print(json.dumps(start, default=str), flush=True)
    record = f"{plan_key(plan, accepted)}.json"
    breaker = Breaker(cache / "crash-loop" / record, str(settings.model), say)
    verdict = breaker.verdict()
    if verdict.is_tripped:
        raise breaker.tripped(verdict)
    if verdict.wait_s > 0:
        if not _hold(plan, verdict):
            return ExitCode.OK
        # Free memory has changed meanwhile, and the user may have fixed the failure.
        plan = _checked(on_disk(plan_for(asked), asked, said), accepted, said)
    times = StartTimes(cache / "start-times" / record)
    return _Run(
        plan, accepted, key, breaker, times, on_ready, _references(plan, asked, accepted)
    ).run()


def _references(
    plan: Plan, asked: Asked, environ: dict[str, str]
) -> Callable[[], Mapping[str, Path]]:
    """Computed references for the canary, made before the engine starts or while it loads."""
    if is_beside(plan.target, plan.settings.reference, plan.checkpoint, plan.hardware):
        return beside_the_load(lambda: references_for(plan, environ, say))
    found = references_for(plan, environ, say, lambda: early_phase(asked, "computing a reference"))
    return lambda: found


def _checked(plan: Plan, environ: dict[str, str], said: set[str]) -> Plan:
    """The plan after every check that finds a later failure. It prints no line of `said` again."""
    say_new(plan.notices, said)
    say_new([f"warning: {warning}" for warning in run_checks(plan, environ)], said)
    for line in check_model_files(plan, plan.vllm_environ(environ)):
        say(line)
    if plan.target.device == "cpu":
        measure_and_store(compute_cores(), environ)  # for the next plan
    return plan


def _tried(plan: Plan, asked: Asked, said: set[str]) -> Plan:
    """The plan after trials of its linear kernels, where this GPU, driver and build has none."""
    record = should_try(plan, asked.cache, say)
    if record is None:
        return plan
    accepted = dict(asked.accepted.environ)
    with early_phase(asked, "trying kernels"):
        try_kernels(plan, record, accepted, say)
    return _checked(on_disk(plan_for(asked), asked, said), accepted, said)


def _hold(plan: Plan, verdict: Verdict) -> bool:
    why = (
        f"{verdict.failures} starts in a row failed, the next is in {verdict.wait_s:.0f} s; "
        f"the last failed with: {verdict.cause}"
    )
    say(why)
    waited = hold(plan.settings.control_port, verdict.wait_s, why)
    if not waited:
        say("stopped before the start")
    return waited


@dataclass(frozen=True)
class _Run:
    """One run of a checked plan; `on_ready` is called when the server is ready."""

    plan: Plan
    environ: dict[str, str]
    key: KeyDecision
    breaker: Breaker
    times: StartTimes
    on_ready: Callable[[], None]
    references: Callable[[], Mapping[str, Path]]

    def run(self) -> int:
        """Run vLLM and record how it ended."""
        survive_memory_pressure()
        ended_with: NibbleError | None = None
        compiled = Use(self.plan.caches, say)
        compiled.open()

        def ready() -> None:
            self.on_ready()
            compiled.record()

        self.breaker.begin()
        try:
            with prebuilding(self.plan, self.plan.vllm_environ(self.environ)) as compiles:
                if compiles:
                    say(
                        "compiling FlashInfer's sampling kernels beside the load, for this and"
                        " every later start"
                    )
                if self.plan.topology.spans_machines:
                    return self._across(ready)
                return self._launch(self.environ, ready)
        except NibbleError as error:
            ended_with = error
            raise
        finally:
            self.breaker.end(ended_with)
            compiled.close()

    def _across(self, on_ready: Callable[[], None]) -> int:
        """Several machines: this one runs vLLM if it has the API, inside the code that follows the
        others.
        """
        from nibble.cluster.across import serve_across
        from nibble.cluster.headless import serve_headless

        if self.plan.topology.is_headless:
            return serve_headless(self.plan, self.environ, say)

        def run(own: Mapping[str, str], watch: Watch, ranks_are_ready: Callable[[], None]) -> int:
            def ready() -> None:
                ranks_are_ready()
                on_ready()

            return self._launch(own, ready, watch)

        return serve_across(self.plan, self.environ, say, run)

    def _launch(
        self, environ: Mapping[str, str], ready: Callable[[], None], watch: Watch | None = None
    ) -> int:
        limits, success = self.plan.memory_limits, self.breaker.clear
        if is_watched_above(environ):
            limits = UNWATCHED
        return launch(
            *(self.plan, environ, self.key, limits, success, ready, self.times, watch),
            references=self.references,
            failed_starts=self.breaker.verdict().failures,
        )


def link_moe_configs(plan: Plan) -> None:
    """Create the folder in VLLM_TUNED_CONFIG_FOLDER, if it is nibble's."""
    if plan.moe_alias is None:
        return
    try:
        make_folder(plan.moe_alias)
    except OSError as error:  # vLLM then uses its defaults
        say(
            f"warning: {plan.moe_alias.folder} cannot be written ({error.strerror}): no MoE tuning"
            " for this GPU"
        )


def _announce(plan: Plan) -> None:
    chosen = plan.choices["target"]
    recipe = f"recipe {plan.recipe.id} ({plan.recipe.status})" if plan.recipe else "no recipe"
    say(
        f"serving {plan.served_names[0]} on {chosen.value} ({chosen.reason}), {recipe}; `nibble"
        " plan` shows every setting"
    )

"""`nibble reference MODEL`, and the references that a start computes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.cli.common import say
from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import write_problem
from nibble.machine.out_path import cannot_write
from nibble.machine.paths import cache_dir
from nibble.plan.choice import values_of
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.reference import activations_served, cores_for, is_beside
from nibble.reference.cost import AUTO_SECONDS, affordable, estimate
from nibble.reference.make import Ended, NoReference, Say, make_request, run
from nibble.reference.prompts import ANSWER_TOKENS
from nibble.reference.store import read_reference, reference_path

if TYPE_CHECKING:
    from nibble.checkpoint import Checkpoint
    from nibble.plan.plan import Plan

LIMIT_S = 1.5 * AUTO_SECONDS  # of what a start computes by itself


def make(
    model: str,
    environ: dict[str, str],
    device: str,
    dtype: str,
    activations: str | None,
    answer_tokens: int,
    out: Path | None,
) -> dict[str, Any]:
    """Compute and write a reference; returns a summary as plain data. Raises MODEL for a model that
    has none.
    """
    from nibble.cli.on_disk import fetched
    from nibble.hub.progress import as_lines

    if activations not in (None, "fp4", "bf16"):
        raise NibbleError(
            ExitCode.USAGE,
            what=f"--activations is {activations!r}",
            expected="fp4 or bf16",
            action="correct --activations",
        )
    if out is not None and (problem := write_problem(out.absolute().parent)):
        raise cannot_write(out, problem)
    asked = read_wishes([model], environ)
    plan = fetched(plan_for(asked), asked, as_lines(say))
    checkpoint = plan.checkpoint
    assert checkpoint is not None
    served = activations or activations_served(checkpoint, plan.target, values_of(plan.args))
    place = out or reference_path(asked.cache, checkpoint, served)
    cost = estimate(checkpoint, plan.hardware, answer_tokens)
    request = make_request(
        checkpoint,
        place.absolute(),
        served,
        answer_tokens,
        bool(cost and cost.keeps),
        device,
        dtype,
    )
    if cost:
        say(
            f"computing a reference of {checkpoint.id} on the {device}: about {cost.seconds:.0f} s"
            " on all cores of this machine"
        )
    try:
        done = run(request, environ, say)
    except (NoReference, Ended) as why:
        action = "serve it without one, or record answers (docs/canary.md)"
        raise NibbleError(
            ExitCode.MODEL, what=f"{checkpoint.id} has no computed reference: {why}", action=action
        ) from None
    _problem_file(place).unlink(missing_ok=True)
    return {
        "out": str(place),
        "path": str(checkpoint.path),
        "activations": served,
        "dtype": dtype,
        **done,
    }


def references_for(
    plan: Plan,
    environ: Mapping[str, str],
    say: Say,
    phase: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Path]:
    """Activations -> reference, for this start. It computes the one that the plan needs, within
    `phase`; a failure is reported and does not stop the start.
    """
    choice, checkpoint = plan.choices["reference"], plan.checkpoint
    if (
        choice.value == "off"
        or plan.topology.is_headless
        or checkpoint is None
        or checkpoint.path is None
        or not checkpoint.tensors
    ):
        return {}
    cache = plan.settings.cache_dir or cache_dir(environ)
    try:
        found = _known(cache, checkpoint)
        wanted = activations_served(checkpoint, plan.target, values_of(plan.args))
        if wanted in found:
            return found
        _make_for_a_start(
            plan, checkpoint, reference_path(cache, checkpoint, wanted), wanted, environ, say, phase
        )
        return _known(cache, checkpoint)
    except OSError as error:
        say(f"warning: no computed reference: {error}")
        return {}


def beside_the_load(make: Callable[[], dict[str, Path]]) -> Callable[[], dict[str, Path]]:
    """Run `make` in a thread; the returned function waits for its result. The process that computes
    ends with this one.
    """
    found: dict[str, Path] = {}
    thread = threading.Thread(target=lambda: found.update(make()), name="reference", daemon=True)
    thread.start()

    def wait() -> dict[str, Path]:
        thread.join()
        return found

    return wait


def _known(cache: Path, checkpoint: Checkpoint) -> dict[str, Path]:
    places = {kind: reference_path(cache, checkpoint, kind) for kind in ("fp4", "bf16")}
    return {kind: place for kind, place in places.items() if read_reference(place) is not None}


def _make_for_a_start(
    plan: Plan,
    checkpoint: Checkpoint,
    place: Path,
    wanted: str,
    environ: Mapping[str, str],
    say: Say,
    phase: Callable[[], AbstractContextManager[Any]],
) -> None:
    choice, always = plan.choices["reference"], plan.settings.reference == "always"
    if (why := _problem(place)) and not always:
        say(f"{checkpoint.id} has no computed reference: {why}")
        return
    if choice.value != "make":
        say(
            f"no reference is computed for {checkpoint.id} at this start ({choice.reason}); "
            f"`nibble reference {plan.settings.model}` computes one for later starts"
        )
        return
    cores = cores_for(plan.target, plan.settings.reference, plan.hardware)
    hardware = replace(plan.hardware, cpu_cores=cores)
    cost = estimate(checkpoint, hardware) if always else affordable(checkpoint, hardware)[0]
    tokens, keeps = (cost.answer_tokens, cost.keeps) if cost else (ANSWER_TOKENS, False)
    request = make_request(checkpoint, place, wanted, tokens, keeps, "cpu", "float32")
    beside = is_beside(plan.target, plan.settings.reference, checkpoint, plan.hardware)
    where = " while the model loads" if beside else ""
    say(f"computing a reference of {checkpoint.id} for the canary{where}, once: {choice.reason}")
    try:
        with phase():
            environ = {**environ, "OMP_NUM_THREADS": str(cores)}
            if beside:  # its threads leave the cores to the engine while they wait
                environ["OMP_WAIT_POLICY"] = "passive"
            done = run(request, environ, say, None if always else LIMIT_S)
        say(f"the reference was computed in {done['seconds']:.0f} s")
    except Ended as why:
        say(f"{checkpoint.id} has no computed reference: {why}; the next start tries again")
    except (NoReference, TimeoutError) as why:
        place.parent.mkdir(parents=True, exist_ok=True)
        _problem_file(place).write_text(json.dumps({"problem": str(why)}))
        say(f"{checkpoint.id} has no computed reference: {why}")


def _problem_file(place: Path) -> Path:
    """The file with the reason of a failed reference, so that later starts do not try again."""
    return place.with_suffix(".problem")


def _problem(place: Path) -> str:
    try:
        return str(json.loads(_problem_file(place).read_text())["problem"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""

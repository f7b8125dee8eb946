"""`nibble bench`: measures a running server, alone or beside another, and shows the result."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nibble.bench import report as words
from nibble.bench.about import about_machine, about_software, energy_of
from nibble.bench.compare import compare, ratios, refuse_others, refuse_too_little
from nibble.bench.driver import Driver
from nibble.bench.files import JSON, MARKDOWN, PLOT, read_result, write_json
from nibble.bench.result import Measured, Round, gather
from nibble.bench.run import WARM_UP, Bench, Side, Step, steps
from nibble.bench.served import Served, find_served
from nibble.bench.stock import LLAMA_CPP, PEERS, TITLES, Peer, running
from nibble.bench.sweep import CONCURRENCIES, Cell, make_sweep, read_lists
from nibble.cli.common import INTERRUPTED, say, split_words
from nibble.cli.status import status_at
from nibble.cli.tables import plain_table, wide_console
from nibble.errors import ExitCode, NibbleError
from nibble.machine.out_path import create_folder
from nibble.serve.endpoint import Endpoint, endpoint_at, local_endpoint
from nibble.serve.progress import stderr_is_terminal

VERB = "bench"
OURS = "nibble"
SIDES = (OURS, *PEERS)


@dataclass(frozen=True)
class Wishes:
    """What the user typed. None or nothing: nibble decides."""

    url: str | None = None
    model: str | None = None
    prompts: str | None = None
    outputs: str | None = None
    concurrency: str | None = None
    rounds: int = 3
    requests: int | None = None
    tokenizer: str | None = None
    against: str | None = None
    stock_flags: str = ""
    peer_flags: str = ""
    peer_program: str | None = None
    gguf: Path | None = None
    compare: Path | None = None
    out: Path | None = None


def bench(wishes: Wishes, environ: Mapping[str, str], as_json: bool) -> int:
    """Measure and show; the exit code. Raises NibbleError, after what was measured is shown and
    written.
    """
    peer = _peer(wishes)
    lists = read_lists(wishes.prompts, wishes.outputs, wishes.concurrency)
    endpoint = endpoint_at(wishes.url, environ) if wishes.url else local_endpoint(environ)
    old = read_result(wishes.compare) if wishes.compare else None
    served = find_served(endpoint, environ, VERB, wishes.model)
    cells = make_sweep(lists, served.max_model_len)
    about = _about(wishes, endpoint, served)
    if old is not None:
        refuse_others(old[0], about["model"], about["machine"])
        refuse_too_little(old[1], cells, wishes.rounds)
    plan = status_at(endpoint, environ).get("plan", {})
    tokenizer = _tokenizer(wishes, served, plan)
    if wishes.out is not None:
        create_folder(wishes.out, "results", JSON)
    taken: list[tuple[str, Cell, Round]] = []
    logs = wishes.out or Path(tempfile.mkdtemp(prefix="nibble-bench-"))
    with (
        _sides(peer, endpoint, served, plan, logs, environ) as sides,
        Driver(logs / "bench.log", environ) as driver,
    ):
        flags = [*tokenizer, *(peer.client_flags if peer else ())]
        run = Bench(driver, flags, wishes.requests, energy_of(endpoint), environ, VERB)
        about["sides"] = [_side_json(side, peer, plan) for side in sides]
        order = steps(cells, sides, wishes.rounds)
        failure = _measure(run, order, taken, _keeper(wishes, about))
    if wishes.out is None and not isinstance(failure, NibbleError):  # an error names its log
        shutil.rmtree(logs, ignore_errors=True)
    found = _report(wishes, about, gather(taken, SIDES), failure, old)
    _publish(found, wishes, as_json)
    if isinstance(failure, NibbleError):
        raise failure
    if failure is not None:
        return INTERRUPTED
    return _verdict(found)


def _peer(wishes: Wishes) -> Peer | None:
    """The other server that the user asks for. Raises USAGE where it cannot be one."""
    if wishes.against is None:
        return None
    if wishes.against not in PEERS:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"--against is {wishes.against!r}",
            expected=", ".join(PEERS),
            action="correct --against",
        )
    flags = [
        *split_words(wishes.stock_flags, "--stock-flags"),
        *split_words(wishes.peer_flags, "--peer-flags"),
    ]
    streams = read_lists(None, None, wishes.concurrency).concurrencies or CONCURRENCIES
    if wishes.against != LLAMA_CPP:
        return Peer(wishes.against, flags, _program(wishes, sys.executable))
    if wishes.gguf is None or not wishes.gguf.is_file():
        given = "nothing" if wishes.gguf is None else str(wishes.gguf)
        raise NibbleError(
            ExitCode.USAGE,
            what=f"--against {LLAMA_CPP} needs a GGUF file, and --gguf names {given}",
            expected="the model's weights as GGUF; llama.cpp loads no other checkpoint",
            action="name the file with --gguf",
        )
    return Peer(LLAMA_CPP, flags, _program(wishes, "llama-server"), wishes.gguf, max(streams))


def _program(wishes: Wishes, usual: str) -> str:
    """The program that starts the peer. Raises CONFIG where it is not here."""
    name = wishes.peer_program or usual
    if found := shutil.which(name):
        return found
    raise NibbleError(
        ExitCode.CONFIG,
        what=f"{name} is not a program that can be run here",
        expected=f"a program that starts {TITLES[str(wishes.against)]}",
        action="install it, or name it with --peer-program",
    )


def _flag(plan: Mapping[str, Any], name: str) -> Any:
    return plan.get("args", {}).get(name, {}).get("value")


def _tokenizer(wishes: Wishes, served: Served, plan: Mapping[str, Any]) -> list[str]:
    """Flags of the tokenizer that makes prompts: the model's, read as its server reads it."""
    named = wishes.tokenizer
    if named is not None and not Path(named, "config.json").is_file():
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{named} is not the folder of a model",
            expected="a folder with config.json and a tokenizer",
            action="correct --tokenizer",
        )
    mode = _flag(plan, "--tokenizer-mode")
    return [
        *("--tokenizer", named or str(served.folder or served.root)),
        *(("--tokenizer-mode", str(mode)) if mode else ()),
        *(("--trust-remote-code",) if _flag(plan, "--trust-remote-code") else ()),
    ]


def _about(wishes: Wishes, endpoint: Endpoint, served: Served) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["nibble", *sys.argv[1:]]),
        "model": served.to_json(),
        "machine": about_machine(endpoint),
        "software": about_software(),
        "rounds": wishes.rounds,
        "requests": wishes.requests,
    }


@contextlib.contextmanager
def _sides(
    peer: Peer | None,
    endpoint: Endpoint,
    served: Served,
    plan: Mapping[str, Any],
    logs: Path,
    environ: Mapping[str, str],
) -> Iterator[list[Side]]:
    """The servers that take part; the peer runs while the block does."""
    ours = Side(OURS, endpoint, served)
    if peer is None:
        yield [ours]
        return
    if not endpoint.is_local:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"--against {peer.name} starts a server here, and {endpoint.address} is elsewhere",
            expected="a server on this machine",
            action="run `nibble bench` where the server runs",
        )
    say(f"{peer.title} starts with {peer.gguf or served.root}")
    cache = _flag(plan, "--kv-cache-memory-bytes")
    with running(peer, served, cache, logs / f"{peer.name}.log", environ) as (process, model):
        yield [ours, Side(peer.name, process.endpoint, model, process)]


def _side_json(side: Side, peer: Peer | None, plan: Mapping[str, Any]) -> dict[str, Any]:
    about = {"name": side.name, "url": side.endpoint.url, "model": side.served.name}
    if peer is not None and side.name == peer.name:
        return {**about, "flags": list(peer.flags), "gguf": peer.gguf and peer.gguf.name}
    return {**about, "command": plan.get("command")}


def _keeper(wishes: Wishes, about: Mapping[str, Any]) -> Callable[[Sequence[Any]], None]:
    """Writes what was measured after each round, so that no end loses it."""

    def keep(taken: Sequence[tuple[str, Cell, Round]]) -> None:
        if wishes.out is not None:
            write_json(wishes.out, words.Report(about, gather(taken, SIDES), "not yet").to_json())

    return keep


def _measure(
    run: Bench,
    plan: Sequence[Step],
    taken: list[tuple[str, Cell, Round]],
    keep: Callable[[Sequence[Any]], None],
) -> NibbleError | KeyboardInterrupt | None:
    """Fill `taken`; what ended it early, or None."""
    try:
        with _progress(len(plan)) as begin:
            for one in run.run(plan, begin):
                taken.append(one)
                keep(taken)
    except (NibbleError, KeyboardInterrupt) as error:
        return error
    return None


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Step], None]]:
    """Tells of each step: a bar on a terminal, else a line for each round."""
    if not stderr_is_terminal():
        seen: set[int] = set()

        def tell(step: Step) -> None:
            if step.round not in seen:
                seen.add(step.round)
                say("warm-up" if step.round == WARM_UP else f"round {step.round}")

        yield tell
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("[nibble] {task.description}", markup=False), BarColumn(),
               MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("starts", total=total)
        done = -1

        def show(step: Step) -> None:
            nonlocal done
            done += 1
            name = "warm-up" if step.round == WARM_UP else f"round {step.round}"
            text = f"{name}: {step.cell}, {step.side.name}"
            bars.update(task, completed=done, description=text)

        yield show
        bars.update(task, completed=total)


def _report(
    wishes: Wishes,
    about: Mapping[str, Any],
    cells: tuple[Measured, ...],
    failure: BaseException | None,
    old: tuple[dict[str, Any], tuple[Measured, ...]] | None,
) -> words.Report:
    ended = "" if failure is None else str(failure) or "interrupted"
    found = words.Report(about, cells, ended)
    if wishes.against:
        found = replace(found, against=wishes.against, ratios=ratios(cells, OURS, wishes.against))
    if old is not None and failure is None:
        ours = tuple(one for one in cells if one.side == OURS)
        found = replace(found, compared=str(wishes.compare), changes=compare(old[1], ours))
    return found


def _publish(found: words.Report, wishes: Wishes, as_json: bool) -> None:
    """Write files and print: also what was measured before an end."""
    if wishes.out is not None and found.cells:
        write_json(wishes.out, found.to_json())
        has_plot = _draw(found, wishes.out)
        (wishes.out / MARKDOWN).write_text(words.markdown(found, has_plot))
        say(f"results in {wishes.out}")
    if as_json and found.cells:
        from nibble.cli.common import print_json

        print_json(found.to_json())
    elif found.cells:
        _show(found)


def _draw(found: words.Report, out: Path) -> bool:
    from nibble.bench.plot import draw

    try:
        draw(str(found.about["model"]["id"]), found.cells, out / PLOT)
    except ImportError:
        say("no plot: matplotlib is not installed; `pip install 'nibble-appliance[bench]'`")
        return False
    return True


def _show(found: words.Report) -> None:
    several = len({one.side for one in found.cells}) > 1
    left_out = {"server": several, "J/token": found.has_energy}
    keep = [place for place, name in enumerate(words.HEADINGS) if left_out.get(name, True)]
    table = plain_table(*(words.HEADINGS[place] for place in keep))
    for one in found.cells:
        cells = words.row(one)
        table.add_row(*(cells[place] for place in keep))
    wide_console().print(table)
    for line in words.ratio_lines(found.ratios, found.against):
        print(line)
    for line in words.change_lines(found.changes):
        print(line)
    for line in words.reasons(found.cells):
        print(f"error: {line}")


def _verdict(found: words.Report) -> int:
    worse = [one for one in found.changes if one.verdict == "worse"]
    return int(ExitCode.VERIFY if worse else ExitCode.OK)

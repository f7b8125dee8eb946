"""Runs a sweep: a warm-up of every cell, then rounds in which the servers take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from nibble.bench.about import Energy
from nibble.bench.driver import Driver, words_for
from nibble.bench.result import Round, read_round
from nibble.bench.served import Served, find_served, is_alive
from nibble.bench.stock import PeerProcess
from nibble.bench.sweep import Cell
from nibble.errors import ExitCode, NibbleError
from nibble.serve.endpoint import Endpoint

WARM_UP = 0  # the number of the round that is not counted
_SEEDS_OF_A_ROUND = 1000
# Two CPU servers share cores: in the first answer after a change of servers, tokens were 0.16 to
# 0.21 s late. After a pause of 0.3 s they were not (nibble-demo, two cores).
SETTLE_S = 1.0


@dataclass(frozen=True)
class Side:
    """A server that takes part. `peer`: where nibble started it beside its own."""

    name: str
    endpoint: Endpoint
    served: Served
    peer: PeerProcess | None = None

    def look(self) -> None:
        """Raise ENGINE_DIED where it does not answer."""
        try:
            status, _ = self.endpoint.call("/health")
        except OSError as error:
            raise self.lost(error) from None
        if self.peer is not None and status != HTTPStatus.OK:
            raise self.peer.lost()

    def lost(self, error: OSError) -> NibbleError:
        """The error of a server that ended, or does not answer any more."""
        if self.peer is not None:
            return self.peer.lost()
        return NibbleError(
            ExitCode.ENGINE_DIED,
            what=f"the server at {self.endpoint.address} was lost while it was measured"
            f" ({error.strerror or error})",
            action="see `nibble status` and `nibble logs`",
        )

    @property
    def log(self) -> str:
        """Where its log is, as part of a sentence."""
        return "the server's log" if self.peer is None else str(self.peer.log)


@dataclass(frozen=True)
class Step:
    """One run of one cell on one server."""

    round: int
    cell: Cell
    side: Side
    seed: int


def steps(cells: Sequence[Cell], sides: Sequence[Side], rounds: int) -> list[Step]:
    """Every run in order. Servers take turns within a cell, and the one that begins changes: other
    load on the machine then affects them alike. Pure.
    """
    found = []
    for number in range(rounds + 1):
        for place, cell in enumerate(cells):
            turn = sides if (number + place) % 2 == 0 else list(reversed(sides))
            seed = number * _SEEDS_OF_A_ROUND + place
            found += [Step(number, cell, side, seed) for side in turn]
    return found


@dataclass(frozen=True)
class Bench:
    """What all runs share. `tokenizer`: flags that name it; `requests`: of a round, None for the
    default; `verb`: for messages.
    """

    driver: Driver
    tokenizer: Sequence[str]
    requests: int | None
    energy: Energy
    environ: Mapping[str, str]
    verb: str

    def run(
        self, plan: Sequence[Step], begin: Callable[[Step], None]
    ) -> Iterator[tuple[str, Cell, Round]]:
        """Every counted round. `begin` hears of each step, the warm-up's too. Raises ENGINE_DIED
        where a server ends, MODEL where it no longer serves the model, CONFIG where it refuses all
        requests of a round.
        """
        before: Side | None = None
        for step in plan:
            begin(step)
            if before not in (None, step.side):
                time.sleep(SETTLE_S)
            before = step.side
            found = self._measure(step)
            if found.errors:
                self._look_after(step, found)
            if step.round != WARM_UP:
                yield step.side.name, step.cell, found

    def _measure(self, step: Step) -> Round:
        cell, endpoint = step.cell, step.side.endpoint
        warming = step.round == WARM_UP
        requests = cell.concurrency if warming else cell.requests(self.requests)
        words = words_for(
            endpoint, step.side.served.name, self.tokenizer, cell, requests, step.seed
        )
        before = self.energy.read()
        try:
            found = self.driver.measure(endpoint, words, lambda: is_alive(endpoint))
        except ConnectionError as error:
            raise step.side.lost(error) from None
        except NibbleError:  # the benchmark's own, unless its server is gone
            step.side.look()
            raise
        after = self.energy.read()
        joules = None if before is None or after is None else after - before
        return read_round(found, cell, joules)

    def _look_after(self, step: Step, found: Round) -> None:
        """Whether a round with errors is a result, or the end."""
        side = step.side
        side.look()
        find_served(side.endpoint, self.environ, self.verb, side.served.name)
        if not is_alive(side.endpoint):
            raise NibbleError(
                ExitCode.ENGINE_DIED,
                what=f"the engine behind {side.endpoint.address} ended",
                action="see `nibble status` and `nibble logs`",
            )
        if found.errors >= found.requests and not found.tokens_per_s:
            raise NibbleError(
                ExitCode.CONFIG,
                what=(
                    f"every request of {step.cell} failed:"
                    f" {'; '.join(found.reasons) or 'without a reason'}"
                ),
                action=f"see {side.log}, or measure shorter prompts and fewer at a time",
            )

"""Runs a sweep: a warm-up of every cell, then rounds in which the servers take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nibble.bench.about import Energy
from nibble.bench.driver import Driver, words_for
from nibble.bench.result import Round, read_round
from nibble.bench.served import Served, find_served, is_alive
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
    """A server that takes part."""

    name: str
    endpoint: Endpoint
    served: Served


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
        found = self.driver.measure(endpoint, words, lambda: is_alive(endpoint))
        after = self.energy.read()
        joules = None if before is None or after is None else after - before
        return read_round(found, cell, joules)

    def _look_after(self, step: Step, found: Round) -> None:
        """Whether a round with errors is a result, or the end."""
        side = step.side
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
                action="see the server's log, or measure shorter prompts and fewer at a time",
            )

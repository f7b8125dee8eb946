"""What a benchmark measures: prompt tokens, output tokens, requests at the same time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from nibble.errors import ExitCode, NibbleError

PROMPTS, OUTPUTS, CONCURRENCIES = (128, 1024), (128,), (1, 4, 16)
MAX_NUMBER = 10_000_000
FEWEST_REQUESTS, REQUESTS_FOR_EACH = 8, 4


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the sweep."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens} + {self.output_tokens} tokens × {self.concurrency}"

    def requests(self, wanted: int | None) -> int:
        """Requests of a round: `wanted`, or enough that all streams are busy most of the time."""
        return wanted or max(FEWEST_REQUESTS, REQUESTS_FOR_EACH * self.concurrency)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def read_numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from `128,1024`, without repeats. Raises USAGE for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= MAX_NUMBER for word in words):
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{option} is {text!r}",
            expected="whole numbers above 0, such as 128,1024",
            action=f"correct {option}",
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def default_prompts(outputs: Sequence[int], max_model_len: int) -> tuple[int, ...]:
    """The default prompt lengths that fit beside the longest output."""
    room = max_model_len - max(outputs)
    fitting = tuple(length for length in PROMPTS if length <= room)
    return fitting or (max(1, room // 2),)


def default_outputs(max_model_len: int) -> tuple[int, ...]:
    """The default output lengths, or a quarter of a short model's length."""
    return tuple(min(length, max(1, max_model_len // 4)) for length in OUTPUTS)


@dataclass(frozen=True)
class Lists:
    """What the user listed; None: the default."""

    prompts: tuple[int, ...] | None
    outputs: tuple[int, ...] | None
    concurrencies: tuple[int, ...] | None


def read_lists(prompts: str | None, outputs: str | None, concurrencies: str | None) -> Lists:
    """The three lists. Raises USAGE for a malformed one."""
    given = ((prompts, "--prompt-tokens"), (outputs, "--output-tokens"))
    read = [
        None if text is None else read_numbers(text, option)
        for text, option in (*given, (concurrencies, "--concurrency"))
    ]
    return Lists(*read)


def make_sweep(lists: Lists, max_model_len: int) -> tuple[Cell, ...]:
    """Every cell, in order. Raises CONFIG for a cell longer than the server's context."""
    outputs = lists.outputs or default_outputs(max_model_len)
    prompts = lists.prompts or default_prompts(outputs, max_model_len)
    longest = max(prompts) + max(outputs)
    if longest > max_model_len:
        raise NibbleError(
            ExitCode.CONFIG,
            what=(
                f"{max(prompts)} prompt tokens and {max(outputs)} output tokens are {longest},"
                f" beyond the server's context of {max_model_len}"
            ),
            action="ask for fewer with --prompt-tokens and --output-tokens",
        )
    many = lists.concurrencies or CONCURRENCIES
    return tuple(Cell(*values) for values in product(prompts, outputs, many))

"""Tasks with a score, run by EleutherAI's lm-evaluation-harness against /v1/completions.

A data set is a file of JSON lines: `question` and `answer`, a number that ends the answer; with
`choices`, `answer` is the place of the right one. nibble writes the harness's task file for it,
and the harness loads nothing from the network.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.bench.about import clean_environ
from nibble.bench.served import Served
from nibble.errors import ExitCode, NibbleError
from nibble.printable import printable
from nibble.serve.endpoint import Endpoint

_HERE = Path(__file__).parent
SHIPPED: Mapping[str, Path] = {
    "words": _HERE / "words.jsonl", "choice": _HERE / "choice.jsonl",
}  # fmt: skip
_MOST_BYTES = 1 << 30
_INSTALL = (
    "pip install 'lm-eval[api]' transformers into an environment, and name its Python with"
    " --harness"
)


@dataclass(frozen=True)
class Task:
    """A data set. `has_choices`: the most likely choice is the answer, else the last number."""

    name: str
    data: Path
    rows: int
    has_choices: bool


@dataclass(frozen=True)
class Score:
    """The share of right answers, and the harness's standard error."""

    task: str
    accuracy: float
    error: float
    questions: int

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def read_task(name: str) -> Task:
    """A shipped data set or a file. Raises MODEL where there is none, USAGE for other content."""
    path = SHIPPED.get(name) or Path(name)
    if not path.is_file():
        raise NibbleError(
            ExitCode.USAGE,
            what=f"there is no data set {name}",
            expected=f"{', '.join(SHIPPED)} or a file of JSON lines",
            action="correct --task",
        )
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is larger than 1 GiB")
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        kinds = {_kind(row) for row in rows}
        if len(kinds) != 1:
            raise ValueError("no questions" if not rows else "some rows have choices, some not")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{path} is not a data set ({type(error).__name__}: {error})",
            expected='lines such as {"question": "2 + 2?", "answer": "4"}',
            action="correct --task",
        ) from None
    # lm-evaluation-harness takes a comma for the end of a name
    clean = "".join(letter if letter.isalnum() else "_" for letter in path.stem)
    return Task(f"nibble_{clean}", path.resolve(), len(rows), kinds.pop())


def _kind(row: Mapping[str, Any]) -> bool:
    """Whether a row has choices. Raises ValueError for a malformed one."""
    if not isinstance(row["question"], str):
        raise ValueError("a question is not text")
    if "choices" not in row:
        if not isinstance(row["answer"], str | int):
            raise ValueError("an answer is neither text nor a number")
        return False
    if not 0 <= int(row["answer"]) < len(row["choices"]):
        raise ValueError("an answer is not the place of a choice")
    return True


def task_file(task: Task) -> dict[str, Any]:
    """The harness's description of a task. Pure."""
    shared = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(task.data)}},
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "metadata": {"version": 1},
    }
    if task.has_choices:
        return shared | {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    last = [
        {
            "function": "regex",
            "group_select": -1,
            "regex_pattern": r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)",
        },
        {"function": "take_first"},
    ]
    return shared | {
        "output_type": "generate_until",
        "doc_to_target": "{{answer|string}}",
        "generation_kwargs": {"until": ["Question:", "\n\n"], "max_gen_toks": 256},
        "filter_list": [{"name": "last-number", "filter": last}],
        "metric_list": [exact | {"ignore_case": True, "regexes_to_ignore": [",", r"\.0*$"]}],
    }


def run_tasks(
    tasks: Sequence[Task],
    endpoint: Endpoint,
    served: Served,
    tokenizer: str | None,
    harness: str,
    limit: int | None,
    environ: Mapping[str, str],
) -> list[Score]:
    """Scores of all tasks. `harness` is a Python that has lm-evaluation-harness. Raises CONFIG
    without it, ENGINE_DIED where it ends with an error.
    """
    _check_harness(harness, environ)
    with tempfile.TemporaryDirectory(prefix="nibble-eval-") as scratch:
        folder = Path(scratch)
        for task in tasks:
            # JSON is YAML
            (folder / f"{task.name}.yaml").write_text(json.dumps(task_file(task)))
        words = harness_words(tasks, endpoint, served, tokenizer, limit, folder)
        key = {"OPENAI_API_KEY": endpoint.key or "none", "HF_DATASETS_CACHE": f"{scratch}/cache"}
        found = subprocess.run(
            [harness, "-m", "lm_eval", *words], capture_output=True, text=True, check=False,
            env=clean_environ(environ) | key | {"HF_DATASETS_OFFLINE": "1"},
        )  # fmt: skip
        results = sorted(folder.glob("out/**/results_*.json"))
        if found.returncode or not results:
            raise _failed(found.stderr)
        return read_scores(json.loads(results[-1].read_text()), tasks, limit)


def harness_words(
    tasks: Sequence[Task],
    endpoint: Endpoint,
    served: Served,
    tokenizer: str | None,
    limit: int | None,
    folder: Path,
) -> list[str]:
    """The words after `lm_eval`. The key is not among them: others see a process's words. Pure."""
    model = {
        "model": served.name,
        "base_url": f"{endpoint.url}/v1/completions",
        "num_concurrent": "4",
        "max_retries": "3",
        "max_length": str(served.max_model_len),
        "tokenized_requests": "True",
        "tokenizer_backend": "huggingface",
        "tokenizer": tokenizer or served.root,
    }
    return [
        *("run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--tasks", ",".join(task.name for task in tasks)),
        *("--include_path", str(folder), "--output_path", str(folder / "out")),
        *(("--limit", str(limit)) if limit else ()),
    ]


def read_scores(found: Mapping[str, Any], tasks: Sequence[Task], limit: int | None) -> list[Score]:
    """Scores from the harness's results. Raises INTERNAL where they lack one. Pure."""
    scores = []
    for task in tasks:
        metric = "acc,none" if task.has_choices else "exact_match,last-number"
        name, _, kind = metric.partition(",")
        try:
            row = found["results"][task.name]
            error = row.get(f"{name}_stderr,{kind}")
            error = float(error) if isinstance(error, int | float) else 0.0
            count = min(task.rows, limit or task.rows)
            scores.append(Score(task.name, float(row[metric]), error, count))
        except (KeyError, TypeError, ValueError) as problem:
            raise NibbleError(
                ExitCode.INTERNAL,
                what=f"lm-evaluation-harness gave no {metric} of {task.name} ({problem!r})",
                action="install version 0.4.13 of it",
            ) from None
    return scores


def _check_harness(harness: str, environ: Mapping[str, str]) -> None:
    try:
        found = subprocess.run(
            [harness, "-c", "import lm_eval, aiohttp, tenacity, transformers"],
            env=clean_environ(environ), capture_output=True, check=False,
        )  # fmt: skip
        why = found.returncode and "lm_eval or transformers cannot be imported"
    except OSError as error:
        why = error.strerror
    if why:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{harness} has no lm-evaluation-harness ({why})",
            expected="a Python with the package lm-eval",
            action=_INSTALL,
        )


def _failed(log: str) -> NibbleError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    last = (errors or lines or ["it printed nothing"])[-1]
    return NibbleError(
        ExitCode.ENGINE_DIED,
        what=f"lm-evaluation-harness ended with an error: {printable(last)[:300]}",
        action="see the server's log; for another machine's server, name --tokenizer FOLDER",
    )

"""The command as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.machine.paths import root
from tests.support import processor_time

CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("NIBBLE_", "VLLM_", "MODEL", "HF_"))
}


def nibble(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nibble", *words],
        cwd=root(),
        env=CLEAN | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def best_of_ten(*words: str) -> float:
    """Seconds of a processor, of which the machine's other work takes none."""
    times = []
    for _ in range(10):
        start = processor_time.of_children()
        assert nibble(*words).returncode == 0
        times.append(processor_time.of_children() - start)
    return min(times)


def test_help_takes_less_than_0_3_seconds() -> None:
    assert best_of_ten("--help") < 0.3


@pytest.mark.parametrize(
    "words",
    [["--help"], ["serve", "--help"], ["plan", "nibble-demo"], ["recipes", "list"], ["version"]],
)
def test_no_verb_that_only_looks_imports_torch_or_vllm(words: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nibble", *words],
        cwd=root(),
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-500:]
    imported = {
        line.rsplit("|", 1)[-1].strip().split(".")[0]
        for line in run.stderr.splitlines()
        if line.startswith("import time")
    }
    assert not imported & {"torch", "vllm", "transformers"}


@pytest.mark.parametrize("verb", ["serve", "plan", "pull"])
def test_help_of_a_verb_lists_every_option(verb: str) -> None:
    from nibble.settings.options import options

    text = nibble(verb, "--help", COLUMNS="200").stdout
    for option in options().values():
        assert option.env[0] in text


def test_an_unknown_verb_is_one_line_and_exit_2() -> None:
    run = nibble("sevre")
    assert (
        run.returncode == 2
        and run.stderr.startswith("nibble: error: ")
        and run.stderr.count("\n") == 1
    )


@pytest.mark.parametrize("words", [[], ["cache"], ["cluster"], ["patches"], ["recipes"]])
def test_a_group_of_commands_alone_shows_its_help_and_nothing_else(words: list[str]) -> None:
    run = nibble(*words)
    assert run.returncode == 2 and run.stderr == nibble(*words, "--help").stdout


@pytest.mark.parametrize("words", [[], ["cache"], ["cluster"], ["patches"], ["recipes"]])
def test_the_list_of_commands_says_whole_what_each_does(words: list[str]) -> None:
    text = nibble(*words, "--help", COLUMNS="80").stdout.partition("Commands:")[2]
    assert text.count("\n") > 2 and "..." not in text


@pytest.mark.parametrize(
    ("words", "helps"),
    [
        (["help"], "nibble --help"),
        (["chat"], "nibble chat --help"),
        (["status", "--port", "9"], "nibble status --help"),
        (["recipes", "show"], "nibble recipes show --help"),
    ],
)
def test_a_misused_verb_names_its_own_help(words: list[str], helps: str) -> None:
    run = nibble(*words)
    assert run.returncode == 2 and run.stderr.endswith(f"; see `{helps}`\n")
    assert ".;" not in run.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cluster", "manifest"], ("kuberay|lws", "--image", "--shm", "--cache", "--rdma")),
        (["tune"], ("--shape", "--seconds", "--json")),
    ],
)
def test_help_of_a_verb_with_options_besides_those_of_all_names_them(
    words: list[str], named: tuple[str, ...]
) -> None:
    run = nibble(*words, "--help")
    assert run.returncode == 0 and run.stdout.startswith(f"usage: nibble {' '.join(words)} ")
    assert [option for option in named if option not in run.stdout] == []


def test_a_plan_that_serve_would_refuse_for_memory_says_so_and_why() -> None:
    text = nibble("plan", "nibble-demo", NIBBLE_MEMORY_RESERVE_GIB="4000").stdout
    assert re.search(
        r"^serve ends with exit 7: \S*nibble-demo does not fit: .* GiB too little; try, in",
        text,
        re.M,
    )
    assert "-" not in re.findall(r"(?:may take|KV cache|that fit) +(\S)", text)
    assert "exit 7" not in nibble("plan", "nibble-demo", NIBBLE_MEMORY_RESERVE_GIB="0").stdout


@pytest.mark.parametrize("verb", ["show", "lint"])
def test_a_misspelled_recipe_is_one_line_that_names_the_nearest(verb: str) -> None:
    run = nibble("recipes", verb, "nvidia/qwen3-8b-nvfp4")
    assert run.returncode == 2 and run.stderr.count("\n") == 1
    assert run.stderr.endswith("did you mean nvidia/Qwen3-8B-NVFP4?\n")


def test_status_without_a_server_says_how_to_start_one() -> None:
    run = nibble("status", NIBBLE_CONTROL_PORT="9")
    assert run.returncode == 10 and "start a server with `make serve`" in run.stderr


def test_chat_without_a_server_says_how_to_start_one() -> None:
    run = nibble("chat", "hello", PORT="9")
    assert run.returncode == 10 and "make serve" in run.stderr and run.stderr.count("\n") == 1


def test_the_list_of_recipes_shows_every_name_and_status_whole() -> None:
    text = nibble("recipes", "list").stdout
    assert "…" not in text
    assert re.search(
        r"^Salyut1/GLM-4\.7-NVFP4 +unknown +reported +unknown +unknown", text, re.MULTILINE
    )


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "nibble-demo"],
        ["recipes", "list"],
        ["recipes", "show", "Salyut1/GLM-4.7-NVFP4"],
        ["doctor"],
        ["pull", "models/nibble-demo"],
        ["version"],
    ],
)
def test_every_verb_that_answers_a_question_does_so_in_json(words: list[str]) -> None:
    assert json.loads(nibble(*words, "--json", HF_HUB_OFFLINE="1").stdout)


def test_a_fault_of_our_own_is_one_line_exit_1_and_a_file_with_the_traceback(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from nibble.cli.failures import guarded; sys.exit(guarded(lambda: 1 // 0))"
    )
    environ = {**os.environ, "NIBBLE_CACHE_DIR": str(tmp_path / "cache"), "NIBBLE_DEBUG": ""}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )
    file = tmp_path / "cache" / "last-fault.txt"
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert (
        "internal fault: ZeroDivisionError: integer division or modulo by zero; please report it,"
        f" with the traceback in {file}" in run.stderr
    )
    assert (
        "Traceback (most recent call last)" in file.read_text() and file.stat().st_mode & 0o077 == 0
    )

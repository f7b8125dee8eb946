"""Words after `ray-head` and `ray-worker`: what a Ray node does not read is refused, and the
help shows what it reads.
"""

from __future__ import annotations

import pytest

from nibble.cli.help import show_verb_help
from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.settings.command_line import read_command_line
from nibble.settings.node_words import check_node_words


@pytest.mark.parametrize("verb", ["ray-head", "ray-worker"])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["extra"], "takes no model, but the command line has 'extra'"),
        (["extra", "--num-gpus", "1"], "takes no model, but the command line has 'extra'"),
        (["--max-model-len", "4096"], "does not take --max-model-len"),
        (["--enforce-eager"], "does not take --enforce-eager"),
        (["--port", "9000"], "does not take --port"),
    ],
)
def test_words_of_serve_are_exit_2(verb: str, words: list[str], what: str) -> None:
    with pytest.raises(NibbleError) as refused:
        check_node_words(read_command_line(words, (), load_schema()), verb)
    assert refused.value.code is ExitCode.USAGE
    assert (
        f"`{verb}` {what}; expected the flags that `nibble {verb} --help` shows"
        in refused.value.line()
    )


def test_options_of_a_node_pass() -> None:
    words = [
        "--num-gpus",
        "2",
        "--cluster-interface",
        "eth0",
        "--memory-reserve-gib",
        "4",
        "--target",
        "gb10",
    ]
    check_node_words(read_command_line(words, (), load_schema()), "ray-worker")


@pytest.mark.parametrize("verb", ["ray-head", "ray-worker"])
def test_the_help_of_a_node_shows_its_own_options(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_verb_help(verb)
    shown = capsys.readouterr().out
    assert (
        f"usage: nibble {verb} [FLAGS]" in shown
        and "--num-gpus" in shown
        and "RAY_AUTH_TOKEN" in shown
    )
    assert "MODEL" not in shown and "--max-model-len" not in shown and "vllm serve" not in shown
    show_verb_help("serve")
    assert "--max-model-len" in capsys.readouterr().out

"""Several models on the command line and in the user's TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.settings.models import ModelWish, Several, read_several, settings_file

SWITCHES = ("--json", "--detach")


def read(*words: str, **environ: str) -> Several | None:
    return read_several(words, environ, SWITCHES)


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "nibble.toml"
        path.write_text(text)
        return str(path)

    return write


def test_one_model_is_not_several() -> None:
    assert read() is None
    assert read("acme/a") is None
    assert read("--port", "9000") is None
    assert read("--json", "acme/a", "--port", "9000") is None
    assert read("./a=b/c") is None  # a path


def test_models_and_aliases_come_before_the_flags() -> None:
    found = read("--detach", "small=acme/a", "acme/b", "--port", "9000", "--", "--x")
    assert found is not None
    assert found.models == (ModelWish("acme/a", ("small",)), ModelWish("acme/b"))
    assert found.words == ("--detach", "--port", "9000", "--", "--x")


def test_models_of_the_file_have_own_options_flags_and_variables(file) -> None:
    path = file(
        """
port = 9000
max_num_seqs = 4
[args]
kv-cache-dtype = "fp8"
[[models]]
model = "acme/a"
aliases = ["small", "fast"]
keep = true
max_model_len = "8K"
args = { compilation-config = { level = 3 }, seed = 1 }
[[models]]
model = "acme/b"
env = { VLLM_LOGGING_LEVEL = "WARNING" }
"""
    )
    for found in (read(NIBBLE_CONFIG=path), read("--config", path), read(f"--config={path}")):
        assert found is not None
        first, second = found.models
        assert (first.aliases, first.keep, second.keep) == (("small", "fast"), True, False)
        assert tomllib.loads(settings_file(found, first)) == {
            "port": 9000,
            "max_num_seqs": 4,
            "max_model_len": "8K",
            "served_model_name": "small,fast",
            "args": {"kv-cache-dtype": "fp8", "compilation-config": {"level": 3}, "seed": 1},
        }
        assert tomllib.loads(settings_file(found, second))["env"] == {
            "VLLM_LOGGING_LEVEL": "WARNING"
        }


def test_a_model_named_elsewhere_wins_over_the_file(file) -> None:
    path = file('[[models]]\nmodel = "acme/a"\n')
    assert read("acme/other", "--config", path) is None
    assert read(NIBBLE_CONFIG=path, MODEL="acme/other") is None
    assert read(NIBBLE_CONFIG=path, MODEL="") is not None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("models = 3", "one table [[models]] for each model"),
        ("[[models]]\nkeep = true", "model of a [[models]]"),
        ('[[models]]\nmodel = "a/b"\naliases = "x"', "a list of names"),
        ('[[models]]\nmodel = "a/b"\naliases = ["x y"]', "without blanks"),
        ('[[models]]\nmodel = "a/b"\naliases = ["default"]', "other than default"),
        ('[[models]]\nmodel = "a/b"\nport = 9000', "one for the whole server"),
        ('[[models]]\nmodel = "a/b"\nmax_num_seq = 4', "did you mean max_num_seqs"),
        ('[[models]]\nmodel = "a/b"\n[[models]]\nmodel = "a/b"', "two models have the name 'a/b'"),
    ],
)
def test_a_wrong_table_is_refused_by_name(file, text: str, named: str) -> None:
    with pytest.raises(NibbleError) as caught:
        read(NIBBLE_CONFIG=file(text))
    assert caught.value.code == ExitCode.CONFIG
    assert named in caught.value.line()


def test_one_alias_for_two_models_is_refused() -> None:
    with pytest.raises(NibbleError) as caught:
        read("x=acme/a", "x=acme/b")
    assert "two models have the name 'x'" in caught.value.line()

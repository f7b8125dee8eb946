"""Of several values for one flag the higher layer wins, in whatever order they were added."""

from __future__ import annotations

import itertools
import json

import pytest
from typer.testing import CliRunner

from nibble.cli.app import app
from nibble.errors import ExitCode, NibbleError
from nibble.plan.choice import Choice, Flags, Layer
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.refusals import refusal_of

OFFLINE = {"HOME": "/home/me", "HF_HUB_OFFLINE": "1"}
QWEN = "nvidia/Qwen3.6-35B-A3B-NVFP4"
SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"


def plan(*words: str, **environ: str) -> Plan:
    return plan_for(read_wishes(list(words), OFFLINE | environ))


def refused(*words: str) -> NibbleError:
    return refusal_of(lambda: plan(*words))


def explained(*words: str, **environ: str) -> list[dict[str, str]]:
    result = CliRunner().invoke(
        app, ["plan", *words, "--json"], env=OFFLINE | environ, catch_exceptions=False
    )
    return json.loads(result.output)["history"]


# --- layers ---


def test_the_higher_layer_wins_in_every_order() -> None:
    said = [Choice(layer.name, layer.name, "", layer) for layer in Layer]
    for order in itertools.islice(itertools.permutations(said), 0, 50_000, 97):
        flags = Flags()
        for choice in order:
            flags = flags.add({"--x": choice})
        assert flags["--x"].value == "LIMIT"
        assert [choice.layer for choice, _ in flags.history("--x")] == sorted(Layer, reverse=True)


def test_objects_are_merged_key_by_key_down_to_the_first_that_is_none() -> None:
    flags = Flags()
    for value, source, layer in (
        ({"lost": 1}, "nibble", Layer.NIBBLE),
        ("text", "target", Layer.TARGET),
        ({"a": 1, "b": 1}, "recipe", Layer.RECIPE),
        ({"b": 2}, "line", Layer.COMMAND_LINE),
    ):
        flags = flags.add({"--x": Choice(value, source, "", layer)})
    assert flags["--x"].value == {"a": 1, "b": 2}
    assert flags["--x"].source == "recipe + line"
    outcomes = [outcome for _, outcome in flags.history("--x")]
    assert outcomes == ["wins", "merged", "overruled", "overruled"]
    found = flags.origin("--x", "a")
    assert found is not None and found.source == "recipe"
    assert flags.origin("--x", "c") is None


# --- what is refused typed is refused forced ---


def test_a_rules_backend_and_nibbles_linear_kernel_are_refused_with_both_sources() -> None:
    words = ("acme/x-NVFP4", "--target", "sm120", "--nvfp4-activations", "bf16")
    words = (*words, "--tensor-parallel-size", "8", "--num-gpus", "8", "--linear-kernel", "nibble")
    what = refused(*words).what
    assert "--linear-kernel" in what and "--linear-backend marlin (rule sm120-unaligned-k)" in what
    typed = refused(*words[:3], "--nvfp4-activations", "bf16", "--linear-kernel", "nibble",
                    "--linear-backend", "marlin").what  # fmt: skip
    assert "--linear-backend marlin (command line)" in typed


def test_a_rules_backend_and_nibbles_experts_are_refused_with_both_sources() -> None:
    error = refused(SUPER, "--target", "b200", "--moe-kernel", "nibble")
    assert error.code == ExitCode.CONFIG
    assert "NIBBLE_MOE_KERNEL=nibble (command line --moe-kernel)" in error.what
    assert "--moe-backend flashinfer_cutlass (rule nemotron-trtllm-moe)" in error.what


def test_a_users_kernel_wins_over_a_recipes_backend_and_says_so() -> None:
    assert plan(QWEN, "--target", "gb10").args["--moe-backend"].value == "marlin"
    found = plan(QWEN, "--target", "gb10", "--moe-kernel", "nibble")
    assert found.args["--moe-backend"].value == "auto"
    assert found.args["--moe-backend"].source == "command line --moe-kernel"
    assert any("in place of the recipe's marlin" in notice for notice in found.notices)
    typed = refused(QWEN, "--target", "gb10", "--moe-kernel", "nibble", "--moe-backend", "marlin")
    assert "name two kernels" in typed.what


# --- plan --explain ---


def test_explain_shows_each_layer_that_sets_a_flag_and_which_wins() -> None:
    rows = explained(QWEN, "--target", "gb10", "--max-num-seqs", "4", "--explain", "--max-num-seqs",
                     MAX_NUM_SEQS="6")  # fmt: skip
    assert [(row["layer"], row["value"], row["outcome"]) for row in rows] == [
        ("command line", 4, "wins"),
        ("environment", "6", "overruled"),
        ("recipe", 8, "overruled"),
        ("target", 8, "overruled"),
    ]


@pytest.mark.parametrize("name", ["--max-num-seqs", "MAX_NUM_SEQS", "max_num_seqs"])
def test_explain_takes_a_flag_a_variable_and_its_plain_name(name: str) -> None:
    assert explained(QWEN, "--target", "gb10", f"--explain={name}")[0]["source"] == "recipe"


def test_explain_shows_the_user_where_a_port_comes_from() -> None:
    rows = explained("nibble-demo-nvfp4", "--port", "9001", "--explain", "PORT", PORT="9000")
    assert [(row["value"], row["outcome"]) for row in rows[:2]] == [
        (9001, "wins"),
        ("9000", "overruled"),
    ]


def test_explain_of_a_cap_shows_the_users_value_and_the_limit() -> None:
    rows = explained(QWEN, "--target", "gb10", "--explain", "GPU_MEMORY_UTIL",
                     GPU_MEMORY_UTIL="0.99")  # fmt: skip
    assert ("environment", "0.99") in [(row["layer"], str(row["value"])) for row in rows]


def test_explain_names_the_nearest_flag_for_an_unknown_one() -> None:
    with pytest.raises(NibbleError) as caught:
        explained(QWEN, "--explain", "--max-num-seq")
    assert caught.value.code == ExitCode.USAGE and "--max-num-seqs" in caught.value.action


def test_explain_without_a_name_says_what_to_write() -> None:
    with pytest.raises(NibbleError) as caught:
        CliRunner().invoke(app, ["plan", QWEN, "--explain"], catch_exceptions=False)
    assert caught.value.action == "write --explain --max-num-seqs"

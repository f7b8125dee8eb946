"""Snapshot and recipes against the vLLM that is installed: its own tables, and its own parser."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys

import pytest

from nibble.engine.live_schema import drift, live_schema
from nibble.engine.schema import Schema, load_schema
from nibble.machine.paths import root
from nibble.recipes.lint import lint
from nibble.recipes.recipe import Problem

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MORE = "recipes/org/model.toml"
BAD = """
[model]
id = "org/model"
revision = ""
source = "a report"
"""


@pytest.fixture(scope="module")
def installed() -> tuple[Schema, list[str | None]]:
    argvs = [
        [
            "org/model",
            "--speculative-config",
            json.dumps({"method": "mtp"}),
            "--max-model-len",
            "64k",
        ],
        ["org/model", "--kv-cache-dtype", "fp9"],
        ["org/model", "--attention-config", json.dumps({"use_fp4_indexer_cache": True})],
    ]
    return live_schema(sys.executable, argvs)


def test_snapshot_is_what_the_installed_vllm_says(
    installed: tuple[Schema, list[str | None]],
) -> None:
    assert drift(load_schema(), installed[0]) == []


def test_vllms_own_parser_answers_for_each_command(
    installed: tuple[Schema, list[str | None]],
) -> None:
    fine, choice, nested = installed[1]
    assert fine is None
    assert choice is not None
    assert "fp9" in choice
    assert nested is not None
    assert "use_fp4_indexer_cache" in nested


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> list[Problem]:
    """Of all recipes and one more. live: every target and variant goes through vLLM's own
    make_arg_parser().parse_args.
    """
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(root() / "recipes", folder / "recipes")
    for name in ("benchmarks", "rules", "targets"):
        (folder / name).symlink_to(root() / name)
    (folder / MORE).parent.mkdir()
    # A bound of the field (gt=0) is in no table of ours; pydantic checks it while parsing.
    (folder / MORE).write_text(
        BAD + "[args]\nattention-config = { tokenspeed_mla_min_split_kv = 0 }\n"
    )
    return lint(folder, live=True)


def test_all_recipes_are_clean_and_vllm_parses_every_command_they_lead_to(
    problems: list[Problem],
) -> None:
    assert [problem.line() for problem in problems if problem.file != MORE] == []


def test_what_only_vllms_parser_knows_is_found(problems: list[Problem]) -> None:
    (found,) = (problem for problem in problems if problem.file == MORE)
    assert "vLLM's own parser refuses" in found.message

"""A plan's Hub ids become folders, and vLLM stays offline exactly when it can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.plan.files import fetch_files
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.models.tiny_model import write_model

OFFLINE = {"HOME": "/home/me", "HF_HUB_OFFLINE": "1"}


class Planned:
    """The second plan, once what the first names was fetched; `fetched` has (id, revision)."""

    def __init__(self, tmp_path: Path, model: str, *words: str, **environ: str) -> None:
        self.folder = write_model(tmp_path / "snapshot")
        self.fetched: list[tuple[str, str | None]] = []
        asked = read_wishes([model, "--target", "cpu", *words], {"HOME": "/home/me", **environ})
        is_local = model.startswith("/")
        first = plan_for(asked, None if is_local else lambda *_: (None, "unknown until pull"))
        local = fetch_files(first, None if is_local else self.folder, self._fetch)
        self.plan: Plan = plan_for(asked, None if is_local else self._found, local)

    def _fetch(self, model: str, revision: str | None, load_format: str = "auto") -> Path:
        self.fetched.append((model, revision))
        return Path("/cache") / model.replace("/", "--")

    def _found(self, model: str, revision: str | None) -> tuple[Checkpoint, str]:
        return read_checkpoint(model, revision, path=self.folder, environ=OFFLINE), ""

    @property
    def draft(self) -> Any:
        return self.plan.args["--speculative-config"].value


def test_the_model_becomes_its_folder_and_vllm_stays_offline(tmp_path: Path) -> None:
    found = Planned(tmp_path, "acme/big")
    assert found.plan.model == str(found.folder) == found.plan.argv()[1]
    assert found.plan.env["HF_HUB_OFFLINE"].value == "1"
    assert found.fetched == []


def test_a_local_model_changes_nothing(tmp_path: Path) -> None:
    mine = write_model(tmp_path / "mine")
    found = Planned(tmp_path, str(mine))
    assert (found.plan.model, found.fetched) == (str(mine), [])
    assert "HF_HUB_OFFLINE" not in found.plan.env


def test_a_draft_model_is_fetched_at_its_own_revision(tmp_path: Path) -> None:
    config = {"model": "acme/draft", "revision": "v2", "method": "eagle3"}
    found = Planned(tmp_path, "acme/big", "--speculative-config", json.dumps(config))
    assert found.fetched == [("acme/draft", "v2")]
    assert found.draft == config | {"model": "/cache/acme--draft"}
    assert found.plan.args["--speculative-config"].source == "command line"


def test_a_draft_that_is_the_model_itself_is_not_fetched_again(tmp_path: Path) -> None:
    found = Planned(tmp_path, "acme/big", "--speculative-config", '{"model": "acme/big"}')
    assert found.fetched == []
    assert found.draft["model"] == str(found.folder)


def test_a_draft_of_a_local_model_is_fetched_too(tmp_path: Path) -> None:
    mine = write_model(tmp_path / "mine")
    found = Planned(tmp_path, str(mine), "--speculative-config", '{"model": "acme/draft"}')
    assert found.fetched == [("acme/draft", None)]
    assert found.plan.env["HF_HUB_OFFLINE"].value == "1"


@pytest.mark.parametrize("config", [{"method": "ngram", "num_speculative_tokens": 2}])
def test_speculation_without_a_draft_model_fetches_nothing(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    found = Planned(tmp_path, "acme/big", "--speculative-config", json.dumps(config))
    assert found.fetched == []
    assert found.draft == config


def test_a_tokenizer_of_another_repository_is_fetched(tmp_path: Path) -> None:
    found = Planned(tmp_path, "acme/big", "--tokenizer", "acme/tokenizer")
    assert found.fetched == [("acme/tokenizer", None)]
    assert found.plan.args["--tokenizer"].value == "/cache/acme--tokenizer"


def test_vllm_may_ask_the_hub_for_adapters_only_it_can_read(tmp_path: Path) -> None:
    found = Planned(tmp_path, "acme/big", "--lora-modules", "sql=acme/lora")
    assert "HF_HUB_OFFLINE" not in found.plan.env


def test_a_user_who_wants_vllm_offline_gets_it(tmp_path: Path) -> None:
    settings = tmp_path / "nibble.toml"
    settings.write_text('[env]\nHF_HUB_OFFLINE = "1"\n')
    mine = write_model(tmp_path / "mine")
    words = ("--lora-modules", "sql=acme/lora")
    found = Planned(tmp_path, str(mine), *words, NIBBLE_CONFIG=str(settings))
    assert found.plan.env["HF_HUB_OFFLINE"].value == "1"
    assert found.plan.env["HF_HUB_OFFLINE"].source == str(settings)


def test_pinned_code_of_the_model_itself_keeps_vllm_offline(tmp_path: Path) -> None:
    words = ("--trust-remote-code", "--revision", "a" * 40)
    found = Planned(tmp_path, "acme/big", *words)
    assert found.plan.args["--code-revision"].value == "a" * 40
    assert found.plan.env["HF_HUB_OFFLINE"].value == "1"

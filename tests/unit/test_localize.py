"""A plan's Hub ids become folders, and vLLM stays offline exactly when it can."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from nibble.plan.files import localize
from nibble.plan.layers import Choice
from nibble.plan.plan import Plan

FOLDER = Path("/cache/snapshots/abc")


@dataclass(frozen=True)
class Asked:
    """Settings.model."""

    model: str


@dataclass(frozen=True)
class PlanParts:
    """The fields of a Plan that `localize` reads and replaces."""

    settings: Asked
    model: str
    args: dict[str, Choice] = field(default_factory=dict)
    env: dict[str, Choice] = field(default_factory=dict)


def run(
    folder: Path | None, model: str = "acme/big", env: Any = None, **args: Any
) -> tuple[Plan, list[tuple[str, str | None]]]:
    fetched: list[tuple[str, str | None]] = []

    def fetch(model: str, revision: str | None, load_format: str = "auto") -> Path:
        fetched.append((model, revision))
        return Path("/cache") / model.replace("/", "--")

    flags = {"--" + name.replace("_", "-"): Choice(value, "test") for name, value in args.items()}
    plan = PlanParts(Asked(model), model, flags, dict(env or {}))
    return localize(cast(Plan, plan), folder, fetch), fetched


def test_the_model_becomes_its_folder_and_vllm_stays_offline() -> None:
    plan, fetched = run(FOLDER)
    assert plan.model == str(FOLDER)
    assert plan.env["HF_HUB_OFFLINE"].value == "1"
    assert fetched == []


def test_a_local_model_changes_nothing() -> None:
    plan, fetched = run(None, "/models/mine")
    assert (plan.model, dict(plan.env), fetched) == ("/models/mine", {}, [])


def test_a_draft_model_is_fetched_at_its_own_revision() -> None:
    plan, fetched = run(
        FOLDER, speculative_config={"model": "acme/draft", "revision": "v2", "method": "eagle3"}
    )
    assert fetched == [("acme/draft", "v2")]
    config = plan.args["--speculative-config"].value
    assert config == {"model": "/cache/acme--draft", "revision": "v2", "method": "eagle3"}


def test_a_draft_that_is_the_model_itself_is_not_fetched_again() -> None:
    plan, fetched = run(FOLDER, speculative_config={"model": "acme/big"})
    assert fetched == []
    assert plan.args["--speculative-config"].value["model"] == str(FOLDER)


def test_a_draft_of_a_local_model_is_fetched_too() -> None:
    plan, fetched = run(None, "/models/mine", speculative_config={"model": "acme/draft"})
    assert fetched == [("acme/draft", None)]
    assert plan.env["HF_HUB_OFFLINE"].value == "1"


def test_speculation_without_a_model_of_its_own_fetches_nothing() -> None:
    for config in ({"method": "mtp", "num_speculative_tokens": 2}, {"model": "ngram"}):
        plan, fetched = run(FOLDER, speculative_config=config)
        assert fetched == []
        assert plan.args["--speculative-config"].value == config


def test_a_tokenizer_of_another_repository_is_fetched() -> None:
    plan, fetched = run(FOLDER, tokenizer="acme/tokenizer")
    assert fetched == [("acme/tokenizer", None)]
    assert plan.args["--tokenizer"].value == "/cache/acme--tokenizer"


def test_vllm_may_ask_the_hub_for_adapters_only_it_can_read() -> None:
    offline = Choice("1", "nibble's default")
    plan, _ = run(FOLDER, env={"HF_HUB_OFFLINE": offline}, lora_modules=["sql=acme/lora"])
    assert "HF_HUB_OFFLINE" not in plan.env


def test_a_user_who_wants_vllm_offline_gets_it() -> None:
    wanted = Choice("1", "/home/me/nibble.toml")
    plan, _ = run(
        None, "/models/mine", env={"HF_HUB_OFFLINE": wanted}, lora_modules=["sql=acme/lora"]
    )
    assert plan.env["HF_HUB_OFFLINE"] == wanted


def test_pinned_code_of_the_model_itself_keeps_vllm_offline() -> None:
    plan, _ = run(FOLDER, trust_remote_code=True, code_revision="a" * 40)
    assert plan.env["HF_HUB_OFFLINE"].value == "1"

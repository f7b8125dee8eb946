"""Fetches draft and tokenizer of a plan, so that vLLM needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from nibble.plan.environment import on_hub
from nibble.plan.inputs import LocalFiles
from nibble.plan.plan import Plan


class Fetch(Protocol):
    """Fetches a model: (id, revision, vLLM's load format) -> its folder."""

    def __call__(self, model: str, revision: str | None, load_format: str = "auto") -> Path: ...


def fetch_files(plan: Plan, folder: Path | None, fetch: Fetch) -> LocalFiles:
    """Fetch a draft and a tokenizer that are on the Hub; their folders, as inputs of the next plan.

    `folder` is the model's, None if the model is a local folder already.
    """
    folders: dict[str, Path] = {}
    names = on_hub(plan.args)
    if (name := names.get("--speculative-config")) is not None:
        draft = plan.args["--speculative-config"].value
        if folder is not None and name == plan.settings.model:
            folders[name] = folder
        else:
            folders[name] = fetch(name, draft.get("revision"))
    if (name := names.get("--tokenizer")) is not None:
        folders[name] = fetch(name, None)
    return LocalFiles(folder, folders)

"""Replaces Hub ids in a plan by folders on this disk: vLLM then needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from nibble.plan.environment import on_hub
from nibble.plan.inputs import LocalFiles
from nibble.plan.plan import Plan


class Fetch(Protocol):
    """Brings a model to this disk: (id, revision, vLLM's load format) -> its folder."""

    def __call__(self, model: str, revision: str | None, load_format: str = "auto") -> Path: ...


def fetch_files(plan: Plan, folder: Path | None, fetch: Fetch) -> LocalFiles:
    """`folder` (None: the model is local already), and the folders of a draft and a tokenizer.

    They are ingredients of the next plan.
    """
    others: dict[str, Path] = {}
    names = on_hub(plan.args)
    if (name := names.get("--speculative-config")) is not None:
        draft = plan.args["--speculative-config"].value
        if folder is not None and name == plan.settings.model:
            others[name] = folder
        else:
            others[name] = fetch(name, draft.get("revision"))
    if (name := names.get("--tokenizer")) is not None:
        others[name] = fetch(name, None)
    return LocalFiles(folder, others)

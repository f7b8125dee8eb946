"""Hub ids of a plan become folders on this disk: vLLM needs no network and fetches no second
copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nibble.hub.access import is_model_id
from nibble.plan.layers import Choice
from nibble.plan.plan import Plan, may_need_the_hub


class Fetch(Protocol):
    """Brings a model to this disk: (id, revision, vLLM's load format) -> its folder."""

    def __call__(self, model: str, revision: str | None, load_format: str = "auto") -> Path: ...


OFFLINE = Choice("1", "nibble's default", "everything this plan needs was fetched and verified")


def localize(plan: Plan, folder: Path | None, fetch: Fetch) -> Plan:
    """`plan` with `folder` (None: the model is local already) as its model, draft and tokenizer
    fetched too.

    vLLM is told to stay offline when anything came from the Hub and nothing else may have to.
    """
    args, on_hub = dict(plan.args), beside_the_model(plan.args)
    if (name := on_hub.get("--speculative-config")) is not None:
        draft = args["--speculative-config"]
        path = (
            folder
            if folder and name == plan.settings.model
            else fetch(name, draft.value.get("revision"))
        )
        args["--speculative-config"] = replace(draft, value={**draft.value, "model": str(path)})
    if (name := on_hub.get("--tokenizer")) is not None:
        args["--tokenizer"] = replace(args["--tokenizer"], value=str(fetch(name, None)))
    fetched = folder is not None or bool(on_hub)
    env = {
        name: choice
        for name, choice in plan.env.items()
        if name != "HF_HUB_OFFLINE" or choice.source != OFFLINE.source
    }
    if fetched and not may_need_the_hub(args):
        env["HF_HUB_OFFLINE"] = OFFLINE
    return replace(plan, model=str(folder) if folder else plan.model, args=args, env=env)


def beside_the_model(args: Mapping[str, Choice]) -> dict[str, str]:
    """Flag -> Hub id, of draft and tokenizer where they are on the Hub."""
    values: dict[str, Any] = {name: choice.value for name, choice in args.items()}
    config = values.get("--speculative-config")
    names = {
        "--speculative-config": (
            str(config.get("model") or "") if isinstance(config, Mapping) else ""
        ),
        "--tokenizer": str(values.get("--tokenizer") or ""),
    }
    return {flag: name for flag, name in names.items() if _is_on_hub(name)}


def _is_on_hub(name: str) -> bool:
    # A draft may also be the name of a method, such as ngram; ids of models have an organisation.
    return "/" in name and is_model_id(name) and not Path(name).is_dir()

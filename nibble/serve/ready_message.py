"""The lines for the user when the server is ready: address, a command to paste, the key's file.
Pure.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from nibble.machine.paths import demo_models
from nibble.plan.budget import DecodeBound
from nibble.serve.api_key import KeyDecision

QUESTION = "What is the capital of France?"
DEMO_QUESTION = "What is NVFP4?"  # the embedded demos know a handful of answers


def ready_lines(
    url: str,
    names: Sequence[str],
    generates: bool,
    key: KeyDecision,
    seconds: float,
    facts: Mapping[str, float],
    on_terminal: bool,
) -> list[str]:
    """Lines for the user. `url` is the server's base as this machine reaches it; `facts` as
    PhaseReader collects them.

    A key is shown only on a terminal and only when this start made it; otherwise its file is named.
    """
    lines = [f"ready in {seconds:.1f} s: {url}/v1"]
    if numbers := describe_facts(facts):
        lines.append(f"serving {', '.join(names)}: {numbers}")
    else:
        lines.append(f"serving {', '.join(names)}")
    # The gate's page, not the control port's: a container publishes the API's port only.
    lines.append(f"status page: {url}/nibble")
    lines += key_lines(key, on_terminal)
    lines.append(f"try: {curl(url, names, generates, key)}")
    return lines


def describe_facts(facts: Mapping[str, float]) -> str:
    """Numbers from the engine's log, in words; empty if the log has none."""
    parts = []
    weights = facts.get("weights_gib") or facts.get("checkpoint_gib")
    if weights:
        parts.append(f"{weights:.2f} GiB of weights")
    if tokens := facts.get("kv_cache_tokens"):
        room = f" ({facts['kv_cache_gib']:.2f} GiB)" if "kv_cache_gib" in facts else ""
        parts.append(f"KV cache for {tokens:,.0f} tokens{room}")
    if graphs := facts.get("graphs_gib"):
        parts.append(f"{graphs:.2f} GiB of CUDA graphs")
    if rate := facts.get("tokens_per_s"):
        limit = facts.get("bound_tokens_per_s")
        bound = f" (the plan's bound: {limit:.1f})" if limit else ""
        parts.append(f"{rate:.1f} tokens/s for one sequence{bound}")
    return ", ".join(parts)


def reached(tokens_per_s: float | None, bound: DecodeBound) -> dict[str, float]:
    """Facts: the decode speed that a start measured, and the plan's bound of it."""
    if tokens_per_s is None:
        return {}
    limit = {"bound_tokens_per_s": bound.tokens_per_s} if bound.tokens_per_s else {}
    return {"tokens_per_s": tokens_per_s, **limit}


def key_lines(key: KeyDecision, on_terminal: bool) -> list[str]:
    """The place of the key, if the server requires one."""
    if key.key is None:
        return [] if key.source == "loopback" else [f"clients need no key: {key.reason}"]
    if key.path is None:
        return ["clients need the key of NIBBLE_API_KEY"]
    lines = [f"clients need the key in {key.path} ({key.reason})"]
    if key.source == "generated" and on_terminal:
        lines.append(f"the key, shown only once: {key.key}")
    return lines


def curl(url: str, names: Sequence[str], generates: bool, key: KeyDecision) -> str:
    """A command to paste; it works if its shell can reach the key."""
    words = ["curl", "-s", f"{url}/v1/chat/completions" if generates else f"{url}/v1/models"]
    line = shlex.join(words)
    if key.key is not None:
        line += f' -H "Authorization: Bearer {_key_in_shell(key.path)}"'
    if generates:
        name = "default" if "default" in names else names[0]
        question = DEMO_QUESTION if demo_models().keys() & set(names) else QUESTION
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": question}]})
        line += f" -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return line


def _key_in_shell(path: Path | None) -> str:
    return "$NIBBLE_API_KEY" if path is None else f"$(cat {shlex.quote(str(path))})"

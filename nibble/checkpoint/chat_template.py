"""Reads the chat template of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGEST_BYTES = 1 << 20  # a template has some kilobytes; tokenizer_config.json may have more


def chat_template(folder: Path) -> str:
    """The template with which vLLM renders a conversation with tools; empty if there is none."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _stated(folder / name)
        if isinstance(found, list):  # several, by name (transformers tokenization_utils_base.py)
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("tool_use") or named.get("default")
        if isinstance(found, str):
            return found
    return ""


def _stated(file: Path) -> Any:
    try:
        if file.stat().st_size > LARGEST_BYTES:
            return None
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return content.get("chat_template") if isinstance(content, dict) else None

"""What a tree's code logs, in place of vLLM's logger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Messages(list[str]):
    """Every message of every level, in order; `given` puts it in place of vLLM's loggers
    (probes.support.syntax.Sources).
    """

    @property
    def given(self) -> dict[str, Any]:
        """For `Sources(tree, messages.given)`."""
        return {"vllm.logger": SimpleNamespace(init_logger=lambda *_: _Logger(self))}


class _Logger:
    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def __getattr__(self, level: str) -> Any:
        return lambda message, *arguments, **_: self._messages.append(
            message % arguments if arguments else message
        )

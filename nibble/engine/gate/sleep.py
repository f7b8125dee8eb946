"""Puts vLLM's engine to sleep and wakes it, for the server of several models alone.

vLLM has routes for this with VLLM_SERVER_DEV_MODE only, which opens routes that run any code. The
gate is in the API process, so it asks the engine's client, as those routes do.
"""

from __future__ import annotations

from typing import Any

SLEEP_PATH, WAKE_PATH = "/nibble/engine/sleep", "/nibble/engine/wake"
ENGINE_PATHS = frozenset({SLEEP_PATH, WAKE_PATH})
_LEVEL = 1  # the weights move to host memory; the KV cache is dropped


async def sleep_or_wake(app: Any, path: str) -> str:
    """Do what `path` says; empty, or why it failed (vllm 0.32 v1/engine/async_llm.py:1154)."""
    try:
        client = app.state.engine_client
        if path == SLEEP_PATH:
            await client.sleep(_LEVEL)
        elif not await client.wake_up():
            return "a part of the engine still sleeps"
    except Exception as error:  # whatever it is: the caller then ends the engine
        return f"{type(error).__name__}: {error}"
    return ""

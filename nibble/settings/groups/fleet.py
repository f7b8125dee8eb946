"""Several models behind one port."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from nibble.settings.declare import option


class FleetOptions(BaseModel):
    """The group `Several models`."""

    loading: Literal["together", "on-demand"] = option(
        "together",
        "Several models",
        "Loading of several models: `together` loads all at the start and keeps them; `on-demand`"
        " loads a model at its first request and unloads the least used for it.",
        "NIBBLE_LOADING",
        flag="--loading",
        expected="together or on-demand",
    )
    unload: Literal["auto", "stop", "sleep"] = option(
        "auto",
        "Several models",
        "How a model gives up its memory for another: `stop` ends its engine; `sleep` keeps its"
        " weights in host memory, on GPUs with their own memory; `auto` is `sleep` where that is"
        " tested.",
        "NIBBLE_UNLOAD",
        flag="--unload",
        expected="auto, stop or sleep",
    )
    load_wait_seconds: int = option(
        900,
        "Several models",
        "Maximum seconds that a request waits for its model to load; above it, nibble answers 503.",
        "NIBBLE_LOAD_WAIT_SECONDS",
        flag="--load-wait-seconds",
        expected="a whole number of seconds from 1 to 86400",
        ge=1,
        le=86400,
    )
    max_waiting: int = option(
        256,
        "Several models",
        "Maximum requests that wait for one model to load; above it, nibble answers 503.",
        "NIBBLE_MAX_WAITING",
        flag="--max-waiting",
        expected="a whole number from 0 to 100000",
        ge=0,
        le=100000,
    )

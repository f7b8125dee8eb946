"""The operator library nibble::…: defines operators with plain torch code, and loads the wheel's
compiled kernels.

The torch code is registered for all devices. A compiled kernel is registered for one device and has
precedence there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_library = torch.library.Library("nibble", "FRAGMENT")


def operator(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define the operator nibble::<schema> and return a callable.

    reference: computes on devices without a compiled kernel; fake: gives the outputs' shapes.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibble::{name}", fake, lib=_library)
    load()
    return getattr(torch.ops.nibble, name).default


@functools.cache
def load() -> dict[str, str]:
    """Load the compiled libraries once. Returns device type -> "compiled" or the reason why not.

    Warns in one line if a device uses plain torch code.
    """
    states = {"cpu": _load("_cpu")}
    if torch.version.cuda:
        states["cuda"] = _load("_cuda")
    plain = [f"{device} ({state})" for device, state in states.items() if state != "compiled"]
    if plain:
        logger.warning("nibble-kernels: plain torch code, much slower, on %s", ", ".join(plain))
    return states


def _load(name: str) -> str:
    """The state of a library: "compiled", or the reason why not."""
    libraries = list(Path(__file__).parent.glob(f"{name}.*so"))
    if not libraries:
        return "not compiled when it was installed"
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:  # such as a torch before 2.11, or another processor
        return f"does not load: {error}".splitlines()[0]
    return "compiled"

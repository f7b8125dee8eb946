"""The operator library nibble::…: schemas and plain torch code from here, compiled kernels from the
wheel's libraries.

Compiled kernels are registered for one device and win there over the plain torch code, which is
registered for all.
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
    """Define nibble::<schema>, computed by `reference` where nothing compiled is registered;
    returns what calls it.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibble::{name}", fake, lib=_library)
    load()
    return getattr(torch.ops.nibble, name).default


@functools.cache
def load() -> dict[str, str]:
    """Load the compiled libraries once; device and what computes there. Warns in one line where
    plain torch code does.
    """
    found = {"cpu": _load("_cpu")}
    if torch.version.cuda:
        found["cuda"] = _load("_cuda")
    plain = [f"{device} ({reason})" for device, reason in found.items() if reason != "compiled"]
    if plain:
        logger.warning("nibble-kernels: plain torch code, much slower, on %s", ", ".join(plain))
    return found


def _load(name: str) -> str:
    """ "compiled", or why not."""
    libraries = list(Path(__file__).parent.glob(f"{name}.*so"))
    if not libraries:
        return "not compiled when it was installed"
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:  # another torch than 2.11 or later, or another processor
        return f"does not load: {error}".splitlines()[0]
    return "compiled"

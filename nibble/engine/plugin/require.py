"""What the plugin calls, reads or replaces in vLLM must be there as vLLM 0.32 has it, or loading
ends with its name.

A name that vLLM no longer looks up can be replaced all the same: nothing fails, and the fault that
the plugin corrects is back.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import FunctionType
from typing import Any

from nibble.engine.contract import VLLM_VERSION


class VllmMismatch(RuntimeError):
    """A vLLM that lacks what the plugin needs."""


def required(owner: Any, name: str, *parameters: str) -> Any:
    """`owner.name`. `parameters`, where they are given, are those that a function must have: in
    this order, and no other without a default.

    Raises VllmMismatch.
    """
    try:
        found = getattr(owner, name)
    except AttributeError:
        raise _mismatch(f"has no {_called(owner)}.{name}") from None
    if parameters and not _takes(found, parameters):
        signature = f"{name}{inspect.signature(found)}"
        raise _mismatch(f"has {_called(owner)}.{signature}", f"({', '.join(parameters)})")
    return found


def replace(owner: Any, name: str, by: Any, *parameters: str) -> Any:
    """Put `by` in the place of `owner.name`, which must be as `required` wants it; returns what
    was there. Raises VllmMismatch.
    """
    found = required(owner, name, *parameters)
    setattr(owner, name, by)
    return found


def required_of_instances(owner: type, *names: str) -> None:
    """Objects of a class must have these attributes: declared, or set by one of its methods.
    Raises VllmMismatch.
    """
    for name in names:
        if not hasattr(owner, name) and not any(_gives(one, name) for one in owner.__mro__):
            raise _mismatch(f"gives no {name} to objects of {_called(owner)}")


@contextmanager
def names_of_vllm() -> Iterator[None]:
    """Imports within it that fail end with VllmMismatch, too."""
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        raise _mismatch(f"lacks what the plugin imports: {error}") from error


def _takes(function: Callable[..., Any], names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    in_order = iter([one.name for one in parameters])
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {
        one.name for one in parameters if one.default is one.empty and one.kind not in variable
    }
    return all(name in in_order for name in names) and needed <= set(names)


def _gives(owner: type, name: str) -> bool:
    """Whether a class declares an attribute of its objects, or one of its methods sets it."""
    if name in vars(owner).get("__annotations__", ()):
        return True
    methods = (inspect.unwrap(one) for one in vars(owner).values() if isinstance(one, FunctionType))
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for method in methods
        if name in method.__code__.co_names
        for step in dis.get_instructions(method)
    )


def _called(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _mismatch(what: str, expected: str = "") -> VllmMismatch:
    try:
        installed = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        installed = "of an unknown version"
    wanted = f"{expected} of vLLM {VLLM_VERSION}" if expected else f"vLLM {VLLM_VERSION}"
    return VllmMismatch(
        f"vLLM {installed} {what}, which nibble's plugin needs; expected {wanted}; install that"
        " version (`make setup` does)"
    )

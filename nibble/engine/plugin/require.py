"""Checks that vLLM has the names and signatures of vLLM 0.32 that the plugin uses.

A missing name ends loading with an error. Without the check, Python would replace a name that vLLM
no longer uses: nothing would fail, and the defect that the plugin fixes would be back.
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
    """The installed vLLM lacks a name or signature that the plugin needs."""


def required(owner: Any, name: str, *parameters: str) -> Any:
    """The attribute `owner.name`. Raises VllmMismatch.

    parameters: a function must have these, in this order, and no others without a default.
    """
    try:
        value = getattr(owner, name)
    except AttributeError:
        raise _mismatch(f"has no {_qualified_name(owner)}.{name}") from None
    if parameters and not _takes(value, parameters):
        signature = f"{name}{inspect.signature(value)}"
        raise _mismatch(f"has {_qualified_name(owner)}.{signature}", f"({', '.join(parameters)})")
    return value


def replace(owner: Any, name: str, replacement: Any, *parameters: str) -> Any:
    """Replace `owner.name` and return the original, which is checked as in `required`.

    Raises VllmMismatch.
    """
    original = required(owner, name, *parameters)
    setattr(owner, name, replacement)
    return original


def required_of_instances(owner: type, *names: str) -> None:
    """Check that objects of a class have these attributes: declared, or set by a method.

    Raises VllmMismatch.
    """
    for name in names:
        if not hasattr(owner, name) and not any(_sets(base, name) for base in owner.__mro__):
            raise _mismatch(f"gives no {name} to objects of {_qualified_name(owner)}")


@contextmanager
def names_of_vllm() -> Iterator[None]:
    """A context in which a failed import from vLLM raises VllmMismatch."""
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        raise _mismatch(f"lacks what the plugin imports: {error}") from error


def _takes(function: Callable[..., Any], names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    in_order = iter([each.name for each in parameters])  # `in` below consumes it up to a match
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    without_default = {
        each.name for each in parameters if each.default is each.empty and each.kind not in variable
    }
    return all(name in in_order for name in names) and without_default <= set(names)


def _sets(owner: type, name: str) -> bool:
    """Whether a class declares an attribute of its objects, or one of its methods sets it."""
    if name in vars(owner).get("__annotations__", ()):
        return True
    functions = (value for value in vars(owner).values() if isinstance(value, FunctionType))
    methods = map(inspect.unwrap, functions)
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for method in methods
        if name in method.__code__.co_names
        for step in dis.get_instructions(method)
    )


def _qualified_name(owner: Any) -> str:
    if inspect.ismodule(owner):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def _mismatch(problem: str, expected: str = "") -> VllmMismatch:
    try:
        installed = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        installed = "of an unknown version"
    wanted = f"{expected} of vLLM {VLLM_VERSION}" if expected else f"vLLM {VLLM_VERSION}"
    return VllmMismatch(
        f"vLLM {installed} {problem}, which nibble's plugin needs; expected {wanted}; install that"
        " version (`make setup` does)"
    )

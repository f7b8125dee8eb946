"""Describes the vLLM that runs this file: flags, config keys, variables, backends, parsers.

Run as a script by the interpreter that has vLLM (`python -P introspect.py OUT.json [ARGVS.json]`;
-P because this folder's module names would shadow vLLM's imports), so that nothing else imports
vllm and so that another interpreter's vLLM can be described too: stdlib and vllm only. With
ARGVS.json (a list of argument lists) vLLM's own parser also parses each list and the refusals are
written.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import sys
import types
import typing
from pathlib import Path
from typing import Any

# What a platform other than the one that runs this adds: vllm 0.32 arg_utils.py:1534 appends the
# device type.
PLATFORM_CHOICES = {"mm-processor-device": ["cuda"]}
MOE_ORACLES = ("nvfp4", "mxfp4", "fp8", "unquantized")
MISSING_MODULE = (
    "vllm lacks the module that nibble reads; correct its name in nibble/engine/introspect.py"
)


def serve_parser() -> Any:
    """vLLM's own parser of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # The module moved between versions: vllm 0.33 entrypoints/common/cli_args.py, 0.32
    # launchers/cli_args.py, before that openai/cli_args.py.
    for folder in ("launchers", "common", "openai"):
        name = f"vllm.entrypoints.{folder}.cli_args"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
            continue
        return module.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    raise SystemExit(MISSING_MODULE)


# --- types -> specs


class ClassTable:
    """Config classes found while walking annotations; each becomes one entry of the snapshot."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}

    def add(self, cls: type) -> str:
        if cls.__name__ not in self.entries:
            self.entries[cls.__name__] = {}  # first, because classes may refer to themselves
            self.entries[cls.__name__] = self._describe(cls)
        return cls.__name__

    def _describe(self, cls: Any) -> dict[str, Any]:
        fields = getattr(cls, "__pydantic_fields__", None) or {}
        namespace = {**vars(sys.modules[cls.__module__]), **config_namespace()}
        hints = {name: resolve(hint, namespace) for name, hint in all_annotations(cls).items()}
        settable = [
            f.name for f in dataclasses.fields(cls) if f.init and is_settable(fields.get(f.name), f)
        ]
        before = before_validated(cls)
        described = {}
        for name in settable:
            spec = type_spec(hints.get(name, Any), self)
            # A before-validator accepts more forms than the annotation says: its type is not
            # checked.
            described[name] = {**spec, "type": "any"} if name in before or "*" in before else spec
        open_keys = (getattr(cls, "__pydantic_config__", None) or {}).get("extra") != "forbid"
        return {"open": True, "fields": described} if open_keys else {"fields": described}


def is_settable(field_info: Any, field: Any) -> bool:
    default = field.default
    return (
        getattr(field_info, "init", None) is not False
        and getattr(default, "init", None) is not False
    )


def before_validated(cls: Any) -> set[str]:
    decorators = getattr(cls, "__pydantic_decorators__", None)
    found: set[str] = set()
    for decorator in getattr(decorators, "field_validators", {}).values():
        if decorator.info.mode in ("before", "wrap", "plain"):
            found.update(decorator.info.fields)
    return found


def all_annotations(cls: type) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        merged.update(inspect.get_annotations(base))
    return merged


def config_namespace() -> dict[str, Any]:
    """Names that annotations under TYPE_CHECKING refer to; they live in vllm.config's modules."""
    import vllm.config

    names: dict[str, Any] = {}
    for info in pkgutil.iter_modules(vllm.config.__path__):
        names.update(vars(importlib.import_module(f"vllm.config.{info.name}")))
    return names


def resolve(hint: Any, namespace: dict[str, Any]) -> Any:
    """The annotation itself; an annotation that cannot be resolved accepts anything."""
    if isinstance(hint, typing.ForwardRef):
        hint = hint.__forward_arg__
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, dict(namespace))
    except (NameError, TypeError, SyntaxError, AttributeError):
        return Any


def type_spec(hint: Any, classes: ClassTable) -> dict[str, Any]:
    """{"type": "int|null", "choices": [...], "class": name, "items": spec, "values": spec}; empty
    keys left out.
    """
    origin = typing.get_origin(hint)
    if hint is None or hint is type(None):
        return {"type": "null"}
    if origin is typing.Annotated:
        inner, *marks = typing.get_args(hint)
        # Fields that vLLM fills in itself (SpeculativeConfig.target_model_config) are not worth
        # describing.
        return (
            {"type": "any"}
            if any("SkipValidation" in repr(m) for m in marks)
            else type_spec(inner, classes)
        )
    if origin is typing.Literal:
        return literal_spec(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return union_spec([type_spec(arg, classes) for arg in typing.get_args(hint)])
    if origin in (list, tuple, set, frozenset) or hint in (list, tuple, set):
        return with_part("list", "items", typing.get_args(hint)[:1], classes)
    if origin is dict or hint is dict:
        return with_part("dict", "values", typing.get_args(hint)[1:2], classes)
    if isinstance(hint, type):
        return class_spec(hint, classes)
    return {"type": "any"}


def in_order(values: typing.Iterable[Any]) -> list[Any]:
    return sorted(set(values), key=lambda v: (isinstance(v, str), v))


def with_part(kind: str, part: str, args: tuple[Any, ...], classes: ClassTable) -> dict[str, Any]:
    inner = type_spec(args[0], classes) if args else {"type": "any"}
    return {"type": kind} if inner == {"type": "any"} else {"type": kind, part: inner}


def literal_spec(values: tuple[Any, ...]) -> dict[str, Any]:
    flat = [v for v in values if v is not None]
    kinds = {json_type(type(v)) for v in flat} | ({"null"} if None in values else set())
    return {"type": "|".join(sorted(kinds)), "choices": in_order(flat)}


def class_spec(hint: type, classes: ClassTable) -> dict[str, Any]:
    if issubclass(hint, enum.Enum):
        names = {m.name for m in hint} | {m.value for m in hint if is_choice(m.value)}
        return {"type": "any", "choices": in_order(names), "nocase": True}
    if dataclasses.is_dataclass(hint):
        return {"type": "dict", "class": classes.add(hint)}
    return {"type": json_type(hint)}


def is_choice(value: Any) -> bool:
    # An attention backend's value is its import path, which users do not type.
    return isinstance(value, int) or (isinstance(value, str) and bool(value) and "." not in value)


def json_type(kind: type) -> str:
    return {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list"}.get(
        kind, "any"
    )


def union_spec(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {
        "type": "|".join(sorted({t for p in parts for t in p["type"].split("|")}))
    }
    for part in parts:
        for key, value in part.items():
            if key == "choices":
                merged[key] = in_order({*merged.get(key, []), *value})
            elif key != "type":
                merged.setdefault(key, value)
    has_free_text = any(p["type"] == "str" and "choices" not in p for p in parts)
    return {**merged, "free": True} if has_free_text and "choices" in merged else merged


# --- flags


def describe_flags(parser: Any, classes: ClassTable) -> dict[str, dict[str, Any]]:
    hints = engine_hints()
    flags: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        longs = [o for o in action.option_strings if o.startswith("--")]
        if not longs or action.dest == "help":
            continue
        name = longs[0][2:]
        flags[name] = describe_action(action, hints.get(action.dest, Any), classes)
        if choices := [*flags[name].get("choices", []), *PLATFORM_CHOICES.get(name, [])]:
            flags[name]["choices"] = in_order(choices)
    for name, values in registries().items():
        if name in flags:
            flags[name] = {**flags[name], "choices": in_order(values)}
    # The parser itself rewrites -O2 and "-O 2" (vllm 0.32 argparse_utils.py, parse_args); argparse
    # never sees them.
    flags["optimization-level"]["options"].append("-O")
    return dict(sorted(flags.items()))


def engine_hints() -> dict[str, Any]:
    """Engine argument -> its annotation; two dicts of EngineArgs are checked later against a class
    of VllmConfig.
    """
    from vllm.config import VllmConfig
    from vllm.engine import arg_utils

    namespace = {**config_namespace(), **vars(arg_utils)}
    hints = {
        n: resolve(h, namespace) for n, h in all_annotations(arg_utils.AsyncEngineArgs).items()
    }
    for name, hint in all_annotations(VllmConfig).items():
        if name in hints and name.endswith("_config"):
            hints[name] = resolve(hint, namespace)
    return hints


def describe_action(action: argparse.Action, hint: Any, classes: ClassTable) -> dict[str, Any]:
    # --no-X is said by the kind ("bool"); a flag without that form is a "switch".
    options = [o for o in action.option_strings if not o.startswith("--no-")]
    spec: dict[str, Any] = {"options": options, "kind": action_kind(action)}
    if action.nargs is not None and spec["kind"] not in ("bool", "switch"):
        spec["nargs"] = action.nargs
    converters = type_chain(action.type)
    if any(c in ("human_readable_int", "human_readable_int_or_auto") for c in converters):
        spec["suffix"] = True  # 1k, 2M, 80G (vllm 0.32 argparse_utils.py:29)
    if "human_readable_int_or_auto" in converters:
        spec["words"] = ["auto"]
    if choices := [c for c in action.choices or [] if c is not None]:
        spec["choices"] = choices
        spec |= {"nocase": True} if ignores_case(action, choices) else {}
    if (json_default := plain(action.default)) is not None:
        spec["default"] = json_default
    return {**spec, **hinted(spec, type_spec(hint, classes))}


def hinted(spec: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """What the annotation says beyond the argparse action: a nested class, or the known values of a
    free text.
    """
    if spec["kind"] in ("json", "json-or-text"):
        return {"kind": "json", "class": described["class"]} if "class" in described else {}
    known = [c for c in described.get("choices", []) if isinstance(c, str)]
    if spec["kind"] == "str" and "choices" not in spec and known:
        return {k: v for k, v in {"choices": known, "nocase": described.get("nocase")}.items() if v}
    return {}


def action_kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if isinstance(action, (argparse._StoreTrueAction, argparse._StoreFalseAction)):
        return "switch"
    kinds = {"int": "int", "float": "float", "loads": "json", "parse_dataclass": "json"}
    kinds |= {
        "human_readable_int": "int",
        "human_readable_int_or_auto": "int",
        "union_dict_and_str": "json-or-text",
    }
    return next((kinds[name] for name in type_chain(action.type) if name in kinds), "str")


def type_chain(converter: Any) -> list[str]:
    """Names of an argparse `type` and of what it wraps (optional_type(parse_type(int)) -> [...,
    "int"]).
    """
    names: list[str] = []
    while converter is not None:
        names.append(getattr(converter, "__name__", ""))
        cells = [c.cell_contents for c in getattr(converter, "__closure__", None) or ()]
        converter = next((c for c in cells if callable(c)), None)
    return names


def ignores_case(action: argparse.Action, choices: list[Any]) -> bool:
    word = next((c for c in choices if isinstance(c, str) and c != c.upper()), None)
    if word is None or not callable(action.type):
        return False
    return action.type(word.upper()) == word


def plain(value: Any) -> Any:
    """A default that JSON can hold; None for the rest (objects, sets, SUPPRESS)."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value == argparse.SUPPRESS or value in ({}, [], ""):
        return None
    if isinstance(value, (bool, int, float, str)):
        return value
    return (
        value if isinstance(value, list) and all(isinstance(v, (int, str)) for v in value) else None
    )


def registries() -> dict[str, list[str]]:
    """Flag -> values that vLLM looks up in a registry after parsing."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backends = [member.name for member in AttentionBackendEnum]
    return {
        "attention-backend": [*backends, "auto"],
        "mm-encoder-attn-backend": backends,
        "quantization": list(QUANTIZATION_METHODS),
        "load-format": list(_LOAD_FORMAT_TO_MODEL_LOADER),
        "tokenizer-mode": [*TokenizerRegistry.tokenizers, "auto", "slow"],
        "reasoning-parser": reasoning_parsers(),
        "tool-call-parser": tool_parsers(),
        "optimization-level": ["0", "1", "2", "3"],
    }


def reasoning_parsers() -> list[str]:
    from vllm.reasoning import ReasoningParserManager

    return list(ReasoningParserManager.list_registered())


def tool_parsers() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


# --- kernels, environment


def moe_kernels() -> dict[str, list[str]]:
    """Scheme -> names vLLM logs for the MoE backend it chose (vllm 0.32
    fused_moe/oracle/nvfp4.py:242).
    """
    found = {}
    for scheme in MOE_ORACLES:
        module = importlib.import_module(f"vllm.model_executor.layers.fused_moe.oracle.{scheme}")
        named = (
            value for name, value in vars(module).items() if name.lower().endswith("moebackend")
        )
        enums = [
            value for value in named if isinstance(value, type) and issubclass(value, enum.Enum)
        ]
        found[scheme] = sorted({str(m.value) for cls in enums for m in cls if m.name != "NONE"})
    return found


def linear_kernels() -> list[str]:
    """Class names vLLM logs for the NVFP4 linear kernel it chose
    (kernels/linear/__init__.py:1240).
    """
    module = importlib.import_module("vllm.model_executor.kernels.linear")
    return sorted(
        n
        for n in vars(module)
        if "NvFp4" in n and n.endswith("LinearKernel") and n != "NvFp4LinearKernel"
    )


def describe() -> dict[str, Any]:
    import vllm
    import vllm.envs

    classes = ClassTable()
    flags = describe_flags(serve_parser(), classes)
    return {
        "vllm": vllm.__version__.split("+")[0],
        "flags": flags,
        "classes": dict(sorted(classes.entries.items())),
        "envs": sorted(vllm.envs.environment_variables),
        "moe_kernels": moe_kernels(),
        "linear_kernels": linear_kernels(),
    }


def refusals(argvs: list[list[str]]) -> list[str | None]:
    """For each argument list None, or why vLLM's own parser refuses it."""
    parser = serve_parser()
    answers: list[str | None] = []
    for argv in argvs:
        try:
            parser.exit_on_error = False
            parser.error = raise_refusal
            parser.parse_args(argv)
            answers.append(None)
        except Exception as error:  # any error of the parser is the answer
            answers.append(f"{type(error).__name__}: {error}")
    return answers


def raise_refusal(message: str) -> typing.NoReturn:
    raise ValueError(message)


def main(argv: list[str]) -> None:
    out = describe()
    if len(argv) > 1:
        out["refusals"] = refusals(json.loads(Path(argv[1]).read_text()))
    Path(argv[0]).write_text(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])

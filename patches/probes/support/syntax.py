"""Run one part of a tree's source: a definition is executed when it is first looked up, and nothing
else of its file is.

Releases older than the environment cannot be imported whole (0.15.1 wants gguf and another
transformers), a source archive has no compiled modules, and importing all of vLLM takes longer than
a probe should. What runs is still the tree's own text: functions keep their file and line, names
they use come from the tree's other files in the same way, and only what a probe names in `given` is
replaced. Packages other than vllm are imported as usual.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nibble.engine.patching.tree import Tree


class _QuietLogger:
    """Takes every message: vLLM's logger configures logging for a server when it is imported."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


LOGGER = {"vllm.logger": types.SimpleNamespace(init_logger=lambda *_: _QuietLogger())}


def parse(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def find(module: ast.Module, name: str) -> ast.AST | None:
    """A function, class or method (`Class.method`) of a file, or None."""
    scope: ast.AST = module
    for part in name.split("."):
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [
            n for n in getattr(scope, "body", []) if isinstance(n, definitions) and n.name == part
        ]
        if not found:
            return None
        scope = found[-1]
    return scope


class Sources:
    """The Python files of a tree as modules whose definitions are executed one at a time.

    `given` replaces modules ("vllm.envs") and names in them ("vllm.platforms.current_platform").
    """

    def __init__(self, tree: Tree, given: Mapping[str, Any] | None = None) -> None:
        self.root = tree.root
        self.given = {**LOGGER, **(given or {})}
        self.files: dict[str, _Names] = {}

    def load(self, name: str) -> Any:
        """A definition by its dotted name. Of a class member only that member is executed: a method
        comes as a plain function, without decorators and without super(), an attribute as its
        value. Raises LookupError where the tree has none.
        """
        module, rest = self._split(name)
        names = self.names(module)
        try:
            if len(rest) <= 1:
                return names[rest[0]] if rest else _Module(self, module)
            return names.member(rest)
        except KeyError:
            raise LookupError(f"{module} has no {'.'.join(rest)}") from None

    def has(self, name: str) -> bool:
        """Whether the tree has the module, function, class or method of a dotted name; nothing
        is executed.
        """
        try:
            module, rest = self._split(name)
        except LookupError:
            return False
        return not rest or find(parse(self._path(module)), ".".join(rest)) is not None

    def names(self, module: str) -> _Names:
        """The globals of a module of the tree."""
        if module not in self.files:
            self.files[module] = _Names(self, module, self._path(module))
        return self.files[module]

    def is_package(self, module: str) -> bool:
        """Whether the module is a folder."""
        return (self.root / module.replace(".", "/")).is_dir()

    def exists(self, module: str) -> bool:
        """Whether the tree has the module, or the probe gave one."""
        return module in self.given or self._file(module) is not None

    def _split(self, name: str) -> tuple[str, list[str]]:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            if self._file(module := ".".join(parts[:end])):
                return module, parts[end:]
        raise LookupError(f"the tree has no file for {name}")

    def _path(self, module: str) -> Path:
        path = self._file(module)
        if path is None:
            raise LookupError(f"the tree has no module {module}")
        return path

    def _file(self, module: str) -> Path | None:
        stem = self.root / module.replace(".", "/")
        return next(
            (p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None
        )


class _Names(dict[str, Any]):
    """The globals of one file. Function code looks names up here, and __missing__ executes the
    statement that binds one.
    """

    def __init__(self, sources: Sources, module: str, path: Path) -> None:
        # Dataclasses look their module up; the real name stays free for a real import.
        alias = f"tree:{module}"
        sys.modules[alias] = types.ModuleType(alias)
        super().__init__(__name__=alias, __file__=str(path))
        self.sources, self.module, self.path = sources, module, path
        self.package = module if sources.is_package(module) else module.rpartition(".")[0]
        self["__builtins__"] = {**vars(builtins), "__import__": self._import}
        self.syntax = _without_annotations(parse(path))
        self.statements: dict[str, ast.stmt] = {}
        for statement in self.syntax.body:
            for name in _bound(statement):
                self.statements[name] = statement

    def __missing__(self, name: str) -> Any:
        if (given := f"{self.module}.{name}") in self.sources.given:
            self[name] = self.sources.given[given]
            return self[name]
        if name not in self.statements:
            raise KeyError(name)
        statement = self.statements[name]
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            statement = _only(statement, name)
        for needed in _class_level_names(statement):  # a class body does not ask __missing__
            if needed in self.statements:
                self[needed]
        exec(self._compile(statement), self)
        for amendment in self.syntax.body:
            if _amended(amendment) == name:
                exec(self._compile(amendment), self)
        return self[name]

    def member(self, path: list[str]) -> Any:
        """A method or an attribute of a class of this file."""
        owner = find(self.syntax, ".".join(path[:-1]))
        for statement in reversed(getattr(owner, "body", [])):
            if path[-1] not in _bound(statement):
                continue
            if isinstance(statement, ast.FunctionDef):
                statement.decorator_list = []
                scope: dict[str, Any] = {}
                exec(self._compile(statement), self, scope)
                return scope[path[-1]]
            return eval(compile(ast.Expression(statement.value), str(self.path), "eval"), self)
        raise KeyError(path[-1])

    def _compile(self, statement: ast.stmt) -> types.CodeType:
        return compile(ast.Module([statement], type_ignores=[]), str(self.path), "exec")

    def _import(
        self,
        name: str,
        _globals: Any = None,
        _locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if level:
            parts = self.package.split(".")
            base = ".".join(parts[: len(parts) - level + 1])
            name = f"{base}.{name}" if name else base
        if name.partition(".")[0] == "vllm":
            return _Module(self.sources, name if fromlist else "vllm")
        module = importlib.import_module(name)
        return module if fromlist else importlib.import_module(name.partition(".")[0])


class _Module:
    """What `import vllm.…` gives to code that runs here."""

    def __init__(self, sources: Sources, name: str) -> None:
        self._sources, self._name = sources, name

    def __getattr__(self, attribute: str) -> Any:
        sources, dotted = self._sources, f"{self._name}.{attribute}"
        if self._name in sources.given:
            return getattr(sources.given[self._name], attribute)
        if dotted in sources.given:
            return sources.given[dotted]
        try:
            return sources.names(self._name)[attribute]
        except KeyError:
            if sources.exists(dotted):
                return _Module(sources, dotted)
            raise AttributeError(dotted) from None


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names a top-level statement binds; those under `if` and `try` belong to the whole of
    it.
    """
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (
                n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
            ):
                if isinstance(node.ctx, ast.Store):
                    yield node.id
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.If() | ast.Try():
            handlers = [s for h in getattr(statement, "handlers", []) for s in h.body]
            for inner in (*statement.body, *handlers, *statement.orelse):
                yield from _bound(inner)


def _amended(statement: ast.stmt) -> str | None:
    """X of a top-level `X.attribute = value`, which belongs to the definition of X."""
    match statement:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))]):
            return name
    return None


def _only(statement: ast.Import | ast.ImportFrom, name: str) -> ast.Import | ast.ImportFrom:
    """The import of one name of an import statement, so that the others stay unread."""
    wanted = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name]
    if isinstance(statement, ast.Import):
        return ast.copy_location(ast.Import(wanted), statement)
    return ast.copy_location(ast.ImportFrom(statement.module, wanted, statement.level), statement)


def _class_level_names(statement: ast.stmt) -> Iterator[str]:
    """Names that the body of a class reads, the bodies of its methods left out."""
    if not isinstance(statement, ast.ClassDef):
        return
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id != statement.name
        ):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending += [
                *node.decorator_list,
                *node.args.defaults,
                *[d for d in node.args.kw_defaults if d],
            ]
        else:
            pending += ast.iter_child_nodes(node)


def _without_annotations(module: ast.Module) -> ast.Module:
    """Functions without the types of their arguments: they would pull in most of the package."""
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
    return module


def python_files(root: Path, folder: str) -> tuple[Path, ...]:
    """The Python files below a folder of a tree."""
    return tuple(sorted((root / folder).rglob("*.py")))

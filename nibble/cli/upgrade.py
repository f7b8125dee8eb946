"""`nibble upgrade --check`: what a newer vLLM would change here, before anything is installed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nibble.cli.common import say
from nibble.engine.installed import vllm_version
from nibble.engine.live_schema import live_schema
from nibble.engine.patching.diff import DiffError, apply
from nibble.engine.patching.series import Series, load_series
from nibble.engine.patching.status import Line, look
from nibble.engine.patching.tree import Tree, open_tree
from nibble.engine.schema import Schema, load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.disk import write_problem
from nibble.machine.paths import root
from nibble.plan.gather import plan_for, read_wishes, with_default_model
from nibble.recipes.lint import all_command_lines, lint_for
from nibble.recipes.recipe import Problem

_VERSION = re.compile(r"\d+(\.\d+){1,3}([a-z]+\d+)?(\.post\d+)?")
_REQUIRES = re.compile(r"^Requires-Dist: (flashinfer-python==[^\s;]+)", re.MULTILINE)
_BROKEN_BY = re.compile(
    r"connection broken by '(\w+).*?(?:\[Errno -?\d+\] ([^'\"()]+))?['\")]*': /"
)
_OF_SERIES = "patch vllm/"
_MOST_SHOWN = 12
_SCRATCH, _LEFT_AFTER_S = "upgrade-", 3600.0


@dataclass(frozen=True)
class ModelChange:
    """What the newer vLLM makes of one model's plan: what it refuses, and defaults of flags that
    the plan leaves to vLLM.
    """

    model: str
    refusals: tuple[str, ...]
    defaults: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All findings. `patches` are rows that a patch fixes, with their state in the newer tree;
    `to_port` names the patches of those rows whose lines are not there any more.
    """

    installed: str
    newer: str
    to_port: tuple[str, ...]
    patches: tuple[Line, ...]
    others: tuple[Line, ...]
    recipes: tuple[Problem, ...]
    models: tuple[ModelChange, ...]

    @property
    def in_the_way(self) -> int:
        """Findings to resolve before an upgrade; a patch that still applies is not one."""
        found = [
            line
            for line in (*self.patches, *self.others)
            if not line.in_order and not self._still_applies(line)
        ]
        return len(found) + len(self.recipes) + sum(len(one.refusals) for one in self.models)

    def _still_applies(self, line: Line) -> bool:
        is_ours = line.word == "needed" and line.fix.startswith(_OF_SERIES)
        return is_ours and line.fix.removeprefix(_OF_SERIES) not in self.to_port

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self) | {"in_the_way": self.in_the_way}


def require_check(is_set: bool) -> None:
    """Raise USAGE without --check: an image or an environment is upgraded from outside."""
    if not is_set:
        raise NibbleError(
            ExitCode.USAGE,
            what="`nibble upgrade` only compares, and --check is missing",
            expected="`nibble upgrade --check`",
            action="add it; for the upgrade itself see docs/operations.md (Upgrading)",
        )


def check(
    models: Sequence[str], to: str | None, tree: Path | None, environ: Mapping[str, str]
) -> Report:
    """Compare the installed vLLM with `tree`, else with release `to` (None: the newest) of the
    package index. Raises VERIFY where that cannot be had.
    """
    if to is not None and not _VERSION.fullmatch(to):
        raise NibbleError(
            ExitCode.USAGE,
            what=f"--to is {to!r}",
            expected="a release of vLLM, such as 0.33.0",
            action="correct it",
        )
    plans = _plans(models, environ)
    with _newer_tree(to, tree, environ) as newer, tempfile.TemporaryDirectory() as scratch:
        say(f"vLLM {newer.version}: running the probes of every patch, which takes minutes")
        lines = look(newer)
        needed = {line.fix.removeprefix(_OF_SERIES) for line in lines if line.word == "needed"}
        to_port = unfit(load_series("vllm"), newer, needed)
        say("asking its parser about every recipe and plan")
        recipe_lines = all_command_lines(root())
        argvs = [argv for _, _, argv in recipe_lines] + [argv for _, argv in plans]
        overlay = _as_cpu_build(Path(scratch), newer.release)
        schema, refusals = live_schema(argvs=argvs, path=[overlay, newer.root])
        of_recipes, of_plans = refusals[: len(recipe_lines)], refusals[len(recipe_lines) :]
        recipes = lint_for(root(), schema, recipe_lines, of_recipes)
    old = load_schema()
    changes = [
        ModelChange(
            model,
            (refusal,) if refusal else (),
            tuple(changed_defaults(old, schema, argv)),
        )
        for (model, argv), refusal in zip(plans, of_plans, strict=True)
    ]
    return Report(
        vllm_version(),
        newer.version,
        tuple(to_port),
        tuple(line for line in lines if line.fix.startswith("patch ")),
        tuple(line for line in lines if not line.fix.startswith("patch ")),
        tuple(recipes),
        tuple(changes),
    )


def unfit(series: Series, tree: Tree, names: Collection[str]) -> list[str]:
    """Those of the named patches that do not apply to the tree, each after the ones before."""
    texts: dict[str, str] = {}
    found = []
    for patch in (patch for patch in series.patches if patch.name in names):
        try:
            for change in patch.changes:
                text = texts.get(change.path) or tree.text(change.path)
                texts[change.path] = apply(text, change)
        except (OSError, DiffError):
            found.append(patch.name)
    return found


def changed_defaults(old: Schema, new: Schema, argv: Sequence[str]) -> Iterator[str]:
    """Flags that `argv` does not set and whose default differs: the plan's silent changes."""
    given = {spec.name for word in argv if (spec := old.flag(word.partition("=")[0]))}
    for spec in old.flags():
        other = new.flag(spec.name)
        if spec.name not in given and other is not None and other.default != spec.default:
            yield f"{spec.name}: {spec.default!r} -> {other.default!r}"


def report_lines(report: Report) -> Iterator[str]:
    """The report for people."""
    yield f"vLLM {report.installed} -> {report.newer}"
    counts: dict[str, list[str]] = {}
    for line in report.patches:
        counts.setdefault(line.word, []).append(line.id)
    yield "patches  " + "; ".join(f"{len(ids)} {word}" for word, ids in counts.items())
    for word, ids in counts.items():
        yield f"         {word}: {', '.join(ids)}"
    if "needed" in counts:
        yield f"         to port, since their lines changed: {', '.join(report.to_port) or 'none'}"
    for line in report.others:
        if not line.in_order:
            yield f"         {line.id} {line.word}: {line.title}: {line.detail}"
    yield f"recipes  {len(report.recipes)} problem(s)"
    yield from _cut([f"         {problem.line()}" for problem in report.recipes])
    for model in report.models:
        yield f"plan     {model.model}: {'refused' if model.refusals else 'accepted'}"
        yield from (f"         {refusal}" for refusal in model.refusals)
        yield f"         {len(model.defaults)} defaults of vLLM differ"
        yield from _cut([f"         {default}" for default in model.defaults])
    if not report.in_the_way:
        yield "nothing is in the way of an upgrade"
        return
    yield f"{report.in_the_way} finding(s) to resolve before an upgrade"
    yield f"serve on with {report.installed}: a later nibble brings a newer vLLM with its patches"


def _cut(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_MOST_SHOWN]
    if len(lines) > _MOST_SHOWN:
        yield f"         and {len(lines) - _MOST_SHOWN} more (--json has all)"


def _plans(models: Sequence[str], environ: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """(model, argv after `serve`) of the named models, else of the running server, else of MODEL
    or the default.
    """
    if not models and (running := _of_running_server(environ)):
        return running
    found = []
    for name in models or ("",):
        asked = with_default_model(read_wishes([name] if name else [], environ))
        plan = plan_for(asked)
        found.append((str(plan.settings.model), plan.argv()[1:]))
    return found


def _of_running_server(environ: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    from nibble.cli.status import read_status

    try:
        status = read_status(environ)
    except NibbleError:
        return []
    plans = [status] if "plan" in status else status.get("models", [])
    return [
        (plan["served_names"][0], list(plan["command"][2:]))
        for one in plans
        if (plan := one.get("plan"))
    ]


@contextlib.contextmanager
def _newer_tree(to: str | None, tree: Path | None, environ: Mapping[str, str]) -> Iterator[Tree]:
    if tree is not None:
        yield open_tree(tree)
        return
    with scratch(environ) as folder:
        _unpack("vllm" if to is None else f"vllm=={to}", folder)
        found = next(folder.glob("tree/vllm-*.dist-info/METADATA"), None)
        if found and (required := flashinfer_of(found.read_text())):
            _unpack(required, folder)
        yield open_tree(folder / "tree")


@contextlib.contextmanager
def scratch(environ: Mapping[str, str]) -> Iterator[Path]:
    """A folder for 1.3 GB, removed afterwards: in nibble's cache, since a container's /tmp is
    memory. What a killed run left there goes first.
    """
    cache = read_wishes([], environ).cache
    for left in cache.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another run removes it too
            if time.time() - left.stat().st_mtime > _LEFT_AFTER_S:
                shutil.rmtree(left)
    place = None if write_problem(cache) else cache
    try:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=place) as scratch:
            yield Path(scratch)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NibbleError(
            ExitCode.NO_FIT,
            what=f"the newer vLLM cannot be written to {place or tempfile.gettempdir()}"
            f" ({error.strerror or error})",
            expected="1.3 GB of free disk",
            action="free some, or set NIBBLE_CACHE_DIR to a folder elsewhere",
        ) from None


def _unpack(requirement: str, folder: Path) -> None:
    """Unpack the wheel that pip would install."""
    say(f"downloading {requirement}")
    wheels = folder / "wheels"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--disable-pip-version-check", "--only-binary=:all:", "--dest", str(wheels)),
            requirement,
        ],
        env={**os.environ, "TMPDIR": str(folder)},  # pip writes what comes in there first
        capture_output=True,
        text=True,
        check=False,
    )
    wheel = next(wheels.glob("*.whl"), None)
    if done.returncode or wheel is None:
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise not_downloaded(requirement, done.stderr)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "tree")
    wheel.unlink()


def flashinfer_of(metadata: str) -> str | None:
    """The requirement of FlashInfer in a wheel's METADATA."""
    found = _REQUIRES.search(metadata)
    return found[1] if found else None


def not_downloaded(requirement: str, printed: str) -> NibbleError:
    """The error for what pip printed. Its last line names no cause where the index is out of
    reach.
    """
    tree = "name an unpacked wheel with --tree"
    if "CERTIFICATE_VERIFY_FAILED" in printed:
        why = "the certificate of the package index is not trusted"
        action = f"set PIP_CERT to the file of your CA's certificate, or {tree}"
    elif broken := _BROKEN_BY.findall(printed):
        kind, told = broken[-1]
        why = f"the package index does not answer ({told or kind})"
        action = f"check the network, HTTPS_PROXY and PIP_INDEX_URL, or {tree}"
    else:
        why = (printed.strip().splitlines() or ["no output"])[-1].removeprefix("ERROR: ")
        action = f"correct --to, or {tree}"
    return NibbleError(
        ExitCode.VERIFY,
        what=f"{requirement} cannot be downloaded: {why}",
        expected="a package index that has it",
        action=action,
    )


def _as_cpu_build(folder: Path, release: str) -> Path:
    """A folder that makes the tree's vLLM a CPU build: its parser then needs no GPU.

    vLLM takes its platform from the version of its metadata (vllm 0.32 platforms/__init__.py
    cpu_platform_plugin).
    """
    version = f"{release}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder

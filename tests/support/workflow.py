"""Runs a GitHub workflow's jobs on this machine: shell steps as they are, actions by stand-ins.

What only GitHub can do is not here: its runners and their labels, permissions and tokens, the
artifact service, releases (`gh` is a stand-in that keeps what it was called with), and the actions'
own code.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_TOKEN = re.compile(r"\s*('(?:[^']|'')*'|&&|\|\||==|!=|[(),]|[A-Za-z_][\w.-]*)")
GH = """#!/bin/sh
printf '%s\\n' "$*" >> "{log}"
[ "$1 $2" != "release view" ] || exit 1
"""


class StepFailed(AssertionError):
    """A step ended with another status than 0."""


class Expression:
    """A `${{ … }}`: names, strings, ==, !=, &&, ||, parentheses and startsWith."""

    def __init__(self, text: str, contexts: Mapping[str, Any]) -> None:
        self.words = _TOKEN.findall(text)
        assert "".join(self.words) == re.sub(r"\s+(?=(?:[^']*'[^']*')*[^']*$)", "", text), text
        self.contexts = contexts

    def value(self) -> Any:
        found = self._either()
        assert not self.words, self.words
        return found

    def _take(self, *words: str) -> str | None:
        return self.words.pop(0) if self.words and self.words[0] in words else None

    def _either(self) -> Any:
        left = self._both()
        while self._take("||"):
            right = self._both()
            left = left or right
        return left

    def _both(self) -> Any:
        left = self._compared()
        while self._take("&&"):
            right = self._compared()
            left = left and right
        return left

    def _compared(self) -> Any:
        left = self._single()
        if sign := self._take("==", "!="):
            return (left == self._single()) is (sign == "==")
        return left

    def _single(self) -> Any:
        word = self.words.pop(0)
        if word == "(":
            found = self._either()
            assert self._take(")")
            return found
        if word.startswith("'"):
            return word[1:-1].replace("''", "'")
        if word == "startsWith":
            assert self._take("(")
            text = self._either()
            assert self._take(",")
            start = self._either()
            assert self._take(")")
            return str(text).startswith(str(start))
        found: Any = self.contexts
        for name in word.split("."):
            found = found.get(name, "") if isinstance(found, Mapping) else ""
        return found


@dataclass
class Runner:
    """`registry` stands for ghcr.io, `checkout` for the repository, `environ` for the machine."""

    workflow: Path
    registry: str
    checkout: Path
    folder: Path
    environ: Mapping[str, str]
    github: Mapping[str, str]
    inputs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.document = yaml.safe_load(self.workflow.read_text())
        self.artifacts = self.folder / "artifacts"
        self.gh_log = self.folder / "gh.log"
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        (programs / "gh").write_text(GH.format(log=self.gh_log))
        (programs / "gh").chmod(0o755)

    def matrix(self, job: str) -> list[dict[str, str]]:
        strategy = self.document["jobs"][job].get("strategy", {}).get("matrix", {})
        named = {name: values for name, values in strategy.items() if name != "include"}
        products = [
            dict(zip(named, one, strict=True)) for one in itertools.product(*named.values())
        ]
        return [*(one for one in products if one), *strategy.get("include", [])] or [{}]

    def run(self, job: str, **matrix: str) -> Path:
        """Run the steps of a job in an empty workspace; the workspace."""
        workspace = self.folder / "-".join([job, *matrix.values()])
        workspace.mkdir()
        contexts = {"github": self.github, "matrix": matrix, "inputs": self.inputs, "vars": {}}
        environ = self._filled(self.document.get("env", {}), contexts)
        for step in self.document["jobs"][job]["steps"]:
            condition = step.get("if", "'run'")
            if Expression(condition, contexts).value():
                self._step(step, workspace, environ, contexts)
        return workspace

    def _filled(self, values: Mapping[str, Any], contexts: Mapping[str, Any]) -> dict[str, str]:
        return {name: self._text(str(value), contexts) for name, value in values.items()}

    def _text(self, text: str, contexts: Mapping[str, Any]) -> str:
        def put(match: re.Match[str]) -> str:
            return str(Expression(match[1], contexts).value())

        return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", put, text).replace("ghcr.io", self.registry)

    def _step(
        self,
        step: Mapping[str, Any],
        workspace: Path,
        environ: Mapping[str, str],
        contexts: Mapping[str, Any],
    ) -> None:
        if "uses" in step:
            name = step["uses"].partition("@")[0]
            actions: dict[str, Callable[[Path, dict[str, str]], None]] = {
                "actions/checkout": self._checkout,
                "actions/upload-artifact": self._upload,
                "actions/download-artifact": self._download,
                "docker/setup-buildx-action": self._setup_buildx,
                "docker/login-action": self._login,
            }
            assert name in actions, f"no stand-in for {name}"
            actions[name](workspace, self._filled(step.get("with", {}), contexts))
            return
        own = self._filled(step.get("env", {}), contexts)
        script = self._text(step["run"], contexts)
        self._must_run(["bash", "-e", "-c", script], workspace, {**environ, **own})

    def _must_run(
        self, command: list[str], workspace: Path, environ: Mapping[str, str], given: str = ""
    ) -> None:
        path = f"{self.folder / 'bin'}:{self.environ['PATH']}"
        ours = {"GITHUB_REPOSITORY": self.github["repository"], "PATH": path}
        done = subprocess.run(
            command, cwd=workspace, env={**self.environ, **environ, **ours}, input=given,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            raise StepFailed(f"{command}\n{done.stdout}\n{done.stderr}")

    def _checkout(self, workspace: Path, _: dict[str, str]) -> None:
        shutil.copytree(self.checkout, workspace, symlinks=True, dirs_exist_ok=True)

    def _upload(self, workspace: Path, options: dict[str, str]) -> None:
        found = workspace / options["path"]
        if not list(found.glob("*")):
            raise StepFailed(f"no files in {options['path']}")
        shutil.copytree(found, self.artifacts / options["name"])

    def _download(self, workspace: Path, options: dict[str, str]) -> None:
        assert options["merge-multiple"] == "True"
        for artifact in self._uploaded():
            shutil.copytree(artifact, workspace / options["path"], dirs_exist_ok=True)

    def _uploaded(self) -> Iterator[Path]:
        yield from sorted(self.artifacts.iterdir())

    def _setup_buildx(self, workspace: Path, _: dict[str, str]) -> None:
        self._must_run(["docker", "buildx", "version"], workspace, {})

    def _login(self, workspace: Path, options: dict[str, str]) -> None:
        words = ["docker", "login", "--username", options["username"], "--password-stdin"]
        self._must_run([*words, options["registry"]], workspace, {}, given=options["password"])

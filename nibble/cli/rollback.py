"""`nibble rollback`: gives an image's name back to the build before, on the host of the containers.

Every build keeps a second tag with its digest (build.sh): nibble:gb10 is also nibble:gb10-3f2a….
Compose and the Quadlet unit run nibble:gb10, so they follow the name. The volume has compiled code
of both builds, in separate entries (docs/operations.md, Upgrading).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from nibble.cli.common import print_json
from nibble.errors import ExitCode, NibbleError
from nibble.machine.container_engine import container_engine
from nibble.machine.targets import TARGET_NAMES

DIGEST_CHARS = 12
_FORMAT = "{{.Repository}}:{{.Tag}} {{.ID}}"
Ask = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Build:
    """One build of a target's image. `created` is a time in RFC 3339, in UTC; `tagged`, where the
    engine has it, orders builds of one time, which differ in their labels alone.
    """

    tag: str
    id: str
    created: str
    version: str
    is_current: bool
    tagged: str = ""


def engine_of_host(environ: Mapping[str, str]) -> str:
    """The container engine. Raises CONFIG without one."""
    if found := container_engine(environ):
        return found
    raise NibbleError(
        ExitCode.CONFIG,
        what="neither docker nor podman is here",
        expected="the host of the containers",
        action="run it there; without containers, check out that commit and run `make setup`",
    )


def asker(engine: str) -> Ask:
    """Runs the engine's command and gives its output. Raises CONFIG where it fails."""

    def ask(words: Sequence[str]) -> str:
        done = subprocess.run([engine, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"`{engine} {' '.join(words[:2])}` failed: {last}",
                action="check that the container engine runs and that you may use it",
            )
        return done.stdout

    return ask


def builds(image: str, target: str, ask: Ask) -> list[Build]:
    """The builds of `image`:`target`, newest first. A name without a registry is local."""
    names = (image, f"localhost/{image}")
    digest = re.compile(rf"{re.escape(target)}-[0-9a-f]{{{DIGEST_CHARS}}}")
    tags: dict[str, str] = {}
    for line in ask(["images", "--no-trunc", "--format", _FORMAT]).splitlines():
        reference, _, found_id = line.partition(" ")
        name, _, tag = reference.rpartition(":")
        if name in names and (tag == target or digest.fullmatch(tag)):
            tags[tag] = found_id.removeprefix("sha256:")
    current = tags.pop(target, None)
    found = [_build(image, tag, id, id == current, ask) for tag, id in tags.items()]
    return sorted(found, key=lambda build: (build.created, build.tagged), reverse=True)


def _build(image: str, tag: str, id: str, is_current: bool, ask: Ask) -> Build:
    facts = json.loads(ask(["image", "inspect", f"{image}:{tag}"]))[0]
    labels = (facts.get("Config") or {}).get("Labels") or {}
    version = labels.get("org.opencontainers.image.version", "unknown")
    tagged = str((facts.get("Metadata") or {}).get("LastTagTime", ""))
    return Build(tag, id, str(facts.get("Created", "")), version, is_current, tagged)


def choose(found: Sequence[Build], image: str, target: str, to: str | None) -> Build:
    """The build to go back to: `to`, else the one before the current. Raises USAGE and CONFIG."""
    if to is not None:
        for build in found:
            if to in (build.tag, build.tag.removeprefix(f"{target}-"), f"{image}:{build.tag}"):
                return build
        known = ", ".join(build.tag for build in found) or "none"
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{image} has no build {to!r}",
            expected=f"one of: {known}",
            action="correct --to; `nibble rollback --list` shows them",
        )
    at = next((n for n, build in enumerate(found) if build.is_current), None)
    if at is None or at + 1 >= len(found):
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"{image}:{target} has no earlier build on this host",
            expected="two builds with digest tags",
            action="build both with ./build.sh, or name one with --to",
        )
    return found[at + 1]


def give_name(image: str, target: str, build: Build, ask: Ask) -> None:
    """Make `image`:`target` name that build. Both keep their digest tags."""
    ask(["tag", f"{image}:{build.tag}", f"{image}:{target}"])


def check_target(target: str) -> str:
    """The target. Raises USAGE for an unknown one."""
    if target not in TARGET_NAMES:
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{target!r} is not a target",
            expected=f"one of: {', '.join(TARGET_NAMES)}",
            action="correct it",
        )
    return target


def roll_back(
    target: str, to: str | None, list_only: bool, as_json: bool, environ: Mapping[str, str]
) -> None:
    """The verb. Prints what it did, or the builds."""
    image = environ.get("IMAGE", "") or "nibble"
    ask = asker(engine_of_host(environ))
    found = builds(image, check_target(target), ask)
    if list_only:
        if as_json:
            print_json([asdict(build) for build in found])
        for build in () if as_json else found:
            mark = "  current" if build.is_current else ""
            print(f"{image}:{build.tag}  {build.created}  {build.version}{mark}")
        return
    chosen = choose(found, image, target, to)
    give_name(image, target, chosen, ask)
    if as_json:
        print_json(asdict(chosen))
    else:
        print(f"{image}:{target} is {chosen.tag} now ({chosen.version}, built {chosen.created})")
        print("restart the container: `docker compose up -d`, or `systemctl --user restart nibble`")

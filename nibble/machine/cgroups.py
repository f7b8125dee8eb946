"""The control groups of this process, versions 1 and 2 of the kernel's interface."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def cgroups(controller: str, files: Iterable[str], root: Path = Path("/")) -> list[Path]:
    """Folders of this process's cgroup for `controller` and of its visible ancestors, innermost
    first. Empty if none of them has one of `files`.

    A container sees its cgroup mounted at the top, with or without a cgroup namespace. `root` is
    the file system's root; tests pass a separate folder.
    """
    for mount_root, mount_point, is_v2 in _mounts(controller, root):
        own = _own_path(controller, root, is_v2)
        if own is None:
            continue
        top, base = root / mount_point.lstrip("/"), mount_root.rstrip("/")
        folder = top / own[len(base) :].strip("/") if own.startswith(f"{base}/") else top
        if ".." in folder.parts or not folder.is_dir():  # outside this cgroup namespace
            folder = top
        found = [folder, *(up for up in folder.parents if up.is_relative_to(top))]
        if any((place / name).exists() for place in found for name in files):
            return found
    return []


def _mounts(controller: str, root: Path) -> list[tuple[str, str, bool]]:
    """(root within the hierarchy, mount point, is v2) of every mount that may have the controller,
    v1 first.
    """
    found: list[tuple[str, str, bool]] = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup" and controller in kind[2].split(","):
            found.insert(0, (fields[3], fields[4], False))
        elif kind[0] == "cgroup2":
            found.append((fields[3], fields[4], True))
    return found


def _own_path(controller: str, root: Path, is_v2: bool) -> str | None:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if (number == "0" and not controllers) if is_v2 else controller in controllers.split(","):
            return path
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

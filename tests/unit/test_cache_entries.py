"""Compiled code on disk: recorded, verified, dropped when damaged, pruned; never in the way of a
start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nibble.cli import cache as cache_commands
from nibble.plan.compile_cache import CacheKey, CachePlan
from nibble.serve.compile_cache import Entry, Use, drop, entries, to_prune
from nibble.serve.compile_record import damage
from tests.support.other_users import open_to_others
from tests.support.paths import ROOT

DAY_S = 86400.0


@pytest.fixture
def caches(tmp_path: Path) -> CachePlan:
    shared = {"build": "b1", "vllm": "0.32.0", "arch": "sm_90"}
    graphs = CacheKey("graphs", shared | {"model": "acme/m@1", "flags": "{}"})
    return CachePlan(tmp_path / "engine", (CacheKey("kernels", shared), graphs))


@pytest.fixture
def said() -> list[str]:
    return []


def _make_it_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def served(caches: CachePlan, said: list[str]) -> Path:
    """The graphs entry after a server that compiled something, was ready and ended."""
    use = Use(caches, said.append)
    use.open()
    compiled = caches.folder("graphs") / "vllm" / "torch_compile_cache"
    compiled.mkdir(parents=True)
    (compiled / "graph.so").write_bytes(bytes(range(256)) * 16)
    tuned = caches.folder("graphs") / "vllm" / "flashinfer_autotune_cache"
    tuned.mkdir()
    (tuned / "autotune_configs.json").write_text("{}")
    use.record()
    use.close()
    return caches.folder("graphs")


def test_an_entry_is_listed_with_what_it_is_for_and_its_size(
    caches: CachePlan, said: list[str]
) -> None:
    folder = served(caches, said)
    found = {entry.kind: entry for entry in entries(caches.root)}
    assert found["graphs"].folder == folder
    assert found["graphs"].parts["model"] == "acme/m@1"
    assert found["graphs"].size_bytes >= 4096
    assert found["graphs"].is_recorded and not found["graphs"].is_used
    assert "model" not in found["kernels"].parts
    assert said == []


def test_a_sound_entry_stays_for_the_next_start(caches: CachePlan, said: list[str]) -> None:
    folder = served(caches, said)
    Use(caches, said.append).open()
    assert (folder / "vllm/torch_compile_cache/graph.so").is_file()
    assert said == []


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda so: so.write_bytes(so.read_bytes()[:100]), "has 100 bytes instead of 4096"),
        (lambda so: so.write_bytes(b"x" + so.read_bytes()[1:]), "the sha256 of"),
        (lambda so: so.unlink(), "is missing"),
        (lambda so: (so.parents[2] / "files.json").write_text("{"), "files.json cannot be read"),
        (lambda so: (so.parents[2] / "files.json").write_text('{"files": {"a": 1}}'), "files.json cannot be read"),  # noqa: E501
        (lambda so: (so.parents[2] / "files.json").write_text('{"files": {"a": [1, 2]}}'), "files.json cannot be read"),  # noqa: E501
        (
            lambda so: (so.parents[2] / "files.json").write_text('{"files": {"a": [Infinity, 2, ""]}}'),  # noqa: E501
            "files.json cannot be read",
        ),
        (lambda so: _make_it_a_folder(so.parents[2] / "files.json"), "files.json cannot be read"),
        (
            lambda so: (so.parents[1] / "flashinfer_autotune_cache/autotune_configs.json").write_text('{"a'),  # noqa: E501
            "autotune_configs.json is not JSON",
        ),
    ],
)  # fmt: skip
def test_a_damaged_entry_is_dropped_with_a_line_at_the_next_start(
    caches: CachePlan, said: list[str], harm, problem: str
) -> None:
    folder = served(caches, said)
    harm(folder / "vllm/torch_compile_cache/graph.so")
    Use(caches, said.append).open()
    assert len(said) == 1 and problem in said[0] and "compiles it again" in said[0]
    assert not (folder / "vllm/torch_compile_cache").exists()
    assert folder.is_dir() and list(damage(folder)) == []


def test_what_a_later_start_rewrites_or_adds_is_no_damage(
    caches: CachePlan, said: list[str]
) -> None:
    folder = served(caches, said)
    (folder / "vllm/flashinfer_autotune_cache/autotune_configs.json").write_text('{"more": [1, 2]}')
    (folder / "vllm/torch_compile_cache/later.so").write_bytes(
        b"made at a first request, then killed"
    )
    assert list(damage(folder)) == []


def test_what_the_driver_evicts_from_its_own_cache_is_no_damage(
    caches: CachePlan, said: list[str]
) -> None:
    use = Use(caches, said.append)
    use.open()
    made = caches.folder("kernels") / "cuda" / "1" / "a" / "b"
    made.parent.mkdir(parents=True)
    made.write_bytes(b"sass")
    use.record()
    use.close()
    made.unlink()
    assert list(damage(caches.folder("kernels"))) == []


def test_what_was_compiled_while_serving_is_recorded_at_the_end(
    caches: CachePlan, said: list[str]
) -> None:
    use = Use(caches, said.append)
    use.open()
    use.record()
    late = caches.folder("kernels") / "triton" / "late.cubin"
    late.parent.mkdir()
    late.write_bytes(b"cubin")
    use.close()
    late.write_bytes(b"cubi")
    assert "4 bytes instead of 5" in next(damage(caches.folder("kernels")))


def test_a_start_that_was_never_ready_records_nothing(caches: CachePlan, said: list[str]) -> None:
    use = Use(caches, said.append)
    use.open()
    use.close()
    assert not (caches.folder("graphs") / "files.json").exists()


def test_the_inspection_of_model_classes_is_shared_by_all_settings(
    caches: CachePlan, said: list[str]
) -> None:
    served(caches, said)
    (caches.folder("graphs") / "vllm/modelinfos/qwen3.json").write_text("{}")
    other = CacheKey("graphs", {**caches.keys[1].parts, "flags": '{"--max-num-seqs": 2}'})
    again = CachePlan(caches.root, (caches.keys[0], other))
    Use(again, said.append).open()
    assert (again.folder("graphs") / "vllm/modelinfos/qwen3.json").is_file()


def test_a_cache_that_cannot_be_written_is_a_warning(caches: CachePlan, said: list[str]) -> None:
    caches.root.write_text("a file")
    use = Use(caches, said.append)
    use.open()
    use.record()
    use.close()
    assert said and all(line.startswith("warning: ") for line in said)


HOLD = """
import sys
from pathlib import Path
from nibble.serve.compile_cache import Use
from nibble.plan.compile_cache import CacheKey, CachePlan
keys = (CacheKey("kernels", {"build": "b1"}), CacheKey("graphs", {"build": "b1"}))
use = Use(CachePlan(Path(sys.argv[1]), keys), print)
use.open()
print("held", flush=True)
sys.stdin.read()
"""


def test_an_entry_that_a_server_holds_is_neither_dropped_nor_pruned(tmp_path: Path) -> None:
    root = tmp_path / "engine"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, root],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        found = entries(root)
        assert len(found) == 2 and all(entry.is_used for entry in found)
        assert not drop(found[0].folder)
        assert (
            to_prune(found, time.time() + 99 * DAY_S, older_than_s=1, max_bytes=0, build="other")
            == []
        )
    finally:
        other.communicate("")
    assert not entries(root)[0].is_used
    assert drop(found[0].folder) and not found[0].folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_entries_are_listed_as_in_use_and_stop_nothing(tmp_path: Path) -> None:
    keys = (CacheKey("kernels", {"build": "b1"}), CacheKey("graphs", {"build": "b1"}))
    caches, lines = CachePlan(tmp_path / "engine", keys), list[str]()
    folder = served(caches, lines)
    (folder / "lock").chmod(0o600)
    caches.folder("kernels").chmod(0o700)
    open_to_others(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from nibble.serve.compile_cache import entries,"
        " damage\nos.setgid(65534); os.setuid(65534)\nfound = entries(Path(sys.argv[1]));"
        " print([e.is_used for e in found], *(list(damage(e.folder)) for e in found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, caches.root],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("[True, True]") and "Permission denied" in done.stdout


def entry(name: str, days: float, size: int = 10, build: str = "b1", used: bool = False) -> Entry:
    return Entry(Path(name), "graphs", {"build": build}, size, -days * DAY_S, True, used)


def test_prune_takes_by_age_build_and_size_the_longest_unused_first() -> None:
    found = [
        entry("new", 1),
        entry("old", 40),
        entry("older", 50, build="b0"),
        entry("held", 60, used=True),
    ]

    def names(**limits) -> list[str]:
        return [one.folder.name for one in to_prune(found, 0.0, **limits)]

    assert names(older_than_s=30 * DAY_S) == ["older", "old"]
    assert names(build="b1") == ["older"]
    assert names(max_bytes=30) == ["older"]
    assert names(max_bytes=25) == ["older", "old"]
    assert names(max_bytes=0) == ["older", "old", "new"]
    assert names(older_than_s=45 * DAY_S, max_bytes=20) == ["older", "old"]


# --- the commands ---


def nibble(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "NIBBLE_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "nibble", "cache", *words]
    return subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_looking_at_a_folder_that_is_no_entry_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "engine" / "left-over").mkdir(parents=True)
    (found,) = entries(tmp_path / "engine")
    assert (found.kind, found.is_used, found.is_recorded) == ("unknown", False, False)
    assert list(found.folder.iterdir()) == []


def test_verify_names_what_is_wrong_drops_it_and_succeeds(
    caches: CachePlan, said: list[str]
) -> None:
    folder = served(caches, said)
    (folder / "vllm/torch_compile_cache/graph.so").write_bytes(b"")
    done = nibble("verify", cache=caches.root.parent)
    assert done.returncode == 0
    assert (
        f"{folder.name}: dropped: vllm/torch_compile_cache/graph.so has 0 bytes instead of 4096"
        in done.stdout
    )
    assert not folder.exists()


def test_ls_and_prune_speak_json_and_a_dry_run_removes_nothing(
    caches: CachePlan, said: list[str]
) -> None:
    folder = served(caches, said)
    listed = json.loads(nibble("ls", "--json", cache=caches.root.parent).stdout)
    assert {one["name"] for one in listed} == {key.name for key in caches.keys}
    dry = nibble("prune", "--all-but-current", "--dry-run", cache=caches.root.parent)
    assert f"would remove {folder}" in dry.stdout and folder.is_dir()
    real = nibble("prune", "--all-but-current", cache=caches.root.parent)
    assert f"removed {folder}" in real.stdout and entries(caches.root) == []


@pytest.mark.parametrize(
    "limit", [("--max-gib", "nan"), ("--max-gib", "inf"), ("--older-than", "-1")]
)
def test_a_limit_that_is_no_number_from_0_up_is_a_usage_error(
    tmp_path: Path, limit: tuple[str, str]
) -> None:
    done = nibble("prune", *limit, cache=tmp_path)
    assert (
        done.returncode == 2
        and f"{limit[0]} is {float(limit[1])}; expected a number" in done.stderr
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_cache_that_this_user_may_not_look_into_is_one_error_and_not_empty(
    caches: CachePlan, said: list[str]
) -> None:
    served(caches, said)
    caches.root.chmod(0o700)
    open_to_others(caches.root.parent)
    code = (
        "import os, sys\n"
        "from nibble.cli import cache, failures\n"
        "from nibble.engine.schema import load_schema\n"
        "from nibble.plan import gather\n"  # the other user may not read the installed packages
        "from nibble.serve import compile_cache\n"
        "load_schema()\n"
        "os.setgid(65534)\n"
        "os.setuid(65534)\n"
        "environ = {'HOME': '/', 'NIBBLE_CACHE_DIR': sys.argv[1]}\n"
        "sys.exit(failures.guarded(lambda: cache.verify(environ)))"
    )
    command = [sys.executable, "-c", code, caches.root.parent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert f"{caches.root} cannot be read (Permission denied)" in done.stderr


def test_prune_without_a_limit_is_a_usage_error(tmp_path: Path) -> None:
    done = nibble("prune", cache=tmp_path)
    assert done.returncode == 2 and "--older-than" in done.stderr and "Traceback" not in done.stderr


def test_the_commands_look_where_the_settings_file_says(
    caches: CachePlan, said: list[str], tmp_path: Path
) -> None:
    folder, settings = served(caches, said), tmp_path / "nibble.toml"
    settings.write_text(f'cache_dir = "{tmp_path}"\n')
    environ = {"HOME": str(tmp_path), "NIBBLE_CONFIG": str(settings)}
    assert folder in [entry.folder for entry in cache_commands.found(environ)]
    assert folder.name in [one.name for one in cache_commands.verify(environ)]
    assert folder in [
        entry.folder for entry in cache_commands.prune(environ, 0, None, False, dry_run=False)
    ]
    assert not folder.exists()

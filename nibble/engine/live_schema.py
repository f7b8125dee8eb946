"""The installed vLLM compared with the committed snapshot of what it accepts.

`live_schema()` asks an installed vLLM in a subprocess (`introspect.py`), and `drift` compares it
with the snapshot. `python -m nibble.engine.live_schema --emit` writes the snapshot anew; `--check`
exits 6 where it differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nibble.engine.schema import SNAPSHOT, Schema, load_schema
from nibble.errors import ExitCode, NibbleError

INTROSPECT = Path(__file__).with_name("introspect.py")
INTROSPECTION_TIMEOUT_SECONDS = (
    300  # importing vllm and building its parser takes 10 s on two idle cores
)


def live_schema(
    python: str = sys.executable,
    argvs: Sequence[Sequence[str]] = (),
    path: Sequence[Path] = (),
) -> tuple[Schema, list[str | None]]:
    """The schema of the vLLM that `python` imports, and for each argument list None or the refusal
    of its parser.

    `path` are folders that the interpreter imports from before its own. Raises VERIFY where it has
    no working vLLM.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, words = Path(folder, "schema.json"), Path(folder, "argvs.json")
        words.write_text(json.dumps([list(argv) for argv in argvs]))
        # -P: the scripts' own folder holds module names (ray, gate) that must not shadow vLLM's
        # imports.
        before = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
        run = subprocess.run(
            [python, "-P", str(INTROSPECT), str(out), str(words)],
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", **before},
            capture_output=True,
            text=True,
            timeout=INTROSPECTION_TIMEOUT_SECONDS,
            check=False,
        )
        if run.returncode != 0 or not out.exists():
            last = (run.stderr.strip().splitlines() or ["no output"])[-1]
            what = f"vLLM could not be inspected with {python}: {last}"
            raise NibbleError(
                ExitCode.VERIFY,
                what=what,
                expected="an interpreter that imports vllm",
                action="name it with --python",
            )
        data = json.loads(out.read_text())
    refusals = data.pop("refusals")
    return Schema(data), refusals


def drift(snapshot: Schema, live: Schema) -> list[str]:
    """Each difference between the installed vLLM and the snapshot."""
    return list(_differences(snapshot.data, live.data, ""))


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            where = f"{path}.{key}" if path else key
            if key not in new:
                yield f"{where} is gone"
            elif key not in old:
                yield f"{where} is new"
            else:
                yield from _differences(old[key], new[key], where)
    elif isinstance(old, list) and isinstance(new, list):
        gone, added = [v for v in old if v not in new], [v for v in new if v not in old]
        if gone or added:
            yield f"{path} lost {gone} and gained {added}"
    elif old != new:
        yield f"{path} was {old!r} and is {new!r}"


def write_snapshot(schema: Schema, path: Path = SNAPSHOT) -> None:
    """Write the snapshot, one flag, config key or name a line, so that a vLLM upgrade gives a
    readable diff.
    """
    path.write_text(_dump(schema.data, {"classes": 4}.get, 2) + "\n")


def _dump(value: Any, depth_of: Any, depth: int, level: int = 0) -> str:
    if level >= depth or not value or not isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    pad, end = " " * (level + 1), " " * level
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + json.dumps(v) for v in value) + f"\n{end}]"
    lines = [
        f"{pad}{json.dumps(k)}: {_dump(v, depth_of, depth_of(k) or depth, level + 1)}"
        for k, v in value.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{end}" + "}"


def main(argv: Sequence[str]) -> int:
    """`--emit` writes the snapshot from the vLLM of this interpreter; `--check` says where it
    differs (exit 6).
    """
    if list(argv) not in (["--emit"], ["--check"]):
        print("usage: python -m nibble.engine.live_schema --emit | --check", file=sys.stderr)
        return ExitCode.USAGE
    live, _ = live_schema()
    if list(argv) == ["--emit"]:
        write_snapshot(live)
        return ExitCode.OK
    differences = drift(load_schema(), live)
    print("\n".join(differences) or f"the snapshot agrees with vLLM {live.version}")
    return ExitCode.VERIFY if differences else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How long a probe may take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Imports of a second, and a probe that takes two or never ends; the limit is a tenth of a second.
NURSERY = """
import sys, time
from pathlib import Path
from nibble.engine.patching import run

run.NURSERY, run.TIME_LIMIT_SECONDS, run.TIME_LIMIT_IN_IMPORTS = ("slow",), 0.1, {imports}
run._answer = lambda tree, name: time.sleep({seconds}) or dict(finding=None, remedy=None, error="")
run._nursery(None, ["probe"], Path(sys.argv[1]), 1)
"""


@pytest.mark.parametrize(
    ("imports", "seconds", "error"),
    [(30, 2, ""), (1, 60, r"no answer after \d+ s")],
    ids=["as slow as the imports", "hanging"],
)
def test_a_probe_may_take_longer_where_imports_do(
    imports: int, seconds: int, error: str, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\n")
    script = NURSERY.format(imports=imports, seconds=seconds)
    subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        check=True,
        timeout=50,
    )
    answer = json.loads((tmp_path / "probe.json").read_text())
    assert re.fullmatch(error, answer["error"])

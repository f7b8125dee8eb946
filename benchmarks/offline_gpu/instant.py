"""pytest -p instant: a failure is printed when it happens; a step that is cut off would
otherwise never say why.
"""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.longreprtext}", flush=True)

"""pytest -p instant: prints a failure when it happens. A step that reaches its time limit would
otherwise not show why.
"""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.longreprtext}", flush=True)

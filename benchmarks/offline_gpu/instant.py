"""pytest -p instant: prints a failure, and what a test recorded, when it happens. A step that
reaches its time limit would otherwise not show it.
"""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.user_properties:
        print(f"\n{report.nodeid}: {report.user_properties}", flush=True)
    if report.failed:
        print(f"\n{report.longreprtext}", flush=True)

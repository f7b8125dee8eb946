"""Debian's Prometheus for tests: installed, or unpacked from its package."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.servers.serving import free_port

METRICS = ROOT / "docker" / "metrics"
_LIMIT_S = 60.0


@functools.cache
def programs() -> Path:
    """The folder with prometheus and promtool. Skips the test without them and without apt."""
    if found := shutil.which("promtool"):
        return Path(found).parent
    folder = Path(tempfile.gettempdir()) / "nibble-prometheus"
    if not folder.is_dir():
        scratch = Path(tempfile.mkdtemp(prefix="nibble-prometheus-"))
        words = ["apt-get", "download", "-o", "APT::Sandbox::User=root", "prometheus"]
        try:
            subprocess.run(words, cwd=scratch, check=True, capture_output=True, timeout=120)
            (package,) = scratch.glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, scratch / "x"], check=True, timeout=120)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            pytest.skip(f"no Prometheus here: {error}")
        with contextlib.suppress(OSError):  # another process was first
            (scratch / "x").rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)
    return folder / "usr" / "bin"


def check(folder: Path) -> None:
    """promtool's verdict on rules and configuration."""
    tool = str(programs() / "promtool")
    subprocess.run([tool, "check", "rules", METRICS / "rules.yml"], check=True)
    subprocess.run([tool, "check", "config", configuration(folder, 1, "key")], check=True)


def check_over_time(
    folder: Path, series: Mapping[str, str], alert: str, summaries: Mapping[str, str]
) -> None:
    """promtool's verdict on a shipped alert. `series`: values of each minute; `summaries`: what it
    says by time, empty while it must not fire.
    """
    rules = yaml.safe_load((METRICS / "rules.yml").read_text())["groups"][0]["rules"]
    (rule,) = (one for one in rules if one["alert"] == alert)
    checks = []
    for at, summary in summaries.items():
        server = {"instance": summary.split()[0]} if ":" in summary else {}
        fired = {
            "exp_labels": {"job": "nibble", **server, **rule["labels"]},
            "exp_annotations": rule["annotations"] | {"summary": summary},
        }
        checks.append(
            {"eval_time": at, "alertname": alert, "exp_alerts": [fired] if summary else []}
        )
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": given, "alert_rule_test": checks}
    file = folder / "alerts.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(METRICS / "rules.yml")], "tests": [test]}))
    command = [programs() / "promtool", "test", "rules", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def quick_rules(folder: Path) -> Path:
    """The shipped rules; an alert fires after a second instead of minutes."""
    found = yaml.safe_load((METRICS / "rules.yml").read_text())
    for rule in found["groups"][0]["rules"]:
        if "for" in rule:
            rule["for"] = "1s"
    (folder / "rules.yml").write_text(yaml.safe_dump(found))
    return folder / "rules.yml"


def configuration(folder: Path, port: int, key: str, rules: Path = METRICS / "rules.yml") -> Path:
    """The shipped configuration with this machine's server, key and rules."""
    found = yaml.safe_load((METRICS / "prometheus.yml").read_text())
    (folder / "key").write_text(key)
    found["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    found["rule_files"] = [str(rules)]
    (job,) = found["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / "key")
    job.pop("dns_sd_configs")
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(found))
    return folder / "prometheus.yml"


@contextlib.contextmanager
def scraping(folder: Path, port: int, key: str, quick: bool = False) -> Iterator[str]:
    """The address of a Prometheus that scrapes the server at `port`; quick: see quick_rules."""
    address = f"127.0.0.1:{free_port()}"
    rules = quick_rules(folder) if quick else METRICS / "rules.yml"
    with (folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(
            [programs() / "prometheus", f"--config.file={configuration(folder, port, key, rules)}",
             f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        child.kill()
        child.wait()


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """Samples of an expression, once there are some."""
    words = urllib.parse.urlencode({"query": expression})
    deadline = time.monotonic() + _LIMIT_S
    while True:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
            if found:
                return found
        assert time.monotonic() < deadline, expression
        time.sleep(0.5)


def firing(url: str, wanted: Callable[[set[str]], bool]) -> dict[str, dict[str, str]]:
    """Annotations of the alerts that fire, by name, once `wanted` is true of their names."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        found: dict[str, dict[str, str]] = {}
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=10) as answer:
                listed = json.load(answer)["data"]["alerts"]
            found = {
                one["labels"]["alertname"]: one["annotations"]
                for one in listed
                if one["state"] == "firing"
            }
            if wanted(set(found)):
                return found
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def alerts(url: str) -> dict[str, str]:
    """Health of each rule by its alert, once all were evaluated."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        with urllib.request.urlopen(f"{url}/api/v1/rules", timeout=10) as answer:
            (group,) = json.load(answer)["data"]["groups"]
        found = {rule["name"]: rule["health"] for rule in group["rules"]}
        if "unknown" not in found.values():
            return found
        assert time.monotonic() < deadline
        time.sleep(0.5)

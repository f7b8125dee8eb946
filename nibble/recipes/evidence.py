"""Evidence that a recipe was verified on a machine: its self-test and a run of the model. Pure.

The file lies beside the recipe as `NAME.verified-TARGET.json`; the recipe's section names it.
`nibble recipes lint` checks that both agree and that the report in it is the one that was hashed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.recipes.recipe import Section
from nibble.trials.report import Report, parse_report

FORMAT = 1
PASSED = "passed"
# Flags of the run that say what was verified; others hold paths and names.
KEPT_FLAGS = (
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
    "--max-model-len", "--max-num-seqs", "--kv-cache-dtype", "--linear-backend", "--moe-backend",
    "--attention-backend", "--speculative-config", "--enforce-eager",
)  # fmt: skip


def report_digest(report: Mapping[str, Any]) -> str:
    """sha256 of a report's content, whatever the layout of its file."""
    text = json.dumps(report, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def evidence_path(recipe: Path, target: str) -> Path:
    """The file of a recipe's evidence for a target."""
    return recipe.with_name(f"{recipe.stem}.verified-{target}.json")


def make_evidence(model: str, report: Report, status: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the file. Raises CANARY where report or run is not right, and CONFIG where
    they are of different machines, builds or models.
    """
    if report.exit_code is not ExitCode.OK:
        why = ", ".join(report.wrong) or "; ".join(finding.what for finding in report.findings)
        raise NibbleError(
            ExitCode.CANARY,
            what=f"the self-test of the report ended with {int(report.exit_code)} ({why})",
            expected="one that ended with 0",
            action="correct what it names and run `nibble selftest --out FILE` again",
        )
    run = _run(status)
    for what, found, expected in (
        ("model", run["model"], model),
        ("target", run["target"], report.place.target),
        ("build", run["build"], report.place.build),
    ):
        if found != expected:
            raise NibbleError(
                ExitCode.CONFIG,
                what=f"the running server has the {what} {found}, and not {expected}",
                action="serve the model with the build and on the machine of the report",
            )
    content = report.to_json()
    return {
        "format": FORMAT,
        "model": model,
        "target": report.place.target,
        "gpu": report.place.device,
        "gpus": report.place.gpus,
        "report_sha256": report_digest(content),
        "report": content,
        "run": run,
    }


def _run(status: Mapping[str, Any]) -> dict[str, Any]:
    """What /status says of a server that is ready, without addresses and paths."""
    try:
        plan, checks = status["plan"], {name: status[name] for name in ("assertion", "canary")}
        verdicts = {name: check["verdict"] for name, check in checks.items()}
        findings = [
            {"mechanism": found["mechanism"], "verdict": found["verdict"]}
            for found in checks["canary"]["findings"]
        ]
        state = status["state"]
        run = {
            "model": (plan["recipe"] or plan["checkpoint"])["id"],
            "revision": plan["checkpoint"]["revision"],
            "target": plan["target"],
            "build": status["build"],
            "verdicts": verdicts,
            "findings": findings,
            "linear": [dict(ran["linear"]) for ran in checks["assertion"]["ran"][:1]],
            "args": {
                flag: choice["value"] for flag, choice in plan["args"].items() if flag in KEPT_FLAGS
            },
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise NibbleError(
            ExitCode.CONFIG,
            what=f"the server's status lacks {error}",
            expected="a server of this nibble",
            action="start the model with `nibble serve`",
        ) from None
    if state != "ready" or set(verdicts.values()) != {PASSED}:
        shown = ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
        raise NibbleError(
            ExitCode.CANARY,
            what=f"the running server is {state}: {shown}",
            expected="a server that is ready, with kernels and canary passed",
            action="wait until it is ready, and see `nibble status`",
        )
    return run


def section(evidence: Mapping[str, Any], place: str) -> str:
    """The TOML lines for the recipe. `place`: the file as the recipe names it."""
    gpu = f'gpu = "{evidence["gpu"]}"\n' if evidence["gpus"] else ""
    count = f"gpus = {evidence['gpus']}\n" if evidence["gpus"] else ""
    digest = evidence["report_sha256"]
    return (
        f"[target.{evidence['target']}]\n"
        'status = "verified"\n'
        f'evidence = "{place} (report sha256 {digest})"\n{gpu}{count}'
    )


def evidence_problem(section: Section, folder: Path, model: str, target: str) -> str:
    """Why the evidence of a verified section does not hold; empty if it does. `folder`: of the
    recipe.
    """
    named = section.evidence
    file = folder / named.split()[0].rpartition("/")[2]
    try:
        data = json.loads(file.read_text())
        report = parse_report(data["report"])
        digest, run = report_digest(data["report"]), data["run"]
        if data["format"] != FORMAT or digest != data["report_sha256"]:
            return f"{file.name} has another report than the one that its sha256 names"
        if digest not in named:
            return f"{file.name} has the report sha256 {digest}, which the evidence does not name"
        if (data["model"], data["target"]) != (model, target) or report.place.target != target:
            return f"{file.name} is of {data['model']} on {data['target']}"
        if section.gpu not in data["gpu"] or section.gpus not in (None, data["gpus"]):
            return (
                f"{file.name} is of {data['gpus']} {data['gpu']}, which the section does not name"
            )
        if report.exit_code is not ExitCode.OK or set(run["verdicts"].values()) != {PASSED}:
            return f"{file.name} has a self-test or a run that did not pass"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{file.name} is not evidence of `nibble recipes verify` ({type(error).__name__})"
    return ""


def is_evidence_file(named: str) -> bool:
    """Whether a section's evidence names such a file."""
    return ".verified-" in named.partition(" ")[0]

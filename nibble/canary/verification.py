"""The checks between vLLM's first answer and "ready": the kernels, and the canary.

The workers report which kernels they use (nibble/engine/plugin/report). `Proof` compares these
reports with the plan, runs the canary, and ends the start or warns, as the settings say.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.canary.agreement import disagreements
from nibble.canary.client import Asker
from nibble.canary.computed import references_from
from nibble.canary.kernels import (
    STRICT_ACTION,
    Deviation,
    deviations,
    expectations,
    plain_torch_on_the_cpu,
)
from nibble.canary.layers import activations_of, on_node
from nibble.canary.references import References, references_like
from nibble.canary.run import BUDGET_S, Finding, run_canary
from nibble.engine.api import Api
from nibble.engine.contract import ALLOWED_PLUGINS, REPORT_FOLDER, REPORT_PLUGIN
from nibble.engine.contract.reference import REFERENCES, REFERENCES_PENDING
from nibble.engine.contract.report import WORKER_REPORTS, WorkerReport, reporting_pid
from nibble.engine.installed import compiled_id, has_plugin
from nibble.errors import ExitCode, NibbleError
from nibble.hub.files import CANARY_FILE, WEIGHT_ONLY_CANARY_FILE
from nibble.machine.paths import root
from nibble.plan.choice import values_of
from nibble.plan.nvfp4_options import asked as plugin_options
from nibble.recipes.recipe import recipe_path
from nibble.reference.store import layer_files, read_reference

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

WARM_UP_S = 600.0  # vLLM compiles the code for log-probs at the first use
# Flags that change the model's numbers: recorded log-probs then differ.
OTHER_NUMBERS = ("--kv-cache-dtype", "--quantization", "--dtype", "--hf-overrides")
# Flags that change the tokens of a prompt: they replace the checkpoint's tokenizer or template.
OTHER_TOKENS = (
    "--chat-template",
    "--tokenizer",
    "--tokenizer-mode",
    "--default-chat-template-kwargs",
    "--chat-template-content-format",
)
ACTION = (
    "choose other kernels with --linear-backend, --moe-backend or --attention-backend, or set"
    " NIBBLE_CANARY=warn to serve anyway"
)


class Proof:
    """The verdicts of one start. `run` is called once, in a thread; `to_json` at any time."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        api: Api,
        elsewhere: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]] = dict,
        computed: Callable[[], Mapping[str, Path]] = dict,
    ) -> None:
        """Start to wait for computed references.

        folder: created here; workers write their reports into it.
        elsewhere: returns the reports of workers on other nodes, by node name.
        computed: waits for the computed references and returns their files by format of
        activations. Workers wait for them too.
        """
        self._plan, self._folder, self._api, self._elsewhere = plan, folder, api, elsewhere
        self._ran: list[Any] = []
        self._assertion: tuple[str, tuple[str, ...]] = ("pending", ())
        self._canary: tuple[str, tuple[Finding, ...]] = ("pending", ())
        self._computed = computed
        folder.mkdir()
        (folder / REFERENCES_PENDING).touch()
        threading.Thread(
            target=self._write_references, name="write references", daemon=True
        ).start()

    def _write_references(self) -> None:
        """Write REFERENCES, then remove REFERENCES_PENDING, for which warm workers wait."""
        try:
            files = json.dumps(layer_files(self._computed()))
            with suppress(FileNotFoundError):  # the run has ended and removed the folder
                (self._folder / REFERENCES).write_text(files)
        finally:
            (self._folder / REFERENCES_PENDING).unlink(missing_ok=True)

    def environ(self) -> dict[str, str]:
        """Environment variables for vLLM's processes."""
        return {REPORT_FOLDER: str(self._folder)}

    def to_json(self) -> dict[str, Any]:
        """For /status: both verdicts, the kernels that ran, and each mechanism's finding."""
        assertion, lines = self._assertion
        canary, findings = self._canary
        return {
            "assertion": {"verdict": assertion, "deviations": list(lines), "ran": self._ran},
            "canary": {
                "verdict": canary,
                "findings": [finding.to_json() for finding in findings],
                "arithmetic": arithmetic_of(self._plan),
            },
        }

    def run(self, names: tuple[str, ...], generates: bool, say: Callable[[str], None]) -> None:
        """Check the kernels, then run the canary.

        names: the served model names; generates: the model generates text; say: prints a line.
        Raises CANARY if the settings say that a wrong kernel or answer ends the start, and OSError
        if vLLM ends.
        """
        elsewhere = self._elsewhere()
        by_node = {"": read_reports(self._folder), **elsewhere}
        reports = [{**report, "node": node} for node, local in by_node.items() for report in local]
        self._ran = [
            {
                **report["ran"],
                "activations": activations_of([report]),
                "node": report["node"],
                "rank": report["rank"],
            }
            for report in reports
            if report["ran"] is not None
        ]
        for problem in dict.fromkeys(report["problem"] for report in reports if report["problem"]):
            say(f"warning: a worker could not report all kernels: {problem}")
        silent = [node for node, remote in elsewhere.items() if not remote]
        self._assert_kernels(len(reports), silent, say)
        if self._plan.settings.canary == "off":
            self._canary = ("off", ())
        elif is_dummy(self._plan):
            self._canary = ("no weights to check", ())
        else:
            self._run_canary(reports, names, generates, say)

    def _assert_kernels(
        self, reports: int, silent: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._assertion = ("unknown", ())
        if silent or reports < workers(self._plan):
            how = self._plan.settings.kernel_assertion if has_plugin(REPORT_PLUGIN) else "warn"
            self._raise_or_warn(_missing_reports(reports, workers(self._plan), silent), how, say)
        if not self._ran:
            return
        expected = expectations(self._plan, os.environ)
        unexpected = [
            (node, deviation)
            for node in dict.fromkeys(ran["node"] for ran in self._ran)
            for deviation in deviations(expected, [ran for ran in self._ran if ran["node"] == node])
        ]
        # A node with a deviation also differs from the others: one report of it is enough.
        reported = {node for node, _ in unexpected}
        differing = [each for each in disagreements(self._ran) if each.node not in reported]
        lines = [f"{on_node(node)}{deviation.line()}" for node, deviation in unexpected]
        lines += [each.line() for each in differing]
        self._assertion = ("failed" if lines else "passed", tuple(lines))
        errors = [_unexpected(node, deviation) for node, deviation in unexpected]
        errors += [each.error() for each in differing]
        for error in errors:
            self._raise_or_warn(error, self._plan.settings.kernel_assertion, say)
        if slow := plain_torch_on_the_cpu(self._ran):
            say(f"warning: {slow}")

    def _run_canary(
        self,
        reports: Sequence[Mapping[str, Any]],
        names: tuple[str, ...],
        generates: bool,
        say: Callable[[str], None],
    ) -> None:
        self._canary = ("running", ())
        findings = self._findings(reports, names, generates, say)
        failed = [finding for finding in findings if finding.verdict == "failed"]
        self._canary = ("failed" if failed else "passed", tuple(findings))
        for finding in failed:
            error = NibbleError(
                ExitCode.CANARY,
                what=f"the canary failed: {finding.mechanism}: {finding.detail}",
                action=ACTION,
            )
            self._raise_or_warn(error, self._plan.settings.canary, say)
        for finding in findings:
            if finding.warning or (
                finding.verdict == "not compared" and finding.mechanism != "layers"
            ):
                say(f"warning: canary: {finding.line()}")
        took = sum(finding.seconds for finding in findings)
        passed = [finding.mechanism for finding in findings if finding.verdict == "passed"]
        say(
            f"canary: {', '.join(passed) or 'nothing'} passed in {took:.1f} s"
            if not failed
            else "canary: failed, see above"
        )

    def _findings(
        self,
        reports: Sequence[Mapping[str, Any]],
        names: tuple[str, ...],
        generates: bool,
        say: Callable[[str], None],
    ) -> list[Finding]:
        plan = self._plan
        if not generates:
            return run_canary(None, reports)
        references = references_of(plan, activations_of(reports))
        computed = computed_references(plan, self._computed(), activations_of(reports))
        if references is None and computed is None:
            say(how_to_record(plan, self._api.url))
        Asker(self._api, names[0], WARM_UP_S).warm_up()
        asker = Asker(self._api, names[0], BUDGET_S)
        drafts = "--speculative-config" in plan.args
        floor = plan.recipe.min_acceptance if plan.recipe else None
        return run_canary(
            asker,
            reports,
            references,
            computed,
            tools=calls_tools(plan),
            drafts=drafts,
            # vLLM 0.32's engine ends on the CPU when top_k meets drafts
            # (v1/sample/ops/topk_topp_sampler.py:533, without Triton).
            samples=not (drafts and plan.target.device == "cpu"),
            floor=floor,
        )

    @staticmethod
    def _raise_or_warn(error: NibbleError, how: str, say: Callable[[str], None]) -> None:
        """`how`: "strict" or "warn", the value of a setting."""
        if how == "strict":
            raise error
        say(f"warning: {error.line()}")


def is_dummy(plan: Plan) -> bool:
    """Whether vLLM makes random weights, as for a benchmark."""
    load_format = plan.args.get("--load-format")
    return load_format is not None and load_format.value == "dummy"


def calls_tools(plan: Plan) -> bool:
    """Whether the model may call tools. vLLM 0.32 answers 400 to `tool_choice: auto` unless both
    flags are set (renderers/online_renderer.py:264).
    """
    automatic = plan.args.get("--enable-auto-tool-choice")
    return "--tool-call-parser" in plan.args and automatic is not None and automatic.value is True


def read_reports(folder: Path, of_the_living: bool = False) -> list[WorkerReport]:
    """The reports of this machine's workers, sorted by rank.

    `of_the_living`: skip workers that have ended, for a folder that several runs of vLLM share.
    """
    files = list(folder.glob(WORKER_REPORTS))
    if of_the_living:
        files = [file for file in files if Path("/proc", reporting_pid(file)).exists()]
    reports: list[WorkerReport] = [json.loads(file.read_text()) for file in files]
    return sorted(reports, key=lambda report: report["rank"])


def reference_files(model: str, folder: Path | None) -> list[Path]:
    """Files that may have recorded answers, in the order of preference.

    First beside the recipe of `model`, if it is a Hugging Face id, then in the model's `folder`.
    """
    names = (CANARY_FILE, WEIGHT_ONLY_CANARY_FILE)
    recipe = recipe_path(model, root())
    beside_recipe = [recipe.with_suffix(f".{name}") for name in names] if recipe else []
    return beside_recipe + ([folder / name for name in names] if folder else [])


def references_of(plan: Plan, activations: tuple[str, ...]) -> References | None:
    """The recorded answers for the formats of activations that ran, or None."""
    folder = plan.checkpoint.path if plan.checkpoint is not None else None
    paths = reference_files(str(plan.settings.model), folder)
    differs = _differs(plan)
    # Tensor-parallel ranks add partial sums that are rounded to BF16. The rounding decides which
    # FP4 code an activation near a midpoint gets.
    ranks = plan.args.get("--tensor-parallel-size")
    differs |= "fp4" in activations and ranks is not None and int(ranks.value) > 1
    return references_like(paths, activations, differs, arithmetic_of(plan))


def arithmetic_of(plan: Plan) -> dict[str, str]:
    """What decides how a model's sums are rounded: the hardware, and the build of the kernels."""
    return {"hardware": plan.hardware.arithmetic(plan.target.device), "build": compiled_id()}


def _differs(plan: Plan) -> bool:
    """Whether flags change the model's numbers."""
    options = plugin_options(values_of(plan.args))
    return any(flag in plan.args for flag in OTHER_NUMBERS) or "quantize_lm_head" in options


def computed_references(
    plan: Plan, files: Mapping[str, Path], activations: tuple[str, ...]
) -> References | None:
    """The computed reference for the activations that ran, or None.

    files: references by format of activations. Prompts are sent as tokens if the server's template
    or tokenizer is not the checkpoint's.
    """
    file = files.get("fp4" if "fp4" in activations else "bf16")
    data = read_reference(file) if file else None
    if file is None or data is None:
        return None
    replaced = any(flag in plan.args for flag in OTHER_TOKENS)
    # vLLM renders these with other code than the checkpoint's template: mistral-common and harmony.
    mistral = plan.checkpoint is not None and "tekken.json" in plan.checkpoint.files
    harmony = plan.checkpoint is not None and plan.checkpoint.model_type == "gpt_oss"
    as_tokens = replaced or mistral or harmony or bool(data.get("template_is_dated"))
    return references_from(data, str(file), as_tokens, _differs(plan))


def how_to_record(plan: Plan, url: str) -> str:
    """The message for a model without recorded answers. `url`: of the server."""
    model = str(plan.settings.model)
    local = plan.checkpoint is not None and plan.checkpoint.is_local
    where = f"--out {Path(plan.model) / CANARY_FILE}" if local else f"--recipe {model}"
    return (
        f"canary: no answers are recorded for {model}: a wrong chat template, tokenizer or"
        " checkpoint may pass; once you know that this server is right, record them with `python"
        f" models/record_canary.py --url {url} {where}`"
    )


def _unexpected(node: str, deviation: Deviation) -> NibbleError:
    action = "name a kernel with --linear-backend, --moe-backend or --attention-backend"
    error = deviation.error(action)
    what = f"{on_node(node)}{error.what}"
    return NibbleError(error.code, what=what, expected=error.expected, action=error.action)


def workers(plan: Plan) -> int:
    """The least number of workers that report, on all nodes together.

    vLLM places data parallel replicas itself: then one per node is certain.
    """
    return plan.topology.nodes or 1 if "--data-parallel-size" in plan.args else plan.topology.ranks


def _missing_reports(reports: int, workers: int, silent: Sequence[str]) -> NibbleError:
    """The error for workers without a report: the plugin is not installed, or VLLM_PLUGINS
    excludes it.
    """
    allowed = os.environ.get(ALLOWED_PLUGINS)
    action = "install the nibble-kernels of this nibble (run `make setup`, or use the image)"
    if allowed is not None and REPORT_PLUGIN not in allowed.split(","):
        action = f"add {REPORT_PLUGIN} to {ALLOWED_PLUGINS} or unset it"
    reporting = f"only {reports} of {workers} workers" if reports else "no worker"
    if silent:
        reporting = f"no worker on node {', '.join(silent)}"
    return NibbleError(
        ExitCode.CANARY,
        what=f"{reporting} reported its kernels",
        expected=f"a report of nibble's plugin {REPORT_PLUGIN} from each worker",
        action=f"{action}; {STRICT_ACTION}",
    )

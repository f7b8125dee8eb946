"""The checks between the first answer and ready: kernels against the plan, and the canary."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibble.canary import BUDGET_S, Finding, run_canary
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
from nibble.engine.api import Api
from nibble.engine.contract import (
    ALLOWED_PLUGINS,
    REFERENCES,
    REFERENCES_PENDING,
    REPORT_FOLDER,
    REPORT_PLUGIN,
    WORKER_REPORTS,
    WorkerReport,
    reporting_pid,
)
from nibble.engine.installed import has_plugin
from nibble.errors import ExitCode, NibbleError
from nibble.hub.files import CANARY_FILE, WEIGHT_ONLY_CANARY_FILE
from nibble.machine.paths import root
from nibble.plan.choice import values_of
from nibble.plan.nvfp4_options import asked as plugin_options
from nibble.recipes.recipe import recipe_path
from nibble.reference.store import layer_files, read_reference

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

WARM_UP_S = 600.0  # log-probs are compiled at their first use
# Flags under which a model's numbers are not those that were recorded.
OTHER_NUMBERS = (
    "--kv-cache-dtype",
    "--quantization",
    "--dtype",
    "--hf-overrides",
)
# Flags under which a prompt has other tokens than the checkpoint's own tokenizer and template give
# it.
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
    """One start's proof. `run` is called once, in a thread; `to_json` at any time."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        api: Api,
        elsewhere: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]] = dict,
        computed: Callable[[], Mapping[str, Path]] = dict,
    ) -> None:
        """`elsewhere` gives the reports of the workers on other nodes, by the node's name;
        `computed` waits for references by activations, for which workers wait too."""
        self._plan, self._folder, self._api, self._elsewhere = plan, folder, api, elsewhere
        self._ran: list[Any] = []
        self._assertion: tuple[str, tuple[str, ...]] = ("pending", ())
        self._canary: tuple[str, tuple[Finding, ...]] = ("pending", ())
        self._computed = computed
        folder.mkdir()
        (folder / REFERENCES_PENDING).touch()
        threading.Thread(target=self._hand_over, name="hand over references", daemon=True).start()

    def _hand_over(self) -> None:
        """Workers that are warm wait until REFERENCES_PENDING is away."""
        try:
            files = json.dumps(layer_files(self._computed()))
            with suppress(FileNotFoundError):  # the run is over
                (self._folder / REFERENCES).write_text(files)
        finally:
            (self._folder / REFERENCES_PENDING).unlink(missing_ok=True)

    def environ(self) -> dict[str, str]:
        """For vLLM's processes."""
        return {REPORT_FOLDER: str(self._folder)}

    def to_json(self) -> dict[str, Any]:
        """For /status: both verdicts, what ran, and each mechanism's finding."""
        assertion, lines = self._assertion
        canary, findings = self._canary
        return {
            "assertion": {"verdict": assertion, "deviations": list(lines), "ran": self._ran},
            "canary": {
                "verdict": canary,
                "findings": [finding.to_json() for finding in findings],
                "hardware": self._plan.hardware.arithmetic(self._plan.target.device),
            },
        }

    def run(self, names: tuple[str, ...], generates: bool, say: Callable[[str], None]) -> None:
        """Raises CANARY for a kernel or an answer that is to end the start; OSError where vLLM
        went away.
        """
        elsewhere = self._elsewhere()
        by_node = {"": read_reports(self._folder), **elsewhere}
        reports = [{**report, "node": node} for node, found in by_node.items() for report in found]
        told = [report for report in reports if report["ran"] is not None]
        self._ran = [
            report["ran"]
            | {
                "activations": activations_of([report]),
                "node": report["node"],
                "rank": report["rank"],
            }
            for report in told
        ]
        for problem in dict.fromkeys(report["problem"] for report in reports if report["problem"]):
            say(f"warning: a worker could not report all kernels: {problem}")
        self._assert_kernels(
            len(reports), [node for node, found in elsewhere.items() if not found], say
        )
        if self._plan.settings.canary == "off":
            self._canary = ("off", ())
        elif is_dummy(self._plan):
            self._canary = ("no weights to check", ())
        else:
            self._ask(reports, names, generates, say)

    def _assert_kernels(
        self, reports: int, silent: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._assertion = ("unknown", ())
        if silent or reports < workers(self._plan):
            how = self._plan.settings.kernel_assertion if has_plugin(REPORT_PLUGIN) else "warn"
            self._tell(_silence(reports, workers(self._plan), silent), how, say)
        if not self._ran:
            return
        expected = expectations(self._plan, os.environ)
        found = [
            (node, one)
            for node in dict.fromkeys(ran["node"] for ran in self._ran)
            for one in deviations(expected, [ran for ran in self._ran if ran["node"] == node])
        ]
        wrong_nodes = {node for node, _ in found}
        unlike = [one for one in disagreements(self._ran) if one.node not in wrong_nodes]
        lines = [f"{on_node(node)}{one.line()}" for node, one in found] + [
            one.line() for one in unlike
        ]
        self._assertion = ("failed" if lines else "passed", tuple(lines))
        for error in [
            *(_unexpected(node, one) for node, one in found),
            *(one.error() for one in unlike),
        ]:
            self._tell(error, self._plan.settings.kernel_assertion, say)
        if slow := plain_torch_on_the_cpu(self._ran):
            say(f"warning: {slow}")

    def _ask(
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
            self._tell(error, self._plan.settings.canary, say)
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
    def _tell(error: NibbleError, how: str, say: Callable[[str], None]) -> None:
        if how == "strict":
            raise error
        say(f"warning: {error.line()}")


def is_dummy(plan: Plan) -> bool:
    """Whether weights are made up, as for a benchmark."""
    found = plan.args.get("--load-format")
    return found is not None and found.value == "dummy"


def calls_tools(plan: Plan) -> bool:
    """Whether the model may call tools: vLLM 0.32 answers 400 to that unless both are set
    (renderers/online_renderer.py:264).
    """
    automatic = plan.args.get("--enable-auto-tool-choice")
    return "--tool-call-parser" in plan.args and automatic is not None and automatic.value is True


def read_reports(folder: Path, of_the_living: bool = False) -> list[WorkerReport]:
    """What this machine's workers wrote, by rank; of those that still run, where the folder
    outlives a run of vLLM's.
    """
    files = list(folder.glob(WORKER_REPORTS))
    if of_the_living:
        files = [file for file in files if Path("/proc", reporting_pid(file)).exists()]
    found: list[WorkerReport] = [json.loads(file.read_text()) for file in files]
    return sorted(found, key=lambda report: report["rank"])


def reference_files(model: str, folder: Path | None) -> list[Path]:
    """Where recorded answers may lie, the first first: beside the recipe of a Hugging Face id,
    then in the model's folder.
    """
    beside = recipe_path(model, root())
    found = (
        [beside.with_suffix(f".{name}") for name in (CANARY_FILE, WEIGHT_ONLY_CANARY_FILE)]
        if beside
        else []
    )
    return (
        found + [folder / name for name in (CANARY_FILE, WEIGHT_ONLY_CANARY_FILE)]
        if folder
        else found
    )


def references_of(plan: Plan, activations: tuple[str, ...]) -> References | None:
    """Those that were recorded with the same activations, if there are such."""
    folder = plan.checkpoint.path if plan.checkpoint is not None else None
    paths = reference_files(str(plan.settings.model), folder)
    differs = _differs(plan)
    # Ranks add up parts that are rounded to BF16, which decides about FP4 activations near the
    # middle of two values.
    ranks = plan.args.get("--tensor-parallel-size")
    differs |= "fp4" in activations and ranks is not None and int(ranks.value) > 1
    return references_like(
        paths, activations, differs, plan.hardware.arithmetic(plan.target.device)
    )


def _differs(plan: Plan) -> bool:
    """Whether flags change numbers."""
    options = plugin_options(values_of(plan.args))
    return any(flag in plan.args for flag in OTHER_NUMBERS) or "quantize_lm_head" in options


def computed_references(
    plan: Plan, files: Mapping[str, Path], activations: tuple[str, ...]
) -> References | None:
    """The computed reference for the activations that ran.

    Conversations become tokens where the server's template or tokenizer is not the checkpoint's.
    """
    file = files.get("fp4" if "fp4" in activations else "bf16")
    data = read_reference(file) if file else None
    if file is None or data is None:
        return None
    of_its_own = any(flag in plan.args for flag in OTHER_TOKENS)
    files_of_its_own = plan.checkpoint is not None and "tekken.json" in plan.checkpoint.files
    harmony = plan.checkpoint is not None and plan.checkpoint.model_type == "gpt_oss"
    as_tokens = of_its_own or files_of_its_own or harmony or bool(data.get("template_is_dated"))
    return references_from(data, str(file), as_tokens, _differs(plan))


def how_to_record(plan: Plan, url: str) -> str:
    """What a server says whose model has no recorded answers."""
    model, local = (
        str(plan.settings.model),
        plan.checkpoint is not None and plan.checkpoint.is_local,
    )
    where = f"--out {Path(plan.model) / CANARY_FILE}" if local else f"--recipe {model}"
    return (
        f"canary: no answers are recorded for {model}: a wrong chat template, tokenizer or"
        " checkpoint may pass; once you know that this server is right, record them with `python"
        f" models/record_canary.py --url {url} {where}`"
    )


def _unexpected(node: str, found: Deviation) -> NibbleError:
    error = found.error("name a kernel with --linear-backend, --moe-backend or --attention-backend")
    return NibbleError(
        error.code,
        what=f"{on_node(node)}{error.what}",
        expected=error.expected,
        action=error.action,
    )


def workers(plan: Plan) -> int:
    """How many workers report on all nodes, at least: vLLM places data parallel replicas itself."""
    return plan.topology.nodes or 1 if "--data-parallel-size" in plan.args else plan.topology.ranks


def _silence(reports: int, workers: int, silent: Sequence[str]) -> NibbleError:
    """Some workers did not report: an installation without the plugin, or one that excludes it
    out.
    """
    allowed = os.environ.get(ALLOWED_PLUGINS)
    action = "install the nibble-kernels of this nibble (run `make setup`, or use the image)"
    if allowed is not None and REPORT_PLUGIN not in allowed.split(","):
        action = f"add {REPORT_PLUGIN} to {ALLOWED_PLUGINS} or unset it"
    who = f"only {reports} of {workers} workers" if reports else "no worker"
    if silent:
        who = f"no worker on node {', '.join(silent)}"
    what = f"{who} reported its kernels"
    return NibbleError(
        ExitCode.CANARY,
        what=what,
        expected=f"a report of nibble's plugin {REPORT_PLUGIN} from each worker",
        action=f"{action}; {STRICT_ACTION}",
    )

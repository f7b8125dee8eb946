"""This machine as one with other GPUs, and results of trials on it."""

from __future__ import annotations

import importlib.metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import read_checkpoint
from nibble.engine import installed
from nibble.machine.hardware import Hardware
from nibble.machine.targets import load_target
from nibble.plan import gather
from nibble.plan.expert_shapes import expert_uses
from nibble.plan.fp4_products import has_our_fp4_products
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.linear_shapes import e4m3_uses, linear_uses
from nibble.plan.plan import Plan
from nibble.serve import first_trials
from nibble.trials.choose import E4M3, EXPERTS, EXPERTS_FP4, LINEAR, LINEAR_FP4
from nibble.trials.place import place_of
from nibble.trials.record import Record, ShapeTimes, open_record
from nibble.trials.trial import Outcome, Verdict


class Machine:
    """This machine as one with these GPUs, and results of trials on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, hardware: Hardware) -> None:
        self.folder, self.hardware = folder, hardware
        monkeypatch.setattr(gather, "detect", lambda environ: hardware)
        kernels = folder / "nibble_kernels"
        kernels.mkdir()
        (kernels / "_cuda.abi3.so").touch()
        spec = ModuleSpec("nibble_kernels", None, is_package=True)
        spec.submodule_search_locations = [str(kernels)]
        point = importlib.metadata.EntryPoint("nibble", "a:b", "vllm.general_plugins")
        monkeypatch.setattr(installed, "entry_points", lambda **_: [point])
        monkeypatch.setattr(installed, "find_spec", lambda name: spec)
        for module in (gather, first_trials):
            known = module.place_of
            monkeypatch.setattr(
                module, "place_of", lambda *a, known=known, **k: known(*a, compiled="here")
            )

    def plan(self, model: Path, *words: str, **environ: str) -> Plan:
        given = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/nonexistent"}
        given |= {"NIBBLE_CACHE_DIR": str(self.folder)} | environ
        return plan_for(read_wishes([str(model), *words], given))

    def record(self, target: str) -> Record:
        place = place_of(load_target(target), self.hardware, compiled="here")
        return open_record(self.folder, place, lambda line: None)

    def measured(
        self,
        model: Path,
        target: str,
        ratio: float | dict[str, float] = 0.5,
        verdicts: dict[str, Verdict] | None = None,
        form: Any = "bf16",
    ) -> None:
        """Keep verdicts, and times of a model's shapes with these ratios of nibble's to vLLM's."""
        ours = (LINEAR_FP4 if self._in_fp4(target, form) else LINEAR).ours
        known: dict[str, Verdict] = {ours: "right", f"vllm:auto:{form}": "right"}
        outcomes = [Outcome(name, verdict) for name, verdict in (known | (verdicts or {})).items()]
        shapes: dict[str, ShapeTimes] = {}
        for use in linear_uses(read_checkpoint(str(model)), 1, form):
            each = ratio.get(use.key.split()[0], 0.5) if isinstance(ratio, dict) else ratio
            shapes[use.key] = ShapeTimes({"1": 10 * each}, {"1": 10.0}, "Marlin")
        self.record(target).with_outcomes(outcomes).with_shapes(shapes).save(print)

    @staticmethod
    def _in_fp4(target: str, form: str) -> bool:
        return form == "fp4" and has_our_fp4_products(load_target(target))

    def measured_experts(
        self,
        model: Path,
        target: str,
        ratio: float | None = 0.5,
        *words: str,
        form: Any = "bf16",
        **verdicts: Verdict,
    ) -> None:
        """The same for its experts; without a ratio, verdicts alone."""
        part = EXPERTS_FP4 if self._in_fp4(target, form) else EXPERTS
        known: dict[str, Verdict] = {"ours": "right", "vllm": "right"}
        known |= verdicts
        outcomes = [
            Outcome(part.ours, known["ours"]),
            Outcome(part.vllm_choice(form), known["vllm"]),
        ]
        found = self.record(target).with_outcomes(outcomes)
        if ratio is not None:
            args = self.plan(model, *words).args.plain
            shapes = {
                use.key: ShapeTimes({"1": 10 * ratio}, {"1": 10.0}, "MARLIN")
                for use in expert_uses(read_checkpoint(str(model)), args, form)
            }
            found = found.with_shapes(shapes)
        found.save(print)

    def measured_e4m3(
        self,
        model: Path,
        target: str,
        ratio: float | dict[str, float] | None = 0.5,
        rows: str = "1",
        ours: Verdict = "right",
        theirs: Verdict = "right",
    ) -> None:
        """The same for its FP8 linear layers; without a ratio, verdicts alone."""
        uses = e4m3_uses(read_checkpoint(str(model)), 1)
        outcomes = [Outcome(E4M3.vllm_choice(use.form), theirs) for use in uses]
        shapes = dict(self.record(target).shapes)
        for use in uses if ratio is not None else ():
            each = ratio.get(use.key.split()[0], 0.5) if isinstance(ratio, dict) else ratio
            known = shapes.get(use.key, ShapeTimes())
            shapes[use.key] = ShapeTimes(
                {**known.nibble, rows: 10 * (each or 0)}, {**known.vllm, rows: 10.0}, "Cutlass"
            )
        record = self.record(target).with_outcomes([*outcomes, Outcome(E4M3.ours, ours)])
        record.with_shapes(shapes).save(print)

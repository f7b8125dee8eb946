"""What nibble and its vLLM plugin agree on: names and shapes of nibble/engine/contract."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from nibble.canary import agreement, kernels
from nibble.engine import contract
from nibble.engine.contract import Options, pulse, reference, report
from nibble.engine.contract.pulse import PulseRecord
from nibble.engine.contract.reference import InsidePoint
from nibble.engine.contract.report import KernelsUsed
from nibble.settings.options import Settings
from tests.support.paths import ROOT


def imported_by(statement: str) -> list[str]:
    """Modules that a process has after `statement` and had not before it."""
    program = (
        "import json, sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


MODULES = [
    "contract.pulse",
    "contract.reference",
    "contract.report",
    "plugin",
    "plugin.tokenmonster",
]


@pytest.mark.parametrize("module", MODULES)
def test_a_process_of_vllms_gets_nothing_of_nibble_but_the_contract_and_the_plugin(
    module: str,
) -> None:
    """vLLM loads the plugin in each process; an import that fails there would only be logged."""
    found = imported_by(f"import nibble.engine.{module}")
    own = [name for name in found if name.split(".")[0] == "nibble"]
    allowed = ("nibble.engine.contract", "nibble.engine.plugin")
    assert [name for name in own if not name.startswith(allowed)] == ["nibble", "nibble.engine"]
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names == {"nibble"}
    assert not (ROOT / "nibble/engine/__init__.py").read_text().strip()


def test_options_have_the_values_of_the_settings_and_of_the_operators() -> None:
    from nibble_kernels.quartet2 import Mode

    types = get_type_hints(Options)
    assert tuple(types) == (*contract.OPTIONS, *contract.PLANNED_OPTIONS)
    for name in contract.OPTIONS:
        kind = types[name]
        offered = set(get_args(Settings.model_fields[name].annotation))
        assert offered - {"auto"} == set(get_args(kind)), name
        # nibble passes on what is not the default: the plugin's own default must be the same.
        default = Settings.model_fields[name].default
        of_auto: dict[str, object] = dict.fromkeys(
            ("compact_json", "step_graph", "attention_front", "linear_attention", "shared_expert"),
            "off",
        )
        of_auto["draft_head"] = "bf16"
        of_auto |= dict.fromkeys(("linear_kernel", "moe_kernel", "attention_kernel"), "vllm")
        assert getattr(Options(), name) == of_auto.get(name, default), name
    assert get_args(Mode) == get_args(contract.ScaleMode)


@pytest.mark.parametrize(
    ("additional", "problem"),
    [
        ({"nibble": {"linear_kernel": "marlin"}}, r"nibble\.linear_kernel is 'marlin': .* nibble$"),
        ({"nibble": {"linear": "nibble"}}, "expected one of nvfp4_activations, quantize_lm_head"),
        ({"nibble": "linear_kernel"}, "nibble is 'linear_kernel': expected an object"),
    ],
)
def test_options_that_do_not_exist_are_refused(additional: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Options.from_config(additional)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, object(), {"nibble": {}}])
def test_without_options_the_defaults_hold(additional: object) -> None:
    assert Options.from_config(additional) == Options()


def test_options_reach_the_plugin() -> None:
    found = Options.from_config({"nibble": {"nvfp4_activations": "bf16"}})
    assert found == Options(nvfp4_activations="bf16") and found.weights_only


def test_the_supervisor_asks_reports_for_what_they_have() -> None:
    """`activations` is the supervisor's own addition."""
    keys = set(KernelsUsed.__annotations__)
    asked = {*agreement.OF_ALL, *agreement.OF_A_STAGE} - {"activations"}
    asked |= {*kernels.BACKEND_FLAGS.values(), *kernels.OUR_KERNELS}
    assert asked <= keys


@pytest.mark.parametrize("file", sorted((ROOT / "targets").glob("*.toml")), ids=lambda f: f.stem)
def test_targets_expect_classes_that_the_plugin_has(file: Path) -> None:
    expected = tomllib.loads(file.read_text()).get("expected", {})
    names = [name for part in ("linear", "moe") for name in expected.get(part, ())]
    ours = [name for name in names if name.startswith(("Cpu", "Nibble"))]
    assert set(ours) <= contract.OUR_CLASSES


def test_a_class_of_another_name_than_reported_does_not_load() -> None:
    with pytest.raises(TypeError, match=f"Renamed is {contract.GPU_LINEAR}"):

        @contract.reported_as(contract.GPU_LINEAR)
        class Renamed:
            pass


def test_a_name_of_a_point_within_a_layer_is_read_as_it_was_written() -> None:
    point = InsidePoint(12, 3, ["self_attn.q_proj", "self_attn.k_proj"])
    assert point.key == "inside:12:3:self_attn.q_proj,self_attn.k_proj"
    assert InsidePoint.from_key(point.key) == point
    for other in (reference.inside_noise(12), reference.norm_key("a.norm.weight"), "inputs"):
        assert InsidePoint.from_key(other) is None
    assert reference.norm_name(reference.norm_key("a.norm.weight")) == "a.norm.weight"
    assert reference.norm_name(point.key) == ""


def test_a_pulse_is_read_as_it_was_written() -> None:
    record, memory = PulseRecord(7, pulse.CALL, True, 9, 3, 512), bytearray(pulse.PULSE_BYTES)
    record.write(memory)
    assert memory.hex() == "6e626c70756c7331" + "07000000" + "0201" + "0000" + "".join(
        number.to_bytes(8, "little").hex() for number in (9, 3, 512)
    )
    assert PulseRecord.from_bytes(bytes(memory)) == record
    assert PulseRecord.from_bytes(b"x" + bytes(memory[1:])) is None


def test_the_process_of_a_report_is_in_its_name() -> None:
    name = report.worker_report(4711)
    assert name == "worker-4711.json" and Path(name).match(report.WORKER_REPORTS)
    assert report.reporting_pid(Path("/x") / name) == "4711"


def test_formats_are_those_of_the_layers_with_weights() -> None:
    checks: list[Any] = [
        {"part": "linear", "activations": ["bf16", "fp4, one scale"]},
        {"part": "moe", "activations": ["plain"]},
        {"part": "attention", "activations": ["fp8"]},
    ]
    assert report.formats_of(checks) == {"bf16", "fp4", "plain"}

"""Targets are data, complete and consistent."""

from __future__ import annotations

import pytest

from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import TARGET_NAMES, load_target, target_for_capability
from nibble.recipes.schema_checks import ECOSYSTEM_PREFIXES


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_a_target_file_is_complete(name: str) -> None:
    target = load_target(name)
    assert target.name == name and target.title and target.platforms
    assert (target.device == "cuda") == bool(target.capabilities) == bool(target.gpu_models)
    assert target.image["base"] and target.image["runtime_base"]


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_every_default_of_a_target_has_a_reason_and_evidence_and_exists_in_vllm(name: str) -> None:
    schema = load_schema()
    target = load_target(name)
    for flag, default in target.args.items():
        assert schema.check_value(flag, default.value) is None
        assert default.reason and default.evidence.split(":")[0] in (
            "measured",
            "reported",
            "estimated",
        )
    for variable, default in target.env.items():
        assert schema.env_exists(variable) or variable.startswith(ECOSYSTEM_PREFIXES)
        assert default.reason and default.evidence


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((12, 1), "gb10"),
        ((12, 0), "sm120"),
        ((10, 0), "b200"),
        ((10, 3), "b200"),
        ((9, 0), "hopper"),
        ((8, 9), None),
    ],
)
def test_a_compute_capability_has_one_target(capability: tuple[int, int], name: str | None) -> None:
    target = target_for_capability(capability)
    assert (target.name if target else None) == name


def test_no_target_builds_for_a_plain_blackwell_architecture() -> None:
    # ptxas 13.0 refuses the FP4 conversion and MMA for plain targets.
    lists = {name: load_target(name).torch_cuda_arch_list for name in TARGET_NAMES}
    assert lists == {
        "gb10": "12.0f",
        "sm120": "12.0f",
        "b200": "10.0f",
        "hopper": "9.0a",
        "cpu": "",
    }


def test_the_most_specific_product_name_wins() -> None:
    sm120 = load_target("sm120")
    server = sm120.gpu_model("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    max_q = sm120.gpu_model("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    assert server is not None and server.bandwidth_bytes_per_s == 1597e9
    assert max_q is not None and max_q.bandwidth_bytes_per_s == 1792e9
    assert sm120.gpu_model("NVIDIA GeForce RTX 5080") is None


def test_an_unknown_target_is_refused_with_the_list() -> None:
    with pytest.raises(NibbleError, match="gb10, sm120, b200, hopper, cpu"):
        load_target("sm90")


def test_a_root_without_nibbles_files_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_ROOT", "/nowhere")
    with pytest.raises(NibbleError) as caught:
        load_target.__wrapped__("cpu")
    assert (
        caught.value.code is ExitCode.CONFIG and "/nowhere/targets/cpu.toml" in caught.value.line()
    )

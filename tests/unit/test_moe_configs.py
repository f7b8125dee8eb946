"""Tuned Triton MoE configurations: whose files a GPU gets if vLLM has none for it, and when none
are needed.
"""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from nibble.cli.serve import link_moe_configs
from nibble.machine.hardware import Gpu, Hardware
from nibble.machine.paths import root
from nibble.machine.targets import load_target
from nibble.plan import gather as prepare
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.moe_tuning import (
    VARIABLE,
    TunedConfigs,
    device_in_file_name,
    find_alias,
    installed_configs,
    make_folder,
)
from nibble.plan.plan import Plan
from tests.support.models.tiny_model import DEEPSEEK_MLA, MODELOPT_NVFP4, write_model

GIB = 1 << 30
MAX_Q = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
RTX_5090 = "NVIDIA GeForce RTX 5090"
WORKSTATION_FILE = (
    "E=128,N=704,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition,dtype=fp8_w8a8.json"
)
SERVER_FILE = "E=256,N=512,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition,dtype=fp8_w8a8,block_shape=[128,128].json"  # noqa: E501
FILES = (
    WORKSTATION_FILE,
    SERVER_FILE,
    "E=128,N=704,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition,dtype=fp8_w8a8.json",
    "E=256,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8,block_shape=[128,128].json",
    "E=8,N=3584,device_name=NVIDIA_GeForce_RTX_4090,dtype=fp8_w8a8.json",
    "E=16,N=1024,device_name=NVIDIA_B200.json",
    "E=16,N=1024,device_name=NVIDIA_B300_SXM6_AC.json",
    "E=16,N=1024,device_name=NVIDIA_H200.json",
    "E=16,N=1024,device_name=NVIDIA_H100_80GB_HBM3.json",
)


@pytest.fixture
def found(tmp_path: Path) -> TunedConfigs:
    folder = tmp_path / "configs"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(f'{{"1": {{"from": "{name[:20]}"}}}}')
    return TunedConfigs(folder, FILES)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, found: TunedConfigs) -> Any:
    def use(name: str, capability: tuple[int, int] = (12, 0)) -> None:
        gpu = Gpu(0, name, capability, 96 * GIB, 96 * GIB, "GPU-0")
        machine = Hardware(
            (gpu,), "580.105.08", "13.0", "x86_64", 8, frozenset(), 128 * GIB, 100 * GIB
        )
        monkeypatch.setattr(prepare, "detect", lambda environ: machine)
        monkeypatch.setattr(prepare, "installed_configs", lambda: found)

    return use


def plan(folder: Path, *words: str, **environ: str) -> Plan:
    return plan_for(read_wishes([str(folder), *words], environ))


@pytest.mark.parametrize("gpu", [MAX_Q, RTX_5090])
def test_a_card_without_files_gets_those_of_the_nearest_sm_count_and_bandwidth(
    gpu: str, found: TunedConfigs, tmp_path: Path
) -> None:
    alias = find_alias(gpu, load_target("sm120"), found, tmp_path)
    assert alias is not None and "unmeasured" in alias.reason
    device = device_in_file_name(gpu)
    # Workstation and Server Edition have 188 SMs; for what both have, the bandwidth decides.
    assert alias.links == {
        WORKSTATION_FILE.replace(
            "NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition", device
        ): WORKSTATION_FILE,
        SERVER_FILE.replace("NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition", device): SERVER_FILE,
    }


def test_a_card_with_files_of_its_own_or_an_unknown_one_gets_none(
    found: TunedConfigs, tmp_path: Path
) -> None:
    for gpu in (SERVER, "NVIDIA GeForce RTX 5080"):
        assert find_alias(gpu, load_target("sm120"), found, tmp_path) is None
    assert find_alias("NVIDIA GB10", load_target("gb10"), found, tmp_path) is None
    assert find_alias("NVIDIA H200 NVL", load_target("hopper"), found, tmp_path) is None


def test_only_devices_of_the_same_capability_are_taken(found: TunedConfigs, tmp_path: Path) -> None:
    alias = find_alias("NVIDIA GB300", load_target("b200"), found, tmp_path)
    assert alias is not None and set(alias.links.values()) == {
        "E=16,N=1024,device_name=NVIDIA_B300_SXM6_AC.json"
    }
    no_gb10 = TunedConfigs(found.folder, tuple(name for name in FILES if "GB10" not in name))
    assert find_alias("NVIDIA GB10", load_target("gb10"), no_gb10, tmp_path) is None


def test_the_folder_holds_the_files_under_this_gpus_name_and_nothing_else(
    found: TunedConfigs, tmp_path: Path
) -> None:
    alias = find_alias(MAX_Q, load_target("sm120"), found, tmp_path / "cache")
    assert alias is not None
    for _ in range(2):  # a second start finds the first one's folder
        make_folder(alias)
        (alias.folder / "left.json").write_text("of an older vLLM")
    make_folder(alias)
    assert {path.name for path in alias.folder.iterdir()} == set(alias.links)
    for name, source in alias.links.items():
        assert (alias.folder / name).read_text() == (found.folder / source).read_text()


def test_the_plan_of_a_moe_model_names_the_folder_and_why(on: Any, tmp_path: Path) -> None:
    on(MAX_Q)
    folder = write_model(tmp_path / "moe", DEEPSEEK_MLA)
    choice = plan(folder, NIBBLE_CACHE_DIR=str(tmp_path / "cache")).env[VARIABLE]
    assert choice.value == str(tmp_path / "cache" / "moe-configs" / device_in_file_name(MAX_Q))
    assert "188 SMs" in choice.reason and "unmeasured" in choice.reason


def test_a_cache_that_cannot_be_written_is_a_warning_and_no_end(
    on: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on(MAX_Q)
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder belongs")
    found = plan(write_model(tmp_path / "moe", DEEPSEEK_MLA), NIBBLE_CACHE_DIR=str(blocked))
    link_moe_configs(found)
    assert "warning" in capsys.readouterr().err
    blocked.unlink()
    link_moe_configs(found)
    assert Path(found.env[VARIABLE].value).is_dir() and not capsys.readouterr().err


def test_a_users_own_folder_stays(on: Any, tmp_path: Path) -> None:
    on(MAX_Q)
    file = tmp_path / "nibble.toml"
    file.write_text(f"[env]\n{VARIABLE} = '/mine'\n")
    folder = write_model(tmp_path / "moe", DEEPSEEK_MLA)
    for environ in ({VARIABLE: "/mine"}, {"NIBBLE_CONFIG": str(file)}):
        mine = plan(folder, **environ)
        assert mine.vllm_environ(environ)[VARIABLE] == "/mine" and mine.moe_alias is None


def test_nothing_is_set_where_no_expert_reads_such_files(on: Any, tmp_path: Path) -> None:
    nvfp4 = DEEPSEEK_MLA | {"quantization_config": MODELOPT_NVFP4}
    cases = [(write_model(tmp_path / "dense"), []), (write_model(tmp_path / "nvfp4", nvfp4), []),
             (write_model(tmp_path / "moe", DEEPSEEK_MLA), ["--enable-lora"])]  # fmt: skip
    on(MAX_Q)
    for folder, words in cases:
        assert VARIABLE not in plan(folder, *words).env
    on("NVIDIA GB10", (12, 1))
    assert VARIABLE not in plan(tmp_path / "moe").env  # vLLM has files for it
    # A card that is not here has no name
    assert VARIABLE not in plan(tmp_path / "moe", "--target", "sm120").env


# --- nibble's own data for GB10 ---

GB10_MOE = DEEPSEEK_MLA | {"n_routed_experts": 512, "moe_intermediate_size": 512}


def test_a_gb10_gets_nibbles_data_for_experts_that_vllm_has_none_for(
    on: Any, tmp_path: Path
) -> None:
    on("NVIDIA GB10", (12, 1))
    folder = write_model(tmp_path / "moe", GB10_MOE)
    found = plan(folder)
    choice = found.env[VARIABLE]
    assert choice.value == str(root() / "targets" / "moe" / "NVIDIA_GB10")
    assert "512 experts of 512 on NVIDIA_GB10" in choice.reason and "unmeasured" in choice.reason
    link_moe_configs(found)  # writes nothing
    narrow = write_model(tmp_path / "narrow", GB10_MOE | {"moe_intermediate_size": 640})
    assert VARIABLE not in plan(narrow).env
    mine = plan(folder, **{VARIABLE: "/mine"})
    assert mine.vllm_environ({VARIABLE: "/mine"})[VARIABLE] == "/mine"
    on(MAX_Q)
    assert "NVIDIA_GB10" not in plan(folder).env[VARIABLE].value


def test_its_tiles_fit_into_the_shared_memory_of_a_gb10() -> None:
    files = sorted((root() / "targets" / "moe" / "NVIDIA_GB10").glob("*.json"))
    assert files
    most = load_target("gb10").features.smem_bytes
    for path in files:
        each = 1 if "fp8" in path.name else 2
        for tiles in json.loads(path.read_text()).values():
            rows = tiles["BLOCK_SIZE_M"] + tiles["BLOCK_SIZE_N"]
            assert rows * tiles["BLOCK_SIZE_K"] * each * tiles["num_stages"] <= most, path.name


@pytest.mark.vllm
def test_the_data_are_what_the_script_makes_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm", reason="needs an importable vLLM")
    spec = spec_from_file_location("configs", root() / "targets" / "moe" / "gb10_configs.py")
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = root() / "targets" / "moe" / "NVIDIA_GB10"
    shipped = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert shipped == made.all_files()
    installed = installed_configs()
    assert installed is not None and shipped.keys().isdisjoint(installed.names)


@pytest.mark.vllm
def test_vllms_loader_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.fused_moe")
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "NVIDIA_GB10")
    monkeypatch.setenv(VARIABLE, str(root() / "targets" / "moe" / "NVIDIA_GB10"))
    for dtype in ("fp8_w8a8", None):
        fused_moe.get_moe_configs.cache_clear()
        found = fused_moe.get_moe_configs(512, 512, dtype)
        assert found is not None and 1 in found and 4096 in found
    fused_moe.get_moe_configs.cache_clear()


@pytest.mark.vllm
def test_the_installed_vllm_has_files_for_the_server_edition_and_none_for_max_q() -> None:
    pytest.importorskip("vllm", reason="needs an importable vLLM")
    found = installed_configs()
    assert found is not None
    devices = {
        name.split("device_name=")[1].split(",")[0].removesuffix(".json") for name in found.names
    }
    assert device_in_file_name(SERVER) in devices
    assert {device_in_file_name(MAX_Q), device_in_file_name(RTX_5090)}.isdisjoint(devices)

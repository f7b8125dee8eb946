"""Exports of the NVFP4 demo in forms that vLLM 0.32 alone refuses or reads wrongly: a real
server answers as the demo does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import read_checkpoint
from nibble.checkpoint.scale_values import TensorFiles
from tests.support.models.tiny_model import write_header
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

DEMO = ROOT / "models" / "nibble-demo-nvfp4"
QUESTIONS = [
    json.loads(line) for line in (ROOT / "models" / "demo_questions.jsonl").read_text().splitlines()
][:8]
# What vLLM reads of such files: tests/patches/test_nvfp4_configs_in_vllm.py.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DEMO.is_dir(), reason="the NVFP4 demo is not here"),
    pytest.mark.skipif(
        not entry_points(group="vllm.general_plugins", name="nibble"),
        reason="nibble-kernels is not installed",
    ),
]
Config = dict[str, Any]


def export(folder: Path, config: Config, legacy: Config | None, has_input_scales: bool) -> Path:
    """The demo with other JSON files, with or without its activation scales."""
    shutil.copytree(DEMO, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    if legacy is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(legacy))
    kept = [
        t
        for t in read_checkpoint(str(DEMO)).tensors.values()
        if has_input_scales or "input_scale" not in t.name
    ]
    header = write_header({tensor.name: (tensor.dtype, list(tensor.shape)) for tensor in kept})
    with TensorFiles(DEMO) as files:
        data = b"".join(chunk for tensor in kept for chunk in files.chunks(tensor))
    (folder / "model.safetensors").write_bytes(header + data)
    return folder


def weight_only_labelled_w4a4(folder: Path) -> Path:
    return export(
        folder, json.loads((DEMO / "config.json").read_text()), None, has_input_scales=False
    )


def legacy(folder: Path, algorithm: str, has_input_scales: bool, **more: Any) -> Path:
    config = json.loads((DEMO / "config.json").read_text())
    del config["quantization_config"]
    inner = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": None,
    }
    declared = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner | more}
    return export(folder, config, declared, has_input_scales)


def legacy_w4a16(folder: Path) -> Path:
    return legacy(folder, "W4A16_NVFP4", has_input_scales=False)


def legacy_mixed(folder: Path) -> Path:
    modules = [weight.module for weight in read_checkpoint(str(DEMO)).nvfp4]
    return legacy(
        folder,
        "MIXED_PRECISION",
        True,
        quantized_layers={name: {"quant_algo": "NVFP4"} for name in modules},
    )


@pytest.mark.parametrize("make", [weight_only_labelled_w4a4, legacy_w4a16, legacy_mixed])
def test_an_export_answers_as_the_demo_does(make: Callable[[Path], Path], tmp_path: Path) -> None:
    server = Server(
        tmp_path / "server",
        ["serve", str(make(tmp_path / "model")), "--max-model-len", "256", "--enforce-eager"],
    )
    try:
        server.wait_until_ready()
        assert any("NVFP4 scale tensors" in line for line in server.said())
        for question in QUESTIONS:
            body = {
                "model": "default",
                "messages": [{"role": "user", "content": question["question"]}],
                "temperature": 0,
                "max_tokens": 120,
            }
            status, answer = server.ask("/v1/chat/completions", body)
            assert (status, answer["choices"][0]["message"]["content"].strip()) == (
                200,
                question["answer"],
            )
    finally:
        server.end()

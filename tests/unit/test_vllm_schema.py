"""The snapshot of what vLLM 0.32 accepts, and the questions asked of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nibble.engine.live_schema import drift, live_schema, write_snapshot
from nibble.engine.schema import SNAPSHOT, Schema, load_schema
from nibble.errors import ExitCode, NibbleError
from tests.support.processor_time import within


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("-tp", "--tensor-parallel-size"),
        ("-cc", "--compilation-config"),
        ("-O", "--optimization-level"),
        ("--max_model_len", "--max-model-len"),
        ("max-model-len", "--max-model-len"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching"),
    ],
)
def test_aliases_and_underscores_name_the_long_flag(written: str, name: str) -> None:
    spec = load_schema().flag(written)
    assert spec is not None
    assert spec.name == name


@pytest.mark.parametrize(
    "written",
    ["--max-model", "--no-headless", "--no-max-model-len", "-x", "--disable-log-requests"],
)
def test_what_is_no_flag_is_none(written: str) -> None:
    assert load_schema().flag(written) is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-model-len", "64k"),
        ("--max-model-len", "auto"),
        ("--max-model-len", -1),
        ("--gpu-memory-utilization", 1),
        ("--attention-backend", "flashinfer"),
        ("--moe-backend", "FLASHINFER-CUTLASS"),
        ("--distributed-executor-backend", "my.module.Executor"),
        ("--mm-processor-device", "cuda"),
        ("--speculative-config", {"method": "mtp", "num-speculative-tokens": 2}),
        ("--compilation-config", {"mode": 3, "cudagraph_mode": "piecewise"}),
        ("--override-generation-config", '{"max_new_tokens": null}'),
        ("--hf-overrides", {"anything": {"goes": 1}}),
        ("--cudagraph-capture-sizes", [1, 2, 4]),
        ("--enable-prefix-caching", False),
    ],
)
def test_value_vllm_takes_passes(flag: str, value: object) -> None:
    assert load_schema().check_value(flag, value) is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-model-len", "1.5K"),  # a decimal point needs a small suffix (argparse_utils.py:29)
        ("--max-num-seqs", "1k"),  # suffixes work for some flags only
        ("--gpu-memory-utilization", "0,9"),
        ("--attention-backend", "CUTE_PAGED"),
        ("--headless", False),
        ("--enforce-eager", "yes"),
        ("--compilation-config", {"modes": 3}),
        ("--compilation-config", {"pass_config": {"x": True}}),
        ("--compilation-config", "{"),
        ("--compilation-config", 3),
        ("--attention-config", {"use_trtllm_attention": "maybe"}),
        ("--kernel-config", {"linear_backend_per_quant": {"nvfp4_w4a16": "marln"}}),
        ("--cudagraph-capture-sizes", [1, "x"]),
        ("--no-such-flag", 1),
    ],
)
def test_value_vllm_refuses_is_said(flag: str, value: object) -> None:
    assert load_schema().check_value(flag, value)


def test_environment_names_are_vllms_own() -> None:
    schema = load_schema()
    assert schema.env_exists("VLLM_BATCH_INVARIANT")
    assert not schema.env_exists("VLLM_ATTENTION_BACKEND")


def test_snapshot_loads_in_under_twenty_milliseconds() -> None:
    within(0.020, load_schema.__wrapped__)


def test_loading_the_snapshot_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, nibble.recipes.lint as l; l.load_schema(); print({'vllm', 'torch'} &"
        " set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_snapshot_is_written_with_one_fact_a_line_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    write_snapshot(load_schema(), path)
    assert path.read_text() == SNAPSHOT.read_text()
    assert len(path.read_text().splitlines()) > 900


def test_drift_names_what_changed() -> None:
    old = load_schema()
    flags = {k: v for k, v in old.data["flags"].items() if k != "moe-backend"}
    flags["kv-cache-dtype"] = {**flags["kv-cache-dtype"], "choices": ["auto", "fp4"]}
    found = drift(
        old, Schema({**old.data, "flags": flags, "envs": [*old.data["envs"], "VLLM_NEW"]})
    )
    assert "flags.moe-backend is gone" in found
    assert any(
        line.startswith("flags.kv-cache-dtype.choices lost") and "['fp4']" in line for line in found
    )
    assert "envs lost [] and gained ['VLLM_NEW']" in found
    assert drift(old, old) == []


def test_interpreter_without_vllm_is_one_verification_error(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E -P "$2" "$3" "$4"\n')
    fake.chmod(0o755)
    with pytest.raises(NibbleError) as caught:
        live_schema(str(fake))
    assert caught.value.code is ExitCode.VERIFY
    assert "No module named" in caught.value.line()

"""Memory per sequence from config.json alone equals what vLLM's own layers say, for one model of
each kind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from nibble.checkpoint import block_bytes, layers, sequence_memory
from tests.support.models.kv_models import MODELS
from tests.support.paths import IN_VLLM

pytestmark = pytest.mark.vllm

TOKENS = 1536
CPU_BLOCK, CPU_MLA_BLOCK = 128, 16  # vllm 0.32 platforms/cpu.py:293, cpu_mla.py:68

TENSOR_PARALLEL = (
    "llama",
    "gemma4",
    "deepseek_v3",
    "nemotron_h",
    "mamba2",
    "qwen3_next",
    "gpt_oss",
)
CACHE_DTYPES = (
    "fp8",
    "fp8_per_token_head",
    "int4_per_token_head",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
SPECULATIVE = {
    "qwen3_next": {"num_nextn_predict_layers": 1},
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "glm4_moe": {"num_nextn_predict_layers": 1},
    "nemotron_h": {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"},
}
KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "state",
}


def _request(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"config": config, "options": {"max_model_len": TOKENS, **options}}


def requests() -> dict[str, Any]:
    found: dict[str, Any] = {"_groups": _request(MODELS["qwen3_moe"])}
    found |= {name: _request(config) for name, config in MODELS.items()}
    found |= {
        f"{name} no prefix cache": _request(MODELS[name], enable_prefix_caching=False)
        for name in ("qwen3_next", "nemotron_h")
    }
    for name in TENSOR_PARALLEL:
        # vLLM 0.32's gpt-oss does not replicate KV heads, its Mamba2 no groups but one: 2 of each,
        # so 2 GPUs at most.
        for gpus in (2,) if name in ("gpt_oss", "mamba2") else (2, 4):
            found[f"{name} tp{gpus}"] = _request(MODELS[name], tensor_parallel_size=gpus)
    found["mamba2 one group tp4"] = _request(
        MODELS["mamba2"] | {"n_groups": 1}, tensor_parallel_size=4
    )
    for dtype in CACHE_DTYPES:
        found[dtype] = _request(MODELS["qwen3"] | {"num_hidden_layers": 7}) | {"cache_dtype": dtype}
    for name, changes in SPECULATIVE.items():
        speculative = {"method": "mtp", "num_speculative_tokens": 2}
        found[f"{name} mtp"] = _request(MODELS[name] | changes, speculative_config=speculative)
    return found


REQUESTS = requests()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kv")
    (folder / "requests.json").write_text(json.dumps(REQUESTS))
    script = IN_VLLM / "kv_specs_of_vllm.py"
    words = [
        sys.executable,
        str(script),
        str(folder / "requests.json"),
        str(folder / "answers.json"),
    ]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=300, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "_groups"])
def test_memory_per_sequence_equals_the_specs_of_vllms_layers(
    name: str, answers: dict[str, Any]
) -> None:
    request, theirs = REQUESTS[name], answers[name]
    assert "error" not in theirs, theirs["error"]
    options = request["options"]
    found = layers(request["config"])
    assert found is not None
    speculative = options.get("speculative_config", {}).get("num_speculative_tokens", 0)
    dtype = request.get("cache_dtype", "auto")
    ours = sequence_memory(
        found,
        theirs["max_model_len"],
        dtype,
        options.get("tensor_parallel_size", 1),
        CPU_MLA_BLOCK if any(layer.kind == "mla" for layer in found) else CPU_BLOCK,
        speculative_tokens=speculative,
        prefix_caching=options.get("enable_prefix_caching", True),
        in_flight_tokens=theirs["in_flight_tokens"],
    )
    counted = Counter(layer.kind for layer in found if (speculative or not layer.is_draft))
    expected = Counter(KINDS[layer["spec"]] for layer in theirs["layers"])
    assert {kind: count for kind, count in counted.items() if kind in KINDS.values()} == expected
    assert ours.block_size == theirs["block_size"]
    assert ours.total_bytes == sum(layer["bytes"] for layer in theirs["layers"])
    of_block = block_bytes(
        found,
        dtype,
        options.get("tensor_parallel_size", 1),
        CPU_MLA_BLOCK if any(layer.kind == "mla" for layer in found) else CPU_BLOCK,
        speculative_tokens=speculative,
    )
    assert of_block == (theirs["block_bytes"] if "state" in counted else None)

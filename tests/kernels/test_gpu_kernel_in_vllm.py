"""vLLM with nibble's GPU kernel as its linear layers, on the CPU platform: what reaches the
operators, eager and compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.changes import OPERATORS
from tests.support.in_vllm import cloverlm_answers as cloverlm
from tests.support.in_vllm import vllm_logprobs
from tests.support.kernels.kernel_cases import assert_rounded_once, packed_weight, values_of
from tests.support.models import cloverlm_models
from tests.support.models.generated_families import SHAPE, as_llama, as_mistral, as_qwen2, changed
from tests.support.models.generated_hybrid import HybridShape
from tests.support.models.generated_nvfp4 import Form, Shape, write_checkpoint
from tests.support.paths import IN_VLLM, ROOT, python_path
from tests.support.servers.serving import clean_environ
from tests.support.vllm_plugins import gpu_kernel_anywhere
from tests.support.vllm_plugins.install import install

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
PROMPT = [5, 17, 33, 101, 120, 7, 9, 11, 64, 80, 2]
BF16_ROUNDING = 0.1
OURS: dict[str, Any] = {"linear_kernel": "nibble", "nvfp4_activations": "bf16"}


def run(
    installed: Path, here: Path, jobs: list[vllm_logprobs.Job], **environ: str
) -> tuple[list[Any], list[Any]]:
    """Results of the jobs, and which layers of their models come with silu · mul."""
    results, _ = vllm_logprobs.run(jobs, here, **anywhere(installed, here), **environ)
    return results, [json.loads(line) for line in (here / "fused").read_text().splitlines()]


def anywhere(installed: Path, here: Path) -> dict[str, str]:
    """An environment in which vLLM finds the plugin gpu_kernel_anywhere."""
    install(here, gpu_kernel_anywhere)
    files = {"FUSED": str(here / "fused"), "ROUTED": str(here / "routed")}
    # First, because nibble's own plugin, where `installed` is the environment, has to come later.
    return {"PYTHONPATH": python_path(here, installed)} | files


OPTIONS = {"max_model_len": 256}


OUR_OPTIONS = {"additional_config": {"nibble": OURS}}


def largest_difference(one: list[float], other: list[float]) -> float:
    return float((torch.tensor(one) - torch.tensor(other)).abs().max())


def test_gate_and_up_come_with_silu_mul_and_answer_as_before(
    installed: Path, tmp_path: Path
) -> None:
    """Of both forms of checkpoints."""
    folders = {
        form: write_checkpoint(tmp_path / form, Shape(), form)
        for form in ("modelopt", "compressed-tensors")
    }
    jobs: list[vllm_logprobs.Job] = [(str(folder), {}, PROMPT) for folder in folders.values()]
    jobs += [(str(folder), OUR_OPTIONS, PROMPT) for folder in folders.values()]
    (modelopt, compressed, *ours), fused = run(installed, tmp_path, jobs)
    assert largest_difference(ours[0], modelopt) < BF16_ROUNDING
    assert largest_difference(ours[1], compressed) < BF16_ROUNDING
    layers = [f"model.layers.{i}.mlp.gate_up_proj" for i in range(Shape().layers)]
    assert fused == [[], [], layers, layers]


def test_decoder_layers_are_chained_and_answer_as_before(installed: Path, tmp_path: Path) -> None:
    """Of four families: a short prompt, and one with more rows than the decode kernel takes."""
    families = {"llama": as_llama, "mistral": as_mistral, "qwen2": as_qwen2}
    folders = [changed(tmp_path / name, change) for name, change in families.items()]
    folders.append(write_checkpoint(tmp_path / "qwen3", SHAPE, "modelopt"))
    jobs: list[vllm_logprobs.Job] = [
        (str(folder), OPTIONS | options, prompt)
        for folder in folders
        for prompt in (PROMPT, PROMPT * 13)
        for options in ({}, OUR_OPTIONS)
    ]
    found, _ = run(installed, tmp_path, jobs)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert largest_difference(one, other) < BF16_ROUNDING
    lines = (tmp_path / "fused.chained").read_text().splitlines()
    layers = [f"model.layers.{i}" for i in range(SHAPE.layers)]
    assert [json.loads(line) for line in lines] == [[], layers] * (len(jobs) // 2)


def test_the_canary_compares_a_chained_layer_whose_parts_can_be_hooked(
    installed: Path, tmp_path: Path
) -> None:
    """The operators of a norm and its products beside the products one by one, in the model's
    dtype; a wrong one is found. With hooks the parts are called, and the layer answers the same. A
    layer whose results are seen does not compute the next one's queries, keys and values.
    """
    folder = write_checkpoint(tmp_path / "model", SHAPE, "modelopt")
    options = OPTIONS | OUR_OPTIONS | {"enforce_eager": True}
    environ = anywhere(installed, tmp_path)
    environ["PYTHONPATH"] = python_path(tmp_path, installed, ROOT)
    done = subprocess.run(
        [sys.executable, str(IN_VLLM / "chained_in_vllm.py"), folder, json.dumps(options)],
        env=clean_environ(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0", **environ),
        capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [""]
    assert line, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(line.removeprefix("RESULT "))
    assert found["layers"] == ["model.layers.0"]  # the others have the same sizes
    assert found["right"] and not any(found["right"])
    assert [bool(problem) for problem in found["wrong"]] == [True, False, False, False] * 5
    assert [bool(problem) for problem in found["wrong_next"]] == [False, False, True, False] * 5
    assert found["dtypes"] == ["torch.bfloat16"]
    parts = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert found["called"] == parts
    assert found["difference"] < 2.0**-7 and found["again"]
    hooked = dict.fromkeys(("its", "the next one's", "a part's", "a drafter"), False)
    assert found["leads_on"] == {"without hooks": True} | hooked


def test_a_shape_that_is_left_to_vllm_has_another_kernel_and_answers_as_before(
    installed: Path, tmp_path: Path
) -> None:
    """gate_up_proj of both forms: nibble's kernel would come with silu · mul."""
    shape = Shape()
    rows = f"{2 * shape.intermediate}x{shape.hidden}"
    left = {"additional_config": {"nibble": OURS | {"vllm_shapes": f"{rows},8x16"}}}
    jobs: list[vllm_logprobs.Job] = []
    for form in ("modelopt", "compressed-tensors"):
        folder = str(write_checkpoint(tmp_path / form, shape, form))
        jobs += [(folder, OUR_OPTIONS, PROMPT), (folder, left, PROMPT)]
    (modelopt, modelopt_left, compressed, compressed_left), fused = run(installed, tmp_path, jobs)
    assert largest_difference(modelopt, modelopt_left) < BF16_ROUNDING
    assert largest_difference(compressed, compressed_left) < BF16_ROUNDING
    assert [bool(layers) for layers in fused] == [True, False, True, False]


def make_sparse(folder: Path, but: str) -> str:
    """Two of four neighbouring codes become zero in every NVFP4 weight whose name lacks `but`."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    for name, tensor in json.loads(data[8 : 8 + size]).items():
        if tensor.get("dtype") == "U8" and but not in name:
            begin, end = (8 + size + offset for offset in tensor["data_offsets"])
            data[begin + 1 : end : 2] = bytes((end - begin) // 2)
    path.write_bytes(data)
    return str(folder)


def test_sparse_weights_answer_as_dense_ones(installed: Path, tmp_path: Path) -> None:
    """Of a model with sparse layers and dense ones; few rows, and more than the kernel takes."""
    folder = make_sparse(write_checkpoint(tmp_path / "model", Shape(), "modelopt"), but="o_proj")
    sparse = {"additional_config": {"nibble": OURS | {"sparse_fp4": "on"}}}
    jobs: list[vllm_logprobs.Job] = [
        (folder, OPTIONS | options, prompt)
        for options in (OUR_OPTIONS, sparse)
        for prompt in (PROMPT, PROMPT * 13)
    ]
    (short, long, *ours), _ = run(installed, tmp_path, jobs)
    for one, other in zip(ours, (short, long), strict=True):
        assert largest_difference(one, other) < BF16_ROUNDING


def test_the_kernel_packs_what_is_sparse(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nibble.engine.contract import Options
    from nibble.engine.plugin import cuda

    weight, scales = packed_weight(24, 160)
    sparse = weight.clone()
    sparse[:, 1::2] = 0
    monkeypatch.setattr(cuda, "runs_here", lambda: (True, None))
    monkeypatch.setattr(cuda, "current_options", lambda: Options(sparse_fp4="on"))
    x = torch.randn(3, 160).bfloat16()
    for codes, is_sparse in ((weight, False), (sparse, True)):
        layer = SimpleNamespace(
            weight=torch.nn.Parameter(codes, requires_grad=False),
            weight_scale=torch.nn.Parameter(scales, requires_grad=False),
            weight_global_scale=torch.tensor(0.01),
            params_dtype=torch.bfloat16,
        )
        kernel = cuda.NibbleNvFp4LinearKernel(cuda.NvFp4LinearLayerConfig())
        kernel.process_weights_after_loading(layer)
        assert kernel.is_sparse == is_sparse
        y = kernel.apply_weights(layer, x)
        factor = torch.tensor(0.01).double()
        assert_rounded_once(y, x, values_of(codes, scales), factor)


def test_experts_that_are_sparse_stay_dense_and_are_named(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert is checked; a group of four with three codes that are not zero is not cut."""
    from nibble.engine.plugin import sparse

    codes = torch.stack([packed_weight(24, 160, seed)[0] for seed in range(4)])
    codes[:3, :, 1::2] = 0
    codes[2, 0, :2] = 0x11
    before, said = codes.clone(), list[str]()
    monkeypatch.setattr(sparse.logger, "warning", lambda text, *words: said.append(text % words))
    sparse.keep_experts_dense(SimpleNamespace(prefix="layers.0.experts"), {"w13": codes})
    assert torch.equal(codes, before) and len(said) == 1
    assert said[0].startswith("layers.0.experts.w13 stays dense: 2 of 4 experts are exactly 2:4")


def test_experts_answer_as_the_same_weights_in_bf16(installed: Path, tmp_path: Path) -> None:
    """Of both forms, gate and up with unequal global scales; a prompt long enough for the
    products of torch, and a short one.
    """
    shape = Shape(experts=4)
    forms: tuple[Form, ...] = ("bf16", "modelopt", "compressed-tensors")
    folders = [str(write_checkpoint(tmp_path / form, shape, form)) for form in forms]
    jobs: list[vllm_logprobs.Job] = [
        (folder, OPTIONS, prompt) for folder in folders for prompt in (PROMPT, PROMPT * 13)
    ]
    (short, long, *ours), _ = run(installed, tmp_path, jobs, OUR_EXPERTS="alone")
    for one, other in zip(ours, (short, long) * 2, strict=True):
        assert largest_difference(one, other) < BF16_ROUNDING


def routed_answers(
    installed: Path, here: Path, how: str, jobs: list[vllm_logprobs.Job]
) -> tuple[list[Any], list[dict[str, int]]]:
    """Results of the jobs, and how many routers and norms of their models are fused."""
    here.mkdir()
    results, _ = run(installed, here, jobs, OUR_EXPERTS=how)
    assert not any(isinstance(one, str) for one in results), results
    return results, [json.loads(line) for line in (here / "routed").read_text().splitlines()]


def test_fused_routers_answer_as_vllms(installed: Path, tmp_path: Path) -> None:
    """Alone and with the norm in front, compiled too."""
    shape = Shape(experts=8, chosen=3)
    folder = str(write_checkpoint(tmp_path / "model", shape, "modelopt"))
    jobs: list[vllm_logprobs.Job] = [
        (folder, OPTIONS | {"enforce_eager": True}, prompt) for prompt in (PROMPT, PROMPT * 13)
    ]
    expected, found = routed_answers(installed, tmp_path / "alone", "alone", jobs)
    assert found == [{}] * 2
    with_norm = ("NibbleCPURouter", "NibbleQwen3MoeSparseMoeBlock", "NibbleRMSNorm")
    for how, names in (("router", ("FusedGate", "NibbleCPURouter")), ("all", with_norm)):
        some = jobs if how == "router" else [*jobs, (folder, OPTIONS, PROMPT)]
        answers, found = routed_answers(installed, tmp_path / how, how, some)
        assert found == [dict.fromkeys(names, shape.layers)] * len(some)
        for one, other in zip(answers, [*expected, expected[0]], strict=False):
            assert largest_difference(one, other) < BF16_ROUNDING


def test_a_shared_experts_gate_comes_with_the_router(installed: Path, tmp_path: Path) -> None:
    """In Qwen3-Next's layers, with linear and with full attention, compiled too."""
    shape = HybridShape(layers=4, experts=8, chosen=3, linear_heads=2, linear_head_dim=128)
    folder = str(write_checkpoint(tmp_path / "model", shape, "modelopt"))
    jobs: list[vllm_logprobs.Job] = [
        (folder, OPTIONS | {"enforce_eager": True}, prompt) for prompt in (PROMPT, PROMPT * 13)
    ]
    expected, _ = routed_answers(installed, tmp_path / "alone", "alone", jobs)
    jobs.append((folder, OPTIONS, PROMPT))
    answers, found = routed_answers(installed, tmp_path / "all", "all", jobs)
    names = ("NibbleCPURouter", "NibbleGemmaRMSNorm", "NibbleQwen3NextSparseMoeBlock")
    with_shared = dict.fromkeys((*names, "scales_shared"), shape.layers)
    assert found == [with_shared] * len(jobs)
    for one, other in zip(answers, [*expected, expected[0]], strict=True):
        assert largest_difference(one, other) < BF16_ROUNDING


def test_fp8_layers_multiply_few_rows_as_bf16_ones_and_more_as_vllm(
    installed: Path, tmp_path: Path
) -> None:
    """The linear attention of Qwen3-Next, eager and compiled."""
    from nibble.engine.plugin.e4m3_linear import MAX_ROWS

    shape = HybridShape(layers=4, experts=4, linear_heads=2, linear_head_dim=128, has_fp8=True)
    bf16, mixed = (
        str(write_checkpoint(tmp_path / form, shape, form)) for form in ("bf16", "modelopt")
    )
    eager = OPTIONS | {"enforce_eager": True}
    ours = {"additional_config": {"nibble": {"e4m3_linear": "nibble"}}}
    few, many = PROMPT[:MAX_ROWS], PROMPT * 13
    jobs: list[vllm_logprobs.Job] = [
        (bf16, eager, few),
        *((mixed, eager, prompt) for prompt in (few, many)),
        *(
            (mixed, options | ours, prompt)
            for options in (eager, OPTIONS)
            for prompt in (few, many)
        ),
    ]
    (exact, *rest), _ = run(installed, tmp_path, jobs)
    assert not any(isinstance(one, str) for one in rest), rest
    theirs, ours_eager, ours_compiled = (
        dict(zip(("few", "many"), pair, strict=True)) for pair in (rest[:2], rest[2:4], rest[4:])
    )
    rounded = largest_difference(theirs["few"], exact)
    for found in (ours_eager, ours_compiled):
        assert largest_difference(found["few"], exact) < min(BF16_ROUNDING, rounded / 2)
        assert largest_difference(found["many"], theirs["many"]) < BF16_ROUNDING


@pytest.mark.slow
def test_compiled_it_answers_as_step_by_step(installed: Path, tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "model", Shape(), "modelopt"))
    jobs: list[vllm_logprobs.Job] = [
        (folder, OUR_OPTIONS | {"enforce_eager": eager}, PROMPT) for eager in (True, False)
    ]
    (eager, compiled), _ = run(installed, tmp_path, jobs)
    assert largest_difference(eager, compiled) < BF16_ROUNDING


def test_cloverlm_answers_the_formula_with_it(
    installed: Path, kernels: ModuleType, tmp_path: Path
) -> None:
    """It multiplies CloverLM's weights under VLLM_BATCH_INVARIANT: with activations as they are,
    and as the modes round them.
    """
    folder = cloverlm_models.write_bf16(tmp_path / "model", cloverlm.SHAPE)
    quartet2, ours = cloverlm.FLOAT32 | cloverlm.QUARTET2, {"linear_kernel": "nibble"}
    requests = [
        cloverlm.request(folder, cloverlm.QUARTET2, nvfp4_activations="bf16", **ours),
        cloverlm.request(folder, quartet2, **ours),
        cloverlm.request(folder, quartet2, *cloverlm.EACH_ALONE, act_scale_mode="batch", **ours),
    ]
    found = cloverlm.in_vllm(installed, tmp_path, requests, **anywhere(installed, tmp_path))
    weights_alone, token, batch = map(cloverlm.of_all_batches, found)

    def expected(quantize: Any) -> list[torch.Tensor]:
        linear = lambda tensors: cloverlm.quantized(tensors, quantize)  # noqa: E731
        return cloverlm.expected(cloverlm.SHAPE, cloverlm.PROMPTS, linear)

    assert cloverlm.rms(weights_alone, expected(None)) < cloverlm.BF16_RMS
    assert cloverlm.most_agree(token, expected(cloverlm.by_mode("token")))
    assert cloverlm.most_agree(batch, expected(cloverlm.by_mode("batch")))


@pytest.fixture
def choice(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that chooses, on a GPU whose kernels are compiled; vLLM's own choice is
    "vLLM's".
    """
    from nibble.engine.plugin import cuda
    from nibble.engine.plugin import kernels as module

    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(cuda, "runs_here", lambda: (True, None))
    monkeypatch.setattr(module.linear, "init_nvfp4_linear_kernel", lambda use_a16: "vLLM's")
    return module


def test_under_batch_invariance_weights_alone_are_for_nibbles_kernel_because_vllm_has_none(
    choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, kernel in (("0", "str"), ("1", "NibbleNvFp4LinearKernel")):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        assert type(choice.nvfp4_linear_kernel(use_a16=True)).__name__ == kernel
        assert choice.nvfp4_linear_kernel(use_a16=False) == "vLLM's"


def test_batch_invariance_without_nibbles_kernel_is_refused_and_says_what_is_missing(
    choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    missing = (False, "nibble-kernels: CUDA not compiled")
    monkeypatch.setattr(choice.NibbleNvFp4LinearKernel, "is_supported", lambda: missing)
    with pytest.raises(
        ValueError, match=r"VLLM_BATCH_INVARIANT .* nibble's kernel.*: CUDA not compiled"
    ):
        choice.nvfp4_linear_kernel(use_a16=True)


def test_batch_invariance_refuses_nibbles_experts_whose_sums_depend_on_the_batch(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nibble.engine.plugin.cuda import NibbleModelOptNvFp4MoE

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    experts: Any = object.__new__(NibbleModelOptNvFp4MoE)
    with pytest.raises(ValueError, match="depends on the number of tokens"):
        experts.prepare(None, (None, None), (None, None))

"""The plan: layers in their order, every value with source and reason, and what cannot work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.guard.limits import RequestLimits
from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.hardware import Gpu, Hardware
from nibble.machine.paths import root
from nibble.machine.targets import TARGET_NAMES
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.recipes.recipe import list_recipes, load_recipe
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.models.tiny_model import DEEPSEEK_MLA, QWEN3, write_model
from tests.support.processor_time import within
from tests.support.refusals import refusal_of

GIB = 1 << 30
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/nonexistent"}


def plan(*words: str, **environ: str) -> Plan:
    return plan_for(read_wishes(list(words), OFFLINE | environ))


def failure(*words: str, **environ: str) -> NibbleError:
    return refusal_of(lambda: plan(*words, **environ))


def machine(
    name: str,
    capability: tuple[int, int],
    count: int = 1,
    memory: int | None = 96 * GIB,
    **more: Any,
) -> Hardware:
    gpus = tuple(Gpu(i, name, capability, memory, memory, f"GPU-{i}") for i in range(count))
    found = Hardware(
        gpus, "580.105.08", "13.0", "x86_64", 8, frozenset({"avx512f"}), 128 * GIB, 100 * GIB
    )
    return replace(found, **more)


def test_without_a_cpp_compiler_nothing_is_compiled_on_the_cpu(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "m"))
    (tmp_path / "bin").mkdir()
    found = plan(model, "--target", "cpu", PATH=str(tmp_path / "bin"))
    assert (
        found.env["TORCHDYNAMO_DISABLE"].value == "1"
        and found.args["--enforce-eager"].value is True
    )
    assert "C++ compiler" in found.args["--enforce-eager"].reason
    own = plan(
        model,
        "--target",
        "cpu",
        "--no-enforce-eager",
        PATH=str(tmp_path / "bin"),
        TORCHDYNAMO_DISABLE="0",
    )
    assert (
        own.env["TORCHDYNAMO_DISABLE"].value == "0" and own.args["--enforce-eager"].value is False
    )
    assert (
        "TORCHDYNAMO_DISABLE"
        not in plan(model, "--target", "hopper", PATH=str(tmp_path / "bin")).env
    )
    compiler = tmp_path / "bin/g++"
    compiler.touch(0o755)
    settings = tmp_path / "nibble.toml"
    settings.write_text(f'[env]\nCXX = "{compiler}"\n')
    named = ({"CXX": str(compiler)}, {"NIBBLE_CONFIG": str(settings)})
    for given in ({}, *(one | {"PATH": "/nowhere"} for one in named)):
        found = plan(model, "--target", "cpu", **{"PATH": str(tmp_path / "bin"), **given})
        assert "TORCHDYNAMO_DISABLE" not in found.env and "--enforce-eager" not in found.args


def test_precedence_is_command_line_extra_args_environment_file_recipe_target(
    tmp_path: Path,
) -> None:
    file = tmp_path / "nibble.toml"
    file.write_text("max_num_seqs = 3\n[args]\nmax-num-batched-tokens = 33\nblock-size = 16\n")
    words = ["nvidia/Qwen3.6-35B-A3B-NVFP4", "--target", "gb10"]
    steps: list[tuple[dict[str, str], list[str], str, str]] = [
        ({"NIBBLE_RECIPE": "off"}, [], "target gb10", "8"),
        ({}, [], "recipe", "8"),
        ({"NIBBLE_CONFIG": str(file)}, [], f"file {file}", "3"),
        ({"NIBBLE_CONFIG": str(file), "MAX_NUM_SEQS": "4"}, [], "environment MAX_NUM_SEQS", "4"),
        ({"MAX_NUM_SEQS": "4", "VLLM_EXTRA_ARGS": "--max-num-seqs 5"}, [], "VLLM_EXTRA_ARGS", "5"),
        (
            {"VLLM_EXTRA_ARGS": "--max-num-seqs 5"},
            ["--max-num-seqs", "6"],
            "command line --max-num-seqs",
            "6",
        ),
    ]
    for environ, more, source, value in steps:
        choice = plan(*words, *more, **environ).args["--max-num-seqs"]
        assert (choice.source, str(choice.value)) == (source, value)


def test_json_valued_flags_are_joined_key_by_key_across_layers() -> None:
    words = ["nvidia/Qwen3.6-35B-A3B-NVFP4", "--target", "gb10"]
    recipe = plan(*words).args["--speculative-config"].value
    changed = plan(*words, VLLM_EXTRA_ARGS="--speculative-config.num_speculative_tokens 1").args[
        "--speculative-config"
    ]
    assert changed.value == recipe | {"num_speculative_tokens": 1}
    assert changed.source == "recipe + VLLM_EXTRA_ARGS"


def test_every_value_has_a_source() -> None:
    found = plan("nvidia/Qwen3.6-35B-A3B-NVFP4", "--target", "gb10")
    for name, choice in {**found.choices, **found.args, **found.env}.items():
        assert choice.source, name


@pytest.mark.parametrize("target", TARGET_NAMES[:4])
@pytest.mark.parametrize("model", list_recipes(root()))
def test_every_recipe_has_a_plan_for_every_target_in_half_a_second(model: str, target: str) -> None:
    recipe = load_recipe(model, root())
    if recipe and target in recipe.targets and recipe.targets[target].status == "unsupported":
        assert "not supported" in failure(model, "--target", target).line()
        return
    found = within(0.5, lambda: plan(model, "--target", target))
    json.dumps(found.to_json())
    schema = load_schema()
    for name, choice in found.args.items():
        value = choice.value
        problems = (
            schema.check_json(name, value)
            if isinstance(value, dict)
            else [schema.check_value(name, value)]
        )
        assert not [problem for problem in problems if problem]
    assert found.budget.weights_bytes is None and found.bound.tokens_per_s is None
    assert "default" in found.served_names


def test_an_unknown_checkpoint_is_never_guessed_at() -> None:
    found = plan("acme/unheard-of", "--target", "gb10")
    assert found.checkpoint is None and found.checkpoint_note.startswith("unknown until pull")
    assert (
        found.budget.weights_bytes
        is found.budget.sequence_bytes
        is found.bound.bytes_per_step
        is None
    )


def test_every_model_is_also_served_as_default(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "some-model")
    assert plan(str(folder)).served_names == ("some-model", "default")
    named = plan(str(folder), NIBBLE_SERVED_MODEL_NAME="mine")
    assert named.served_names == ("mine", "some-model", "default")
    position = named.argv().index("--served-model-name")
    assert named.argv()[position + 1 : position + 4] == ["mine", "some-model", "default"]


def test_no_secret_reaches_the_command_the_plan_or_vllms_environment(tmp_path: Path) -> None:
    secret = {
        "NIBBLE_API_KEY": "nbl-very-secret",
        "HF_TOKEN": "hf_very-secret",
        "RAY_AUTH_TOKEN": "ray-very-secret",
    }
    found = plan(str(write_model(tmp_path / "m")), **secret)
    child = found.vllm_environ(
        OFFLINE
        | secret
        | {
            "VLLM_EXTRA_ARGS": "--seed 1",
            "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "a:b",
        }
    )
    assert "very-secret" not in json.dumps(found.to_json()) + " ".join(found.argv()) + json.dumps(
        child
    ) + repr(found)
    assert not {"VLLM_EXTRA_ARGS", "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE"} & set(child)


def test_debug_means_eager_and_verbose(tmp_path: Path) -> None:
    found = plan(str(write_model(tmp_path / "m")), "--debug")
    assert (
        found.args["--enforce-eager"].value is True
        and found.env["VLLM_LOGGING_LEVEL"].value == "DEBUG"
    )


def test_tq_sets_the_kv_cache_and_prints_what_it_costs() -> None:
    found = plan("ig1/Qwen3.5-27B-NVFP4", "--target", "gb10", "--tq")
    assert found.args["--kv-cache-dtype"].value == "turboquant_k8v4"
    assert any("perplexity +1.17 %" in notice for notice in found.notices)
    other = plan("ig1/Qwen3.5-27B-NVFP4", "--target", "gb10", "--tq", "turboquant_3bit_nc")
    assert other.args["--kv-cache-dtype"].value == "turboquant_3bit_nc"


def test_tq_is_refused_on_the_cpu_and_with_latent_attention(tmp_path: Path) -> None:
    assert (
        failure(str(write_model(tmp_path / "m")), "--tq", "--target", "cpu").code == ExitCode.CONFIG
    )
    latent = write_model(tmp_path / "mla", DEEPSEEK_MLA)
    assert "latent attention" in failure(str(latent), "--tq", "--target", "gb10").line()


def test_a_users_variable_wins_over_that_of_the_target() -> None:
    found = plan("acme/x", "--target", "gb10", VLLM_ENGINE_READY_TIMEOUT_S="5")
    assert found.env["VLLM_ENGINE_READY_TIMEOUT_S"].value == "5"


def test_code_of_a_repository_needs_a_pinned_revision() -> None:
    words = ["acme/x", "--target", "gb10", "--trust-remote-code"]
    assert failure(*words).code == ExitCode.CONFIG
    assert failure(*words, "--revision", "main").code == ExitCode.CONFIG
    assert plan(*words, "--revision", "a" * 40).args["--code-revision"].value == "a" * 40


def test_a_cpu_gets_its_kv_cache_in_bytes(tmp_path: Path) -> None:
    found = plan(str(write_model(tmp_path / "m")), "--target", "cpu")
    choice = found.args["--kv-cache-memory-bytes"]
    assert (
        choice.value >= (found.budget.sequence_bytes or 0) > 0
        and "sequences of 1024 tokens" in choice.reason
    )
    assert (
        plan(str(tmp_path / "m"), NIBBLE_KV_CACHE_BYTES="2097152")
        .args["--kv-cache-memory-bytes"]
        .value
        == 2097152
    )


def test_the_bound_is_bandwidth_over_the_bytes_a_step_reads(tmp_path: Path) -> None:
    found = plan(str(write_model(tmp_path / "m")), "--target", "gb10")
    assert (
        found.bound.bytes_per_step
        and found.bound.tokens_per_s == 273e9 / found.bound.bytes_per_step
    )
    two = plan(str(tmp_path / "m"), "--target", "b200", "--tensor-parallel-size", "2")
    assert two.bound.bandwidth_bytes_per_s == 2 * 8e12


@pytest.mark.parametrize(
    ("name", "capability", "target"),
    [("NVIDIA GB10", (12, 1), "gb10"), ("NVIDIA GeForce RTX 5090", (12, 0), "sm120"), ("NVIDIA B200", (10, 0), "b200"),  # noqa: E501
     ("NVIDIA B300", (10, 3), "b200"), ("NVIDIA H200", (9, 0), "hopper")],
)  # fmt: skip
def test_the_target_is_that_of_the_gpu_found(
    on: Any, name: str, capability: tuple[int, int], target: str
) -> None:
    on(machine(name, capability))
    found = plan("acme/x")
    assert found.target.name == target and name in found.choices["target"].reason


def test_an_unsupported_gpu_is_refused_and_the_cpu_offered(on: Any) -> None:
    on(machine("NVIDIA A100", (8, 0)))
    error = failure("acme/x")
    assert error.code == ExitCode.NO_HARDWARE and "NIBBLE_TARGET=cpu" in error.line()


def test_gpus_of_two_kinds_are_refused(on: Any) -> None:
    both = machine("NVIDIA B200", (10, 0)).gpus + machine("NVIDIA H200", (9, 0)).gpus
    on(machine("", (9, 0), gpus=both))
    assert failure("acme/x").code == ExitCode.NO_HARDWARE


def test_an_image_without_its_gpu_or_on_another_gpu_is_refused(on: Any) -> None:
    on(machine("", (9, 0), gpus=(), nvml_error="Driver Not Loaded"))
    assert "Driver Not Loaded" in failure("acme/x", NIBBLE_IMAGE="hopper").line()
    on(machine("NVIDIA B200", (10, 0)))
    assert failure("acme/x", NIBBLE_IMAGE="hopper").code == ExitCode.NO_HARDWARE
    on(machine("NVIDIA GB10", (12, 1)))  # the same family binary
    assert plan("acme/x", NIBBLE_IMAGE="sm120").target.name == "gb10"


def test_more_gpus_than_here_and_heads_that_do_not_divide_are_refused(
    on: Any, tmp_path: Path
) -> None:
    on(machine("NVIDIA H200", (9, 0), 2))
    assert (
        "4 GPUs are needed, but this machine has 2"
        in failure("acme/x", TENSOR_PARALLEL_SIZE="4").line()
    )
    replicas = failure("acme/x", TENSOR_PARALLEL_SIZE="2", VLLM_EXTRA_ARGS="--data-parallel-size 2")
    assert "4 GPUs are needed, but this machine has 2" in replicas.line()
    folder = write_model(tmp_path / "m")
    thirds = failure(str(folder), TENSOR_PARALLEL_SIZE="3").line()
    assert "does not divide the 4 attention heads" in thirds and "expected 1, 2 or 4;" in thirds


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [(9, "1, 3 or 9"), (1, "1"), (7, "1 or 7"), (71, "1"), (64, "1, 2, 4, 8 or 16")],
)
def test_the_sizes_that_are_suggested_divide_the_heads(
    tmp_path: Path, heads: int, sizes: str
) -> None:
    shape = {
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_size": heads * 16,
        "model_type": "afmoe",  # a family whose shapes are not compared
    }
    folder = write_model(tmp_path / "m", QWEN3 | shape)
    refused = failure(str(folder), "--target", "cpu", TENSOR_PARALLEL_SIZE="5")
    assert refused.code is ExitCode.CONFIG and refused.expected == sizes


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("2", "does not divide the 9 attention heads"),
        ("9", "does not divide the 96 NVFP4 blocks in a row of the MLP"),
    ],
)
def test_the_sizes_that_divide_smollm2_135m_are_1_and_3(
    tmp_path: Path, size: str, problem: str
) -> None:
    """One layer with its shapes: 9 heads, 3 KV heads, an MLP of 1536."""
    shape = Shape(
        hidden=576, intermediate=1536, layers=1, heads=9, kv_heads=3, head_dim=64, vocabulary=128
    )
    folder = str(write_checkpoint(tmp_path / "m", shape, "modelopt"))
    refused = failure(folder, "--target", "cpu", TENSOR_PARALLEL_SIZE=size)
    assert refused.code is ExitCode.CONFIG
    assert problem in refused.what and refused.expected == "1 or 3"
    plan(folder, "--target", "cpu", TENSOR_PARALLEL_SIZE="3")


def test_the_fewest_gpus_that_hold_the_weights_are_taken(on: Any, tmp_path: Path) -> None:
    on(machine("NVIDIA H200", (9, 0), 4, memory=100_000))
    folder = write_model(tmp_path / "m")
    weights = plan(str(folder)).checkpoint.weights.total_bytes  # type: ignore[union-attr]
    for share, gpus in ((2.0, 1), (0.7, 2), (0.35, 4)):
        on(machine("NVIDIA H200", (9, 0), 4, memory=int(weights * share)))
        found = plan(str(folder)).args.get("--tensor-parallel-size")
        assert (found.value if found else 1) == gpus
    replicas = plan(str(folder), VLLM_EXTRA_ARGS="--data-parallel-size 2")
    # Each of the two has two GPUs and needs four
    assert "--tensor-parallel-size" not in replicas.args


def test_a_recipe_for_more_gpus_than_are_here_does_not_apply(on: Any) -> None:
    on(machine("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 1))
    found = plan("Salyut1/GLM-4.7-NVFP4")
    assert (
        found.recipe is not None
        and found.recipe.status == "unknown"
        and "--tensor-parallel-size" not in found.args
    )
    on(machine("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", (12, 0), 4))
    four = plan("Salyut1/GLM-4.7-NVFP4")
    assert (
        four.args["--tensor-parallel-size"].value == 4
        and four.args["--attention-backend"].value == "TRITON_ATTN"
    )
    assert four.args["--gpu-memory-utilization"].value == 0.80


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("ig1/Qwen3.5-27B-NVFP4", 65536),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 131072),
        ("RedHatAI/gemma-4-31B-it-NVFP4", 32768),
    ],
)
def test_the_seeds_own_contexts_are_kept(model: str, tokens: int) -> None:
    assert plan(model, "--target", "gb10").args["--max-model-len"].value == tokens


def test_qwen3_next_is_served_with_multi_token_prediction() -> None:
    found = (
        plan("nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4", "--target", "gb10")
        .args["--speculative-config"]
        .value
    )
    assert "mtp" in found["method"] and found["num_speculative_tokens"] == 2


def test_the_demo_is_planned_eager_on_the_cpu() -> None:
    found = plan("nibble-demo")
    assert (
        found.served_names == ("nibble-demo", "default")
        and found.args["--enforce-eager"].value is True
    )


@pytest.mark.parametrize(
    "flag", ["--tensor-parallel-size 0", "--gpu-memory-utilization 7", "--max-num-seqs -5"]
)
def test_limits_hold_for_flags_in_vllm_extra_args_too(flag: str) -> None:
    error = failure("acme/x", "--target", "gb10", VLLM_EXTRA_ARGS=flag)
    assert (
        error.code == ExitCode.USAGE
        and flag.split()[0] in error.line()
        and "VLLM_EXTRA_ARGS" in error.line()
    )


def test_the_draft_layers_of_multi_token_prediction_count_in_the_memory_of_a_sequence(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "mtp", DEEPSEEK_MLA | {"num_nextn_predict_layers": 1})
    plain = plan(str(folder), "--target", "gb10").budget.sequence_bytes
    drafting = plan(
        str(folder),
        "--target",
        "gb10",
        "--speculative-config",
        '{"method":"mtp","num_speculative_tokens":2}',
    )
    assert plain and drafting.budget.sequence_bytes and drafting.budget.sequence_bytes > plain


@pytest.mark.parametrize(
    "line",
    ["HF_TOKEN = 'hf_very-secret'", "VLLM_API_KEY = 'hf_very-secret'", "NIBBLE_PORTS = '1'", "MODEL = 'a/b'",  # noqa: E501
     "VLLM_LOGING_LEVEL = 'INFO'", "VLLM_ATTENTION_BACKEND = 'FLASHINFER'"],
)  # fmt: skip
def test_the_env_table_of_a_settings_file_takes_only_what_is_for_vllm(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "nibble.toml"
    file.write_text(f"[env]\n{line}\n")
    error = failure("acme/x", "--target", "gb10", NIBBLE_CONFIG=str(file))
    assert (
        error.code == ExitCode.CONFIG
        and line.split()[0] in error.line()
        and "very-secret" not in error.line()
    )


def test_vllm_gets_the_hub_token_only_where_it_may_have_to_ask_the_hub(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "m"))
    token = {"HF_TOKEN": "hf_very-secret"}
    assert "HF_TOKEN" not in plan(folder, **token).vllm_environ(OFFLINE | token)
    found = plan(folder, "--enable-lora", "--lora-modules", "sql=acme/lora", **token)
    assert found.vllm_environ(OFFLINE | token)["HF_TOKEN"] == "hf_very-secret"
    assert "very-secret" not in json.dumps(found.to_json())


def test_the_gate_gets_the_request_limits_and_the_body_limit_fits_the_model(tmp_path: Path) -> None:
    text = str(write_model(tmp_path / "text"))
    sees = write_model(tmp_path / "sees")
    config = json.loads((sees / "config.json").read_text())
    (sees / "config.json").write_text(json.dumps({**config, "vision_config": {"hidden_size": 8}}))
    found = plan(text, "--target", "cpu")
    assert found.env["NIBBLE_MAX_BODY_BYTES"].value == str(32 << 20)
    assert "only text" in found.env["NIBBLE_MAX_BODY_BYTES"].reason
    assert "NIBBLE_MAX_MESSAGES" not in found.env  # the default is the gate's, too
    assert found.args["--h11-max-incomplete-event-size"].value == 65536
    assert found.args["--h11-max-header-count"].value == 128
    found = plan(str(sees), "--target", "cpu")
    assert found.env["NIBBLE_MAX_BODY_BYTES"].value == str(128 << 20)
    file = tmp_path / "nibble.toml"
    file.write_text("max_body_bytes = 5000\n")
    found = plan(
        text,
        "--target",
        "cpu",
        NIBBLE_CONFIG=str(file),
        NIBBLE_MAX_MESSAGES="7",
        NIBBLE_MAX_HEADERS="9",
    )
    assert found.args["--h11-max-header-count"].value == 9
    limits = RequestLimits.from_environ(found.vllm_environ({}))
    assert (limits.max_body_bytes, limits.max_buffered_bytes, limits.max_messages) == (
        5000,
        40_000,
        7,
    )
    assert str(file) in found.env["NIBBLE_MAX_BODY_BYTES"].source

"""The recipe linter: one test per class of mistake, against the committed snapshot of vLLM 0.32."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.machine.paths import root
from nibble.recipes.lint import lint
from nibble.recipes.recipe import Problem, load_recipe
from nibble.recipes.resolution import resolutions

CLEAN = """
[model]
id = "org/model"
revision = ""
source = "a report"
{model}

[args]
reasoning-parser = "qwen3"
{args}

[env]
NCCL_DEBUG = "WARN"
{env}

[target.gb10]
status = "reported"
evidence = "a run"
{target}
"""


@pytest.fixture
def problems(tmp_path: Path):
    def check(
        model: str = "", args: str = "", env: str = "", target: str = "", text: str = ""
    ) -> list[Problem]:
        path = tmp_path / "recipes" / "org" / "model.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or CLEAN.format(model=model, args=args, env=env, target=target))
        return lint(tmp_path, ["org/model"], live=False)

    return check


def only(found: list[Problem]) -> Problem:
    assert len(found) == 1, found
    return found[0]


def test_clean_recipe_has_no_problems(problems) -> None:
    assert problems() == []


def test_dead_variable_is_found_and_its_flag_named(problems) -> None:
    found = only(problems(env='VLLM_NVFP4_GEMM_BACKEND = "marlin"'))
    assert found.key == "env.VLLM_NVFP4_GEMM_BACKEND"
    assert "dead variable" in found.message
    assert found.suggestion == "--linear-backend"


def test_vllm_variable_that_never_was_is_found_with_the_nearest(problems) -> None:
    found = only(problems(env='VLLM_FLOAT32_MATMUL_PRECISON = "high"'))
    assert found.suggestion == "VLLM_FLOAT32_MATMUL_PRECISION"


@pytest.mark.parametrize("name", ["NIBBLE_PORT", "MY_SETTING", "GPU_MEMORY_UTIL"])
def test_variable_of_nobody_known_is_found(problems, name: str) -> None:
    assert "is not a variable of vLLM" in only(problems(env=f'{name} = "1"')).message


@pytest.mark.parametrize(
    "name", ["PYTORCH_CUDA_ALLOC_CONF", "HF_HUB_OFFLINE", "RAY_x", "TRITON_PTXAS_PATH", "UCX_TLS"]
)
def test_variables_of_the_ecosystem_pass(problems, name: str) -> None:
    assert problems(env=f'{name} = "1"') == []


def test_misspelled_flag_is_found_with_the_nearest(problems) -> None:
    found = only(problems(args='moe-backnd = "marlin"'))
    assert (found.key, found.suggestion) == ("args.moe-backnd", "--moe-backend")


def test_flag_by_its_short_name_is_found(problems) -> None:
    assert "no flag --tp" in only(problems(args="tp = 1")).message


def test_wrong_choice_is_found_with_the_nearest(problems) -> None:
    found = only(problems(target='args.kv-cache-dtype = "fp9"'))
    assert found.key == "target.gb10.args.kv-cache-dtype"
    assert "did you mean fp8?" in found.message


@pytest.mark.parametrize(
    "args",
    [
        'reasoning-parser-plugin = 5.5\nmax-model-len = "64q"',
        'tensor-parallel-size = "two"',
        'gpu-memory-utilization = "most"',
        "enforce-eager = 1",
        "headless-x = true",
        'attention-backend = "CUTE_PAGED"',
        'load-format = "b12x"',
        'quantization = "nvfp4"',
        'tool-call-parser = "qwen4_xml"',
    ],
)
def test_value_vllm_would_refuse_is_found(problems, args: str) -> None:
    assert problems(args=args)


def test_unknown_nested_key_is_found_with_its_path(problems) -> None:
    found = only(problems(args="attention-config = { use_fp4_indexer_cache = true }"))
    assert "--attention-config has no key 'use_fp4_indexer_cache'" in found.message


def test_unknown_key_two_levels_down_is_found(problems) -> None:
    found = only(problems(args="compilation-config = { pass_config = { fuse_everything = true } }"))
    assert "--compilation-config.pass_config has no key 'fuse_everything'" in found.message


def test_wrong_nested_choice_is_found(problems) -> None:
    found = only(
        problems(args='speculative-config = { method = "mpt", num_speculative_tokens = 2 }')
    )
    assert "--speculative-config.method cannot be 'mpt': did you mean mtp?" in found.message


def test_remote_code_without_a_revision_is_found(problems) -> None:
    found = only(problems(target="args.trust-remote-code = true"))
    assert found.key == "target.gb10.args.trust-remote-code"


def test_remote_code_with_a_pinned_revision_passes(problems) -> None:
    text = CLEAN.format(model="", args="trust-remote-code = true", env="", target="")
    assert problems(text=text.replace('revision = ""', f'revision = "{"a1" * 20}"')) == []


@pytest.mark.parametrize("revision", ["main", "531df318", "G" * 40])
def test_revision_that_is_no_commit_is_found(problems, revision: str) -> None:
    text = CLEAN.format(model="", args="", env="", target="").replace(
        'revision = ""', f'revision = "{revision}"'
    )
    assert only(problems(text=text)).key == "model.revision"


def test_unknown_status_is_found(problems) -> None:
    text = CLEAN.format(model="", args="", env="", target="").replace('"reported"', '"verifed"')
    found = only(problems(text=text))
    assert (found.key, found.suggestion) == ("target.gb10.status", "verified")


def test_verified_without_a_result_file_is_found(problems, tmp_path: Path) -> None:
    evidence = "benchmarks/results/run.json"
    text = CLEAN.format(model="", args="", env="", target="").replace('"reported"', '"verified"')
    text = text.replace('"a run"', f'"{evidence}"')
    assert problems(text=text) == [], "an image has no results"
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    assert only(problems(text=text)).key == "target.gb10.evidence"
    (tmp_path / evidence).write_text("{}")
    assert problems(text=text) == []


@pytest.mark.parametrize("missing", ["status", "evidence"])
def test_target_without_status_or_evidence_is_found(problems, missing: str) -> None:
    lines = CLEAN.format(model="", args="", env="", target="").splitlines()
    found = only(problems(text="\n".join(line for line in lines if not line.startswith(missing))))
    assert found.key == f"target.gb10.{missing}"


@pytest.mark.parametrize(
    "flag",
    [
        "host",
        "port",
        "uds",
        "api-key",
        "middleware",
        "shutdown-timeout",
        "kv-cache-memory-bytes",
        "nnodes",
        "model",
    ],
)
def test_flag_nibble_owns_is_found(problems, flag: str) -> None:
    assert "set by nibble" in only(problems(args=f'{flag} = "1"')).message


def test_unknown_target_is_found(problems) -> None:
    text = CLEAN.format(model="", args="", env="", target="").replace("target.gb10", "target.gb11")
    found = only(problems(text=text))
    assert (found.key, found.suggestion) == ("target.gb11", "gb10")


def test_path_that_is_not_the_id_is_found(problems) -> None:
    text = CLEAN.format(model="", args="", env="", target="").replace("org/model", "org/other")
    assert only(problems(text=text)).key == "model.id"


def test_unknown_recipe_key_is_found(problems) -> None:
    found = only(problems(model='licence = "MIT"'))
    assert found.key == "model.licence"


def test_file_that_is_no_toml_is_found(problems) -> None:
    assert "cannot be read" in only(problems(text="[model")).message


def test_recipe_without_a_source_is_found(problems) -> None:
    text = CLEAN.format(model="", args="", env="", target="").replace('source = "a report"', "")
    assert only(problems(text=text)).key == "model.source"


def test_kernel_vllm_never_logs_is_found(problems) -> None:
    found = only(problems(target='expected.moe = "MARLN"'))
    assert (found.key, found.suggestion) == ("target.gb10.expected.moe", "MARLIN")


def test_parallel_size_beyond_the_evidences_gpus_is_found(problems) -> None:
    assert (
        only(problems(target="gpus = 2\nargs.tensor-parallel-size = 4")).key == "target.gb10.gpus"
    )


def test_draft_model_the_recipe_does_not_name_is_found(problems) -> None:
    draft = (
        'args.speculative-config = { method = "dflash", model = "org/draft", num_speculative_tokens'
        " = 4 }"
    )
    assert "names the draft 'org/draft'" in only(problems(target=draft)).message


def test_load_format_whose_package_the_image_lacks_is_found(problems) -> None:
    assert (
        "needs the package fastsafetensors"
        in only(problems(args='load-format = "fastsafetensors"')).message
    )


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("note = 'x'", "matches every machine"),
        ("gpus = 2\n[[target.gb10.variants]]\ngpus = 2", "same gpu and gpus"),
    ],
)
def test_variant_that_cannot_be_told_apart_is_found(problems, variant: str, message: str) -> None:
    assert message in only(problems(target=f"[[target.gb10.variants]]\n{variant}")).message


def test_file_outside_a_two_level_path_is_linted_too(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "model.toml").write_text('[model]\nid = "model"\nsource = "x"')
    assert "the path does not give a Hugging Face id" in only(lint(tmp_path, live=False)).message


@pytest.mark.parametrize(
    "name", ["org/model", "recipes/org/model.toml", "/x/recipes/org/model.toml"]
)
def test_recipe_can_be_named_by_id_or_by_path(problems, tmp_path: Path, name: str) -> None:
    problems(args="tp = 1")
    assert only(lint(tmp_path, [name], live=False)).file == "recipes/org/model.toml"


def test_shipped_recipes_are_clean_against_the_snapshot() -> None:
    assert [p.line() for p in lint(root(), live=False)] == []


def test_every_target_and_variant_of_a_recipe_is_resolved() -> None:
    loaded = load_recipe("nvidia/Qwen3.6-27B-NVFP4", root())
    assert loaded is not None
    got = dict(resolutions(loaded))
    assert set(got) == {
        "target.gb10.", "target.gb10.variants[0].",
        "target.sm120.", "target.sm120.variants[0].",
        "target.b200.",
    }  # fmt: skip
    assert got["target.sm120.variants[0]."].args["--max-model-len"] == 131072

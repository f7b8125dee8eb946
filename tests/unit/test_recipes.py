"""Recipes: what a file may say, and what it comes to on a target with so many GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.recipes.recipe import Recipe, list_recipes, load_recipe
from nibble.recipes.resolution import resolve

LAYERED = """
[model]
id = "org/model"
revision = "0123456789abcdef0123456789abcdef01234567"
source = "a report"
draft = "org/draft"

[args]
reasoning-parser = "qwen3"
max_num_seqs = 16
speculative-config = { method = "mtp", num_speculative_tokens = 3 }

[env]
VLLM_FLOAT32_MATMUL_PRECISION = "high"

[target.sm120]
status = "reported"
evidence = "a run on two cards"
note = "two cards"
gpu = "RTX PRO 6000"
gpus = 2
args.tensor-parallel-size = 2
args.max-num-seqs = 8
expected.moe = "MARLIN"

[[target.sm120.variants]]
gpu = "RTX 5090"
evidence = "another run"
remove = ["tensor-parallel-size", "VLLM_FLOAT32_MATMUL_PRECISION"]
args.max-num-seqs = 4
args.speculative-config = { moe_backend = "triton" }

[[target.sm120.variants]]
gpus = 4
args.tensor-parallel-size = 4
args.max-num-seqs = 6

[[target.sm120.variants]]
gpu = "RTX 5090"
gpus = 4
args.max-num-seqs = 2

[target.hopper]
status = "unsupported"
evidence = "an issue"
"""

PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return write(tmp_path, LAYERED)


def write(folder: Path, text: str) -> Recipe:
    path = folder / "recipes" / "org" / "model.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    loaded = load_recipe("org/model", folder)
    assert loaded is not None
    return loaded


def test_target_section_lies_over_the_general_args(recipe: Recipe) -> None:
    got = resolve(recipe, "sm120", 2, [PRO, PRO])
    assert (got.status, got.evidence, got.gpus) == ("reported", "a run on two cards", 2)
    assert got.args["--reasoning-parser"] == "qwen3"
    assert got.args["--max-num-seqs"] == 8
    assert got.expected == {"moe": "MARLIN"}
    assert got.env == {"VLLM_FLOAT32_MATMUL_PRECISION": "high"}


def test_origins_name_the_part_of_the_file(recipe: Recipe) -> None:
    got = resolve(recipe, "sm120", 4, ["NVIDIA GeForce RTX 5090"] * 4)
    assert got.origins["--reasoning-parser"] == "[args]"
    assert got.origins["--max-num-seqs"] == "[target.sm120] variant 4x RTX 5090"
    assert set(got.origins) == {*got.args, *got.env}


def test_underscores_and_dashes_name_the_same_flag(recipe: Recipe) -> None:
    assert resolve(recipe, "gb10").args["--max-num-seqs"] == 16


def test_variant_of_a_gpu_overrides_removes_and_merges_json_by_key(recipe: Recipe) -> None:
    got = resolve(recipe, "sm120", 1, ["NVIDIA GeForce RTX 5090"])
    assert got.evidence == "another run"
    assert got.status == "reported"
    assert "--tensor-parallel-size" not in got.args
    assert got.env == {}
    assert got.args["--speculative-config"] == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "moe_backend": "triton",
    }


@pytest.mark.parametrize(
    ("count", "name", "max_num_seqs"),
    [(2, PRO, 8), (4, PRO, 6), (1, "RTX 5090", 4), (4, "RTX 5090", 2)],
)
def test_most_specific_variant_wins(
    recipe: Recipe, count: int, name: str, max_num_seqs: int
) -> None:
    assert resolve(recipe, "sm120", count, [name] * count).args["--max-num-seqs"] == max_num_seqs


def test_gpu_no_evidence_is_for_gets_only_the_general_args_and_is_unknown(recipe: Recipe) -> None:
    got = resolve(recipe, "sm120", 2, ["NVIDIA GeForce RTX 5070 Ti"] * 2)
    assert got.status == "unknown"
    assert set(got.args) == {"--reasoning-parser", "--max-num-seqs", "--speculative-config"}
    assert got.args["--max-num-seqs"] == 16
    assert any("reported only for 2x RTX PRO 6000" in note for note in got.notes)


def test_fewer_gpus_than_the_evidence_used_are_unknown_and_more_are_not(recipe: Recipe) -> None:
    assert resolve(recipe, "sm120", 1, [PRO]).status == "unknown"
    assert resolve(recipe, "sm120", 3, [PRO] * 3).status == "reported"


def test_mixed_gpus_match_no_kind(recipe: Recipe) -> None:
    assert resolve(recipe, "sm120", 2, [PRO, "NVIDIA GeForce RTX 5090"]).status == "unknown"


def test_planning_for_absent_hardware_uses_the_evidences_own_machine(recipe: Recipe) -> None:
    got = resolve(recipe, "sm120")
    assert (got.status, got.gpus, got.args["--tensor-parallel-size"]) == ("reported", 2, 2)


def test_target_without_a_section_is_unknown_and_says_what_is_known(recipe: Recipe) -> None:
    got = resolve(recipe, "gb10", 1, ["NVIDIA GB10"])
    assert (got.status, got.evidence) == ("unknown", "")
    assert "no source reports this model on gb10 (known: hopper, sm120)" in got.notes


def test_unsupported_stays_unsupported_whatever_the_machine(recipe: Recipe) -> None:
    assert resolve(recipe, "hopper", 8, ["NVIDIA H200"] * 8).status == "unsupported"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[model]\nid = "org/model"\nrevison = "x"', "model.revison: unknown key"),
        (
            '[model]\nid = "org/model"\n[target.gb10]\nevidense = "x"',
            "target.gb10.evidense: unknown key",
        ),
        ('[model]\nid = "org/model"\n[arg]\nx = 1', "arg: unknown key"),
        (
            '[model]\nid = "org/model"\n[target.gb10]\ngpus = true',
            "target.gb10.gpus: is bool, not int",
        ),
        ('[model]\nid = "org/model"\n[env]\nNCCL_DEBUG = 1', "env.NCCL_DEBUG: is int"),
        (
            '[model]\nid = "org/model"\n[target.gb10.expected]\nmeo = "X"',
            "target.gb10.expected.meo: unknown key",
        ),
        ("[args]\nmax-model-len = 1", "model: the table is missing"),
        ('[model]\nrevision = ""', "model.id: is missing"),
    ],
)
def test_malformed_recipe_is_one_configuration_error_naming_the_key(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(NibbleError) as caught:
        write(tmp_path, text)
    assert caught.value.code is ExitCode.CONFIG
    assert said in caught.value.line()


def test_misspelled_key_names_the_nearest_valid_one(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="did you mean revision"):
        write(tmp_path, '[model]\nid = "org/model"\nrevison = "x"')


def test_file_that_is_no_toml_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="cannot be read"):
        write(tmp_path, "[model\n")


@pytest.mark.parametrize(
    "model_id", ["/data/model", "./model", "model", "org/other", "a/b/c", "../recipes/org/model"]
)
def test_what_is_no_recipe_id_has_no_recipe(tmp_path: Path, model_id: str) -> None:
    write(tmp_path, LAYERED)
    assert load_recipe(model_id, tmp_path) is None


def test_list_names_ids_by_their_paths(tmp_path: Path) -> None:
    write(tmp_path, LAYERED)
    assert list_recipes(tmp_path) == ["org/model"]


# --- the shipped recipes ---

SEEDS = {
    "ig1/Qwen3.5-27B-NVFP4": ("gb10", 65536),
    "nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4": ("gb10", 65536),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": ("gb10", 131072),
    "RedHatAI/gemma-4-31B-it-NVFP4": ("gb10", 32768),
    "nvidia/gemma-4-31B-it-NVFP4": ("gb10", 32768),
}


@pytest.mark.parametrize("model_id", SEEDS)
def test_seed_models_keep_the_seeds_context(model_id: str) -> None:
    target, context = SEEDS[model_id]
    loaded = load_recipe(model_id, root())
    assert loaded is not None
    assert resolve(loaded, target).args["--max-model-len"] == context


def test_qwen3_next_has_mtp_without_prefix_caching_and_a_draft_kernel_that_takes_bf16() -> None:
    loaded = load_recipe("nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4", root())
    assert loaded is not None
    args = resolve(loaded, "gb10").args
    assert args["--speculative-config"]["method"] == "qwen3_next_mtp"
    assert args["--enable-prefix-caching"] is False
    # marlin refuses the MTP layer's bf16 experts: vllm 0.32 fused_moe/oracle/unquantized.py
    assert (args["--moe-backend"], args["--speculative-config"]["moe_backend"]) == (
        "marlin",
        "triton",
    )


def test_glm47_of_seed_003_runs_on_four_cards_with_pinned_remote_code() -> None:
    loaded = load_recipe("Salyut1/GLM-4.7-NVFP4", root())
    assert loaded is not None
    got = resolve(
        loaded, "sm120", 4, ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"] * 4
    )
    assert got.revision == "531df318dbe2877b24881f6e15024c7f945e7048"
    seed = {
        "--tensor-parallel-size": 4,
        "--attention-backend": "TRITON_ATTN",
        "--gpu-memory-utilization": 0.80,
        "--quantization": "modelopt_fp4",
        "--dtype": "bfloat16",
        "--trust-remote-code": True,
    }
    assert {flag: got.args[flag] for flag in seed} == seed
    assert got.expected["moe"] == "VLLM_CUTLASS"


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200", "hopper", "cpu"])
def test_cloverlm_has_the_seeds_settings_with_cuda_graphs(target: str) -> None:
    loaded = load_recipe("daslab-testing/CloverLM", root())
    assert loaded is not None
    got = resolve(loaded, target)
    assert got.status == "unknown"
    assert got.args == {"--max-model-len": 1024, "--gpu-memory-utilization": 0.9}


def test_wrong_answer_on_b200_is_avoided_for_nemotron_nano_and_minimax() -> None:
    for model_id in ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4", "nvidia/MiniMax-M2.7-NVFP4"):
        loaded = load_recipe(model_id, root())
        assert loaded is not None
        assert resolve(loaded, "b200").args["--moe-backend"] == "flashinfer_cutlass"


def test_minimax_m3_is_unsupported_on_hopper() -> None:
    loaded = load_recipe("nvidia/MiniMax-M3-NVFP4", root())
    assert loaded is not None
    assert resolve(loaded, "hopper").status == "unsupported"


def test_at_least_twenty_models_beside_the_seeds_over_four_targets() -> None:
    recipes = [r for i in list_recipes(root()) if (r := load_recipe(i, root())) is not None]
    others = [r for r in recipes if r.id not in SEEDS and r.targets]
    assert len(others) >= 20
    for target in ("gb10", "sm120", "b200", "hopper"):
        reported = [
            r for r in others if target in r.targets and r.targets[target].status == "reported"
        ]
        assert len(reported) >= 3, target


def test_nothing_is_called_verified_that_no_result_here_shows() -> None:
    for model_id in list_recipes(root()):
        loaded = load_recipe(model_id, root())
        assert loaded is not None
        for section in loaded.targets.values():
            for part in (section, *section.variants):
                if part.status == "verified":
                    assert list(root().glob("benchmarks/results/*")), model_id

"""Known risks: each rule where it belongs and nowhere else, above recipes or below them, below
the user, and linted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from nibble.recipes.lint import lint, lint_rules
from nibble.recipes.rules import Rule, RuleContext, holds, in_effect, load_rules, parse_rules
from tests.support.models.tiny_model import MODELOPT_NVFP4, QWEN3, write_model, write_safetensors
from tests.support.refusals import refusal_of

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/nonexistent"}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
W4A16 = MODELOPT_NVFP4 | {"quant_algo": "W4A16_NVFP4"}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4"}},
}
PACKED_GROUP = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CT_MIXED = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "g": {"weights": PACKED_GROUP, "input_activations": PACKED_GROUP},
        "h": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float"},
        },
    },
}
FP_QUANT = {"quant_method": "fp_quant", "forward_dtype": "nvfp4", "hadamard_group_size": 16}


def plan(*words: str, **environ: str) -> Plan:
    return plan_for(read_wishes([str(word) for word in words], OFFLINE | environ))


def refusal(*words: str, **environ: str) -> NibbleError:
    return refusal_of(lambda: plan(*words, **environ))


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """A folder with the config of a model of a family and scheme; its tensors are plain unless
    `k` is given.
    """

    def make(quantization: Mapping[str, Any] | None, k: int = 0, **config: Any) -> str:
        extra = {"quantization_config": dict(quantization)} if quantization else {}
        folder = write_model(
            tmp_path / f"m{len(list(tmp_path.iterdir()))}", {**QWEN3, **config, **extra}
        )
        if k:
            name = "model.layers.0.mlp.down_proj."
            tensors = {
                f"{name}weight": ("U8", [64, k // 2]),
                f"{name}weight_scale": ("F8_E4M3", [64, k // 16]),
                f"{name}weight_scale_2": ("F32", []),
                f"{name}input_scale": ("F32", []),
            }
            write_safetensors(folder / "model.safetensors", tensors)
        return str(folder)

    return make


def notices(found: Plan) -> str:
    return "\n".join(found.notices)


# --- N11, N26, #49076: b12x on SM12x


@pytest.mark.parametrize("target", ["sm120", "gb10"])
@pytest.mark.parametrize("how", ["command line", "extra args", "json", "environment"])
def test_flashinfer_b12x_is_refused_for_nvfp4_experts_however_it_is_asked_for(
    model, target, how
) -> None:
    folder = model(MODELOPT_NVFP4, **MOE)
    words, environ = [folder, "--target", target], {}
    if how == "command line":
        words += ["--moe-backend", "flashinfer-b12x"]  # vLLM takes hyphens too
    elif how == "json":
        words += ["--kernel-config", '{"moe_backend": "flashinfer_b12x"}']
    elif how == "extra args":
        environ["VLLM_EXTRA_ARGS"] = "--moe-backend FLASHINFER_B12X"
    else:
        environ["VLLM_FLASHINFER_MOE_BACKEND"] = "flashinfer_b12x"
    error = refusal(*words, **environ)
    assert error.code == ExitCode.CONFIG and "NIBBLE_ALLOW_RISK=flashinfer-b12x-moe" in error.line()
    assert "\n" not in error.line() and "0.095" in error.line()


@pytest.mark.parametrize(
    ("scheme", "config", "target"),
    [(FP8, MOE, "gb10"), (MODELOPT_NVFP4, {}, "gb10"), (MODELOPT_NVFP4, MOE, "b200")],
    ids=["another scheme", "no experts", "another target"],
)
def test_flashinfer_b12x_is_left_to_vllm_elsewhere(model, scheme, config, target) -> None:
    found = plan(model(scheme, **config), "--target", target, "--moe-backend", "flashinfer_b12x")
    assert found.args["--moe-backend"].value == "flashinfer_b12x"


def test_no_plan_chooses_b12x_by_itself(model) -> None:
    for target in ("sm120", "gb10"):
        found = plan(model(MODELOPT_NVFP4, **MOE), "--target", target)
        assert not [name for name, choice in found.args.items() if "b12x" in str(choice.value)]
        assert "b12x" not in notices(found)


@pytest.mark.parametrize("flag", ["--moe-backend", "--linear-backend"])
def test_the_direct_b12x_kernels_are_taken_with_a_notice(model, flag) -> None:
    found = plan(model(MODELOPT_NVFP4, **MOE), "--target", "gb10", flag, "b12x")
    assert found.args[flag].value == "b12x" and f"{flag} b12x: vLLM never chooses" in notices(found)
    assert "vLLM never chooses" not in notices(plan(model(None), "--target", "gb10", flag, "b12x"))
    assert "vLLM never chooses" not in notices(
        plan(model(MODELOPT_NVFP4), "--target", "b200", flag, "b12x")
    )


def test_b12x_experts_in_a_mixed_checkpoint_get_a_notice(model) -> None:
    asked = ["--target", "sm120", "--moe-backend", "b12x"]
    assert "may have FP8 experts" in notices(plan(model(CT_MIXED, **MOE), *asked))
    assert "may have FP8 experts" not in notices(plan(model(MODELOPT_NVFP4, **MOE), *asked))


# --- #52308: Nemotron on B200


NEMOTRON = {"model_type": "nemotron_h", **MOE}


def test_nemotron_on_b200_gets_the_cutlass_experts(model) -> None:
    choice = plan(model(MODELOPT_NVFP4, **NEMOTRON), "--target", "b200").args["--moe-backend"]
    assert (choice.value, choice.source) == ("flashinfer_cutlass", "rule nemotron-trtllm-moe")
    assert "vllm-project/vllm#52308" in choice.reason


@pytest.mark.parametrize(
    ("scheme", "config", "target"),
    [
        (MODELOPT_NVFP4, NEMOTRON, "hopper"),
        (W4A16, NEMOTRON, "b200"),
        (FP8, NEMOTRON, "b200"),
        (MODELOPT_NVFP4, MOE, "b200"),
        (MODELOPT_NVFP4, {"model_type": "nemotron_h"}, "b200"),
    ],
    ids=["another target", "W4A16", "FP8", "another family", "no experts"],
)
def test_no_other_model_or_machine_gets_them(model, scheme, config, target) -> None:
    assert "--moe-backend" not in plan(model(scheme, **config), "--target", target).args


def test_nemotrons_trtllm_experts_are_refused_on_b200_only(model) -> None:
    words = [model(MODELOPT_NVFP4, **NEMOTRON), "--moe-backend", "flashinfer_trtllm", "--target"]
    assert "#52308" in refusal(*words, "b200").line()
    assert plan(*words, "gb10").args["--moe-backend"].value == "flashinfer_trtllm"


@pytest.mark.parametrize(
    ("words", "environ", "source"),
    [
        (["--moe-backend", "cutlass"], {}, "command line"),
        ([], {"VLLM_EXTRA_ARGS": "--moe-backend cutlass"}, "VLLM_EXTRA_ARGS"),
        ([], {"VLLM_FLASHINFER_MOE_BACKEND": "cutlass"}, "environment VLLM_FLASHINFER_MOE_BACKEND"),
        ([], {"NIBBLE_CONFIG": "{file}"}, "file {file}"),
    ],
)
def test_what_a_user_asks_for_wins_over_a_forced_value_with_a_notice(
    model, tmp_path, words, environ, source
) -> None:
    file = tmp_path / "recipe"  # no name of a file may pass for a layer
    file.write_text('[args]\nmoe-backend = "cutlass"\n')
    environ = {name: value.format(file=file) for name, value in environ.items()}
    found = plan(model(MODELOPT_NVFP4, **NEMOTRON), "--target", "b200", *words, **environ)
    choice = found.args["--moe-backend"]
    assert (choice.value, choice.source) == ("cutlass", source.format(file=file))
    assert "nemotron-trtllm-moe" in notices(found) and "#52308" in notices(found)


def test_an_explicit_auto_is_the_users_own_too(model) -> None:
    found = plan(model(MODELOPT_NVFP4, **NEMOTRON), "--target", "b200", "--moe-backend", "auto")
    assert found.args["--moe-backend"].value == "auto" and "rule nemotron-trtllm-moe" in notices(
        found
    )


def test_a_backend_in_kernel_config_counts_as_asked_for(model) -> None:
    words = ["--target", "b200", "--kernel-config", '{"moe_backend": "cutlass"}']
    found = plan(model(MODELOPT_NVFP4, **NEMOTRON), *words)
    assert "--moe-backend" not in found.args and "--moe-backend cutlass (command line)" in notices(
        found
    )


# --- #48898: K of a rank


def test_marlin_is_forced_where_a_ranks_k_is_no_multiple_of_32(model) -> None:
    words = [
        model(MODELOPT_NVFP4, k=3696, num_attention_heads=8, model_type="afmoe"),
        "--target",
        "sm120",
        "--tensor-parallel-size",
    ]
    # 3696 = 115.5 x 32
    assert plan(*words, "1", NUM_GPUS="8").args["--linear-backend"].value == "marlin"
    # Qwen2.5-72B: 231 x 128
    words[0] = model(MODELOPT_NVFP4, k=29568, num_attention_heads=8, model_type="afmoe")
    assert "--linear-backend" not in plan(*words, "4", NUM_GPUS="8").args
    found = plan(*words, "8", NUM_GPUS="8").args["--linear-backend"]
    assert (found.value, found.source) == ("marlin", "rule sm120-unaligned-k")
    assert (
        "--linear-backend"
        not in plan(words[0], "--target", "b200", *words[3:], "8", NUM_GPUS="8").args
    )


def test_other_schemes_keep_their_kernels_whatever_their_k(model) -> None:
    found = plan(model(W4A16, k=3696, model_type="afmoe"), "--target", "sm120")
    assert "--linear-backend" not in found.args


def test_before_the_shapes_are_known_eight_ranks_count_as_unaligned() -> None:
    words = ["acme/dense-NVFP4", "--target", "sm120", "--tensor-parallel-size"]
    assert plan(*words, "8", NUM_GPUS="8").args["--linear-backend"].value == "marlin"
    assert "--linear-backend" not in plan(*words, "4", NUM_GPUS="8").args
    assert "--linear-backend" not in plan("acme/dense", *words[1:], "8", NUM_GPUS="8").args


# --- #49070, #50557: MiniMax-M3 on Hopper


def test_marlin_experts_of_minimax_m3_are_refused_on_hopper_only(model) -> None:
    family = {"model_type": "minimax_m3", **MOE}
    words = ["--moe-backend", "marlin", "--target"]
    assert "#49070" in refusal(model(MODELOPT_NVFP4, **family), *words, "hopper").line()
    assert (
        plan(model(MODELOPT_NVFP4, **family), *words, "sm120").args["--moe-backend"].value
        == "marlin"
    )
    assert (
        plan(model(MODELOPT_NVFP4, **MOE), *words, "hopper").args["--moe-backend"].value == "marlin"
    )
    assert plan(model(FP8, **family), *words, "hopper").args["--moe-backend"].value == "marlin"


# --- #49926: mixed checkpoints on GB10


@pytest.mark.parametrize("words", [[], ["--moe-backend", "marlin"]])
def test_a_mixed_checkpoint_on_gb10_is_told_of_the_crashes(model, words) -> None:
    assert "#49926" in notices(plan(model(MIXED, **MOE), "--target", "gb10", *words))
    assert "#49926" not in notices(plan(model(MIXED, **MOE), "--target", "sm120", *words))
    assert "#49926" not in notices(plan(model(W4A16, **MOE), "--target", "gb10", *words))


# --- N25: FlashInfer's target


@pytest.mark.parametrize(
    ("target", "value"), [("sm120", "12.0f"), ("gb10", "12.1a"), ("b200", None), ("hopper", None)]
)
def test_flashinfer_compiles_for_the_gpu_of_the_target(target: str, value: str | None) -> None:
    choice = plan("acme/x", "--target", target).env.get("FLASHINFER_CUDA_ARCH_LIST")
    assert (choice.value if choice else None) == value
    if choice:
        assert "--attention-backend TRITON_ATTN" in choice.reason
        own = plan("acme/x", "--target", target, FLASHINFER_CUDA_ARCH_LIST="12.0a 12.1a")
        assert own.env["FLASHINFER_CUDA_ARCH_LIST"].value == "12.0a 12.1a"


# --- N20: fp_quant


@pytest.mark.parametrize("target", ["sm120", "gb10"])
def test_fp_quant_is_refused_where_vllms_wheel_has_no_code_for_it(model, target: str) -> None:
    assert "QuTLASS" in refusal(model(FP_QUANT), "--target", target).line()
    assert (
        "QuTLASS" in refusal(model(None), "--target", target, "--quantization", "fp_quant").line()
    )
    plan(model(None), "--target", target)
    allowed = plan(model(FP_QUANT), "--target", target, "--allow-risk", "sm12x-fp-quant")
    assert "you accepted the risk sm12x-fp-quant" in notices(allowed)


def test_fp_quant_is_served_on_b200(model) -> None:
    checkpoint = plan(model(FP_QUANT), "--target", "b200").checkpoint
    assert checkpoint is not None and checkpoint.scheme.vllm_quantization == "fp_quant"


# --- taking a risk


def test_a_risk_named_is_taken_and_said(model) -> None:
    folder = model(MODELOPT_NVFP4, **NEMOTRON)
    words = [folder, "--target", "b200", "--moe-backend", "flashinfer_trtllm"]
    found = plan(*words, NIBBLE_ALLOW_RISK="sm12x-fp-quant, nemotron-trtllm-moe")
    assert found.args["--moe-backend"].value == "flashinfer_trtllm"
    assert "you accepted the risk nemotron-trtllm-moe" in notices(found) and "sm12x" not in notices(
        found
    )
    assert found.rules == ()
    assert plan(folder, "--target", "b200").rules == ("nemotron-trtllm-moe",)


@pytest.mark.parametrize("given", ["nemotron", "nemotron-trtllm-moe,x", "*"])
def test_a_risk_nobody_knows_is_an_error(given: str) -> None:
    error = refusal("acme/x", "--target", "b200", "--allow-risk", given)
    assert error.code == ExitCode.CONFIG and "nemotron-trtllm-moe" in error.line()


# --- recipes


@pytest.fixture
def with_recipe(tmp_path, monkeypatch) -> Callable[..., Any]:
    """A root whose one recipe says `args` for acme/Nemotron-3-Tiny-NVFP4 on b200."""

    def make(args: str, status: str = "reported", evidence: str = "somebody") -> Path:
        place = tmp_path / "root"
        for name in ("targets", "rules"):
            shutil.copytree(root() / name, place / name, dirs_exist_ok=True)
        (place / "recipes" / "acme").mkdir(parents=True)
        (place / "recipes" / "acme" / "Nemotron-3-Tiny-NVFP4.toml").write_text(
            '[model]\nid = "acme/Nemotron-3-Tiny-NVFP4"\nsource = "x"\n[target.b200]\nstatus ='
            f' "{status}"\nevidence = "{evidence}"\n[target.b200.args]\n{args}\n'
        )
        (place / "benchmarks" / "results").mkdir(parents=True)
        (place / "benchmarks" / "results" / "a.json").write_text("{}")
        monkeypatch.setenv("NIBBLE_ROOT", str(place))
        return place

    return make


def test_a_rule_about_wrong_output_stands_above_a_reported_recipe(with_recipe) -> None:
    with_recipe('moe-backend = "cutlass"')
    found = plan("acme/Nemotron-3-Tiny-NVFP4", "--target", "b200")
    assert found.args["--moe-backend"].value == "flashinfer_cutlass"
    assert "in place of the recipe's cutlass" in notices(found)


def test_a_verified_recipe_stands_above_any_rule(with_recipe) -> None:
    with_recipe('moe-backend = "cutlass"', "verified", "benchmarks/results/a.json")
    choice = plan("acme/Nemotron-3-Tiny-NVFP4", "--target", "b200").args["--moe-backend"]
    assert (choice.value, choice.source) == ("cutlass", "recipe")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("flashinfer_trtllm", "is refused by the rule nemotron-trtllm-moe"),
        ("cutlass", "is replaced by the rule"),
    ],
)
def test_lint_finds_a_recipe_against_a_rule(with_recipe, value: str, message: str) -> None:
    place = with_recipe(f'moe-backend = "{value}"')
    found = lint(place, live=False)
    assert [p.key for p in found] == ["target.b200.args.moe-backend"] * len(
        found
    ) and message in found[0].message
    path = place / "recipes" / "acme" / "Nemotron-3-Tiny-NVFP4.toml"
    path.write_text(path.read_text().replace("b200", "sm120"))
    assert lint(place, live=False) == []


# --- FlashInfer's gated delta rule on Hopper

GDN = {"model_type": "qwen3_next"}
GDN_FLAG = "--gdn-prefill-backend"


def test_qwen3_next_on_hopper_waits_for_no_compiler_in_every_start(model) -> None:
    choice = plan(model(MODELOPT_NVFP4, **GDN), "--target", "hopper").args[GDN_FLAG]
    assert (choice.value, choice.source) == ("triton", "rule hopper-gdn-prefill")
    assert GDN_FLAG not in plan(model(MODELOPT_NVFP4, **GDN), "--target", "b200").args
    assert GDN_FLAG not in plan(model(MODELOPT_NVFP4), "--target", "hopper").args


@pytest.mark.parametrize(
    "words",
    [[GDN_FLAG, "flashinfer"], ["--additional-config", '{"gdn_prefill_backend": "flashinfer"}']],
    ids=["flag", "key of --additional-config"],
)
def test_flashinfers_kernel_is_kept_where_somebody_wants_it(model, words: list[str]) -> None:
    found = plan(model(MODELOPT_NVFP4, **GDN), "--target", "hopper", *words)
    given = found.args.get(GDN_FLAG, found.args[words[0]]).value
    kernel = given if isinstance(given, str) else given["gdn_prefill_backend"]
    assert kernel == "flashinfer"
    assert "in place of triton, which rule hopper-gdn-prefill requires" in notices(found)


# --- the file itself

SOUND = 'id = "x"\neffect = "crash"\nreason = "r"\nreference = "s"\nwhen = { targets = ["gb10"] }\n'


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SOUND + "verb = 'force'\n", "rule.0.verb"),
        (SOUND.replace("targets", "target"), "rule.0.when.target"),
        (SOUND.replace("crash", "bad"), "rule.0.effect"),
        (SOUND.replace('id = "x"\n', ""), "rule.0.id"),
        (SOUND + "forbid = { moe-backend = 'marlin' }\n", "rule.0.forbid.moe-backend"),
        (SOUND.replace("targets = [", "nvfp4 = 'yes', targets = ["), "rule.0.when.nvfp4"),
        (SOUND + "[[rule]]\n" + SOUND, "the id x is given twice"),
        (SOUND + "when =", "cannot be read"),
    ],
)
def test_a_rule_that_is_not_understood_is_an_error(tmp_path, rule: str, message: str) -> None:
    file = tmp_path / "backends.toml"
    file.write_text("[[rule]]\n" + rule)
    with pytest.raises(NibbleError) as caught:
        parse_rules(file)
    assert caught.value.code == ExitCode.CONFIG and message in caught.value.line()


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('force = { moe-backend = "flashinfer_cutlas" }', "x.force.moe-backend"),
        ('forbid = { moe-backand = ["marlin"] }', "x.forbid.moe-backand"),
        ('warn = { linear-backend = ["marlin", "b13x"] }', "x.warn.linear-backend"),
        ('force = { attention-backend = "TRITON" }', "x.force.attention-backend"),
        ('env = { VLLM_USE_FLASHINFER_MOE_FP4 = "1" }', "x.env.VLLM_USE_FLASHINFER_MOE_FP4"),
        ("", "x.when"),
    ],
)
def test_lint_holds_rules_against_vllm(tmp_path, line: str, key: str) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "backends.toml").write_text(f"[[rule]]\n{SOUND}{line}\n")
    assert [p.key for p in lint_rules(tmp_path, load_schema())] == [key]


def test_the_shipped_rules_are_clean() -> None:
    assert lint_rules(root(), load_schema()) == []


def test_a_root_without_rules_plans_nothing(tmp_path, monkeypatch) -> None:
    shutil.copytree(root() / "targets", tmp_path / "targets")
    monkeypatch.setenv("NIBBLE_ROOT", str(tmp_path))
    assert "rules/backends.toml cannot be read" in refusal("acme/x", "--target", "gb10").line()


@pytest.mark.parametrize("rule", load_rules(root()), ids=lambda rule: rule.id)
def test_every_rule_names_its_targets_and_those_of_gpus_are_silent_on_the_cpu(rule: Rule) -> None:
    assert rule.when.targets
    assert rule.when.targets == ("cpu",) or "cpu" not in rule.when.targets


def test_images_carry_the_rules_and_keep_what_the_driver_compiles() -> None:
    for path in sorted((root() / "docker").glob("Dockerfile.*")):
        text = path.read_text()
        assert "COPY rules /opt/nibble/rules/" in text, path.name
        assert ("CUDA_CACHE_PATH=/var/cache/nibble/cuda" in text) == (path.suffix != ".cpu"), (
            path.name
        )
    assert "!rules" in (root() / ".dockerignore").read_text()


@pytest.mark.parametrize("target", ["gb10", "sm120", "b200", "hopper"])
def test_the_drivers_cache_holds_flash_attention(target: str) -> None:
    assert int(plan("acme/x", "--target", target).env["CUDA_CACHE_MAXSIZE"].value) >= 1 << 30


def test_gb10_schedules_what_vllm_0_33_would() -> None:
    args = plan("acme/x", "--target", "gb10").args
    assert args["--max-num-batched-tokens"].value == 2048 and args["--max-num-seqs"].value <= 256
    assert plan("acme/x", "--target", "gb10", "--max-num-batched-tokens", "8192").args[
        "--max-num-batched-tokens"
    ].value in (8192, "8192")
    assert "--max-num-batched-tokens" not in plan("acme/x", "--target", "sm120").args


def test_the_flag_itself_comes_before_its_key_in_json() -> None:
    args = {"--moe-backend": "marlin", "--kernel-config": {"moe_backend": "cutlass"}}
    assert in_effect("--moe-backend", args) == "marlin"
    assert in_effect("--moe-backend", args | {"--moe-backend": "auto"}) == "cutlass"
    assert in_effect("--moe-backend", {}) == "auto"


def test_the_plan_as_json_names_its_rules(model) -> None:
    data = json.loads(
        json.dumps(plan(model(MODELOPT_NVFP4, **NEMOTRON), "--target", "b200").to_json())
    )
    assert data["rules"] == ["nemotron-trtllm-moe"]
    assert data["args"]["--moe-backend"]["source"] == "rule nemotron-trtllm-moe"


def test_an_unknown_checkpoint_is_judged_by_its_name() -> None:
    when = next(rule.when for rule in load_rules(root()) if rule.id == "nemotron-trtllm-moe")
    assert holds(when, RuleContext("b200", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4"))
    assert not holds(when, RuleContext("b200", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"))
    assert not holds(
        when, RuleContext("b200", "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4")
    )

"""Checks a model's files before a load, in any format: scales, norms, tokenizer, CPU support."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from nibble.checkpoint import Checkpoint
from nibble.checkpoint.cloverlm import is_cloverlm
from nibble.checkpoint.plausible import check_plausible
from nibble.errors import ExitCode, NibbleError
from nibble.hub.files import has_tokenizer
from nibble.plan.plan import Plan
from nibble.plan.validate import drafts_from_itself
from nibble.serve.preflight.fp8 import check_fp8_on_cpu
from nibble.serve.preflight.nvfp4 import check_nvfp4

_EXPERT_UP = re.compile(r"^(.+\.experts\.\d+\.)up_proj\.")


def check_model_files(plan: Plan, child: Mapping[str, str]) -> list[str]:
    """Lines to print for a start of `plan` with the environment `child`. Raises MODEL or CONFIG,
    naming a tensor or a file.
    """
    check_tokenizer(plan)
    check_experts_on_cpu(plan)
    check_fp8_on_cpu(plan)
    lines = check_nvfp4(plan, child)
    checkpoint = plan.checkpoint
    if checkpoint is None or "dummy" in str(_value(plan, "--load-format")):
        return lines
    return lines + check_values(
        checkpoint, drafts_from_itself(_value(plan, "--speculative-config"))
    )


def check_values(checkpoint: Checkpoint, with_draft: bool) -> list[str]:
    """Warnings about unlikely scales; raises MODEL for invalid ones."""
    if checkpoint.path is None:
        return []
    weights = [weight for weight in checkpoint.nvfp4 if with_draft or not weight.is_draft]
    model_type = str(checkpoint.text_config.get("model_type") or checkpoint.model_type)
    found = check_plausible(
        checkpoint.path, checkpoint.tensors, weights, model_type, checkpoint.num_layers
    )
    for problem in found.problems:
        if with_draft or not problem.is_draft:
            raise problem.error(checkpoint.where)
    return [f"warning: {doubt}" for doubt in found.doubts]


def check_tokenizer(plan: Plan) -> None:
    """Raise MODEL for a folder without a vocabulary, before vLLM starts its processes."""
    has_own = "--tokenizer" in plan.args or _value(plan, "--skip-tokenizer-init") is True
    checkpoint = plan.checkpoint
    if has_own or checkpoint is None or checkpoint.path is None or is_cloverlm(checkpoint):
        return
    if not has_tokenizer(Path(checkpoint.path)):
        expected = "tokenizer.json, tokenizer.model, vocab.json or another vocabulary"
        action = "download the model again, or name another folder with --tokenizer"
        raise NibbleError(
            ExitCode.MODEL,
            what=f"{checkpoint.path} has no tokenizer",
            expected=expected,
            action=action,
        )


def check_experts_on_cpu(plan: Plan) -> None:
    """Raise CONFIG for experts without a gate on the CPU (Nemotron-H): vllm 0.32
    fused_moe/config.py:1403.
    """
    checkpoint = plan.checkpoint
    if plan.target.device != "cpu" or checkpoint is None:
        return
    for name in checkpoint.tensors:
        match = _EXPERT_UP.match(name)
        if match and not any(
            other.startswith(f"{match[1]}gate_proj.") for other in checkpoint.tensors
        ):
            module = name.rpartition(".")[0]
            what = (
                f"{module} of {checkpoint.id} is an expert without gate_proj, for which vLLM 0.32"
                " has no layer on the CPU"
            )
            raise NibbleError(
                ExitCode.CONFIG,
                what=what,
                expected="experts with a gate",
                action="serve it on a GPU",
            )
        if match:
            return  # all experts of a model are alike


def _value(plan: Plan, flag: str) -> object:
    choice = plan.args.get(flag)
    return choice.value if choice else None

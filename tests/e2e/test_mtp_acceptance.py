"""A tiny NVFP4 Qwen3-Next with an MTP head, served by nibble: its drafts are accepted, however
`mtp.fc` is stored.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.docker.containers import hub_cache
from tests.support.models.mtp_model import VOCAB, next_token, write_mtp_model
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOKENS, DRAFTS = 96, 2


def swap_halves(model: Path) -> None:
    """What a loader does that takes the hidden state for the embedding."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(
        tensors["mtp.fc.weight"].shape[1] // 2, 1
    )
    save_file(tensors, file, metadata={"format": "pt"})


def with_recipe(folder: Path, model: Path) -> dict[str, str]:
    """The variables of a start that finds `model` in the Hugging Face cache as test/mtp, and a
    recipe for it.
    """
    for name in ("targets", "rules", "models", "patches"):
        (folder / "root").mkdir(parents=True, exist_ok=True)
        (folder / "root" / name).symlink_to(ROOT / name)
    recipe = folder / "root/recipes/test/mtp.toml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        '[model]\nid = "test/mtp"\nsource = "made here"\n'
        '[target.cpu]\nstatus = "reported"\nevidence = "made here"\nmin_acceptance = 0.5\n'
    )
    cache = hub_cache(folder / "huggingface", model, "test/mtp")
    return {"NIBBLE_ROOT": str(folder / "root"), "HF_HOME": str(cache)}


def answer_and_acceptance(
    folder: Path, model: Path | str, verdict: str = "passed", **environ: str
) -> tuple[list[int], float]:
    """The tokens of one greedy answer, and the share of drafted tokens that was accepted;
    `verdict` of the canary on it.
    """
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS})
    words = [
        "serve",
        str(model),
        "--speculative-config",
        speculation,
        "--enforce-eager",
        "--max-model-len",
        "512",
    ]
    server = Server(folder, words, NIBBLE_CANARY="warn", **environ)
    try:
        server.wait_until_ready()
        told = server.status()
        assert told is not None
        canary = {found["mechanism"]: found for found in told["canary"]["findings"]}
        assert canary["drafts"]["verdict"] == verdict, canary
        alarm = (
            "the canary failed: drafts: " in server.log() and "expects 50% at least" in server.log()
        )
        assert alarm == (verdict == "failed")
        prompt = [7]
        while len(prompt) < 8:
            prompt.append(next_token(prompt[-1]))
        request = {"model": "default", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        status, body = server.ask(
            "/v1/completions", {**request, "ignore_eos": True, "return_token_ids": True}
        )
        assert status == 200, body
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
            metrics = response.read().decode()
    finally:
        server.end()
    found = {
        name: float(value)
        for name, value in re.findall(
            r"^vllm:spec_decode_num_(\w+)_tokens_total{.*} (\S+)$", metrics, re.M
        )
    }
    assert found["draft"] > 0
    return [prompt[-1], *body["choices"][0]["token_ids"]], found["accepted"] / found["draft"]


@pytest.mark.parametrize("quantized_fc", [False, True], ids=["fc in BF16", "fc in NVFP4"])
def test_drafts_are_accepted(tmp_path: Path, quantized_fc: bool) -> None:
    model = write_mtp_model(tmp_path / "model", "qwen3_next", quantized_fc=quantized_fc)
    tokens, acceptance = answer_and_acceptance(tmp_path / "server", model)
    assert [next_token(token) for token in tokens[:-1]] == tokens[1:]
    assert acceptance > 0.95, f"chance is {1 / VOCAB}"


def test_drafts_of_an_nvfp4_copy_of_the_head_are_accepted(tmp_path: Path) -> None:
    model = write_mtp_model(tmp_path / "model", "qwen3_next")
    strict = {"NIBBLE_DRAFT_HEAD": "nvfp4", "NIBBLE_KERNEL_ASSERTION": "strict"}
    tokens, acceptance = answer_and_acceptance(tmp_path / "server", model, **strict)
    assert [next_token(token) for token in tokens[:-1]] == tokens[1:]
    assert acceptance > 0.95


def test_a_draft_whose_projection_is_read_wrongly_is_not_accepted_and_the_canary_says_so(
    tmp_path: Path,
) -> None:
    """So that the acceptance above says something about `mtp.fc`; the answer stays right, as
    every draft is verified.
    """
    model = write_mtp_model(tmp_path / "model", "qwen3_next")
    swap_halves(model)
    environ = with_recipe(tmp_path, model)
    tokens, acceptance = answer_and_acceptance(tmp_path / "server", "test/mtp", "failed", **environ)
    assert [next_token(token) for token in tokens[:-1]] == tokens[1:]
    assert acceptance < 0.05

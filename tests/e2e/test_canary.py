"""The kernel assertion and the canary with real servers: the table of faults, and starts that
end with exit 8.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibble.canary.references import MEAN_LIMIT, References, read_references, write_references
from nibble.canary.verification import references_of
from nibble.checkpoint.convert import convert
from nibble.checkpoint.plain_values import SMALL_BYTES
from nibble.engine.installed import compiled_id
from nibble.hub.files import CANARY_FILE
from nibble.machine.hardware import detect
from tests.support.canary.fault_table import CAUGHT, COLUMNS, INCOHERENT, REFERENCES
from tests.support.canary.faults import ALL_FAULTS, Faulty, install_faults
from tests.support.models.coherent_model import write_coherent_model
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.paths import ROOT
from tests.support.servers.serving import Server

pytestmark = pytest.mark.vllm
FLAGS = ("--enforce-eager", "--max-model-len", "512")
DEMO = ROOT / "models" / "nibble-demo-moe-nvfp4"
LARGER = Shape(
    hidden=512,
    intermediate=256,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocabulary=1024,
    experts=8,
)
PROMPTS = [
    "The quick brown fox",
    *([{"role": "user", "content": text}] for text in ("What is NVFP4?", "Name two animals.")),
]


# In weights, in attention, in routing, in each sampler and in prompts.
EACH_KIND = (
    "scale tensor permuted",
    "attention head zeroed",
    "MoE routing wrong",
    "sampler: second best instead of best",
    "sampler: top_k ignored",
    "wrong chat template",
)
SERVED = ["demo", pytest.param("larger", marks=pytest.mark.slow)]


def serve_with_faults(folder: Path, model: str, **environ: str) -> Faulty:
    server = Server(
        folder / "server", ["serve", model, *FLAGS], **install_faults(folder / "faults"), **environ
    )
    return Faulty(server, folder / "faults")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Faulty, References]]:
    """The demo and its answers on this machine. A healthy start passes with those in its folder,
    maybe of another CPU.
    """
    faulty = serve_with_faults(tmp_path_factory.mktemp("demo"), DEMO.name, NIBBLE_CANARY="strict")
    references = read_references(DEMO / CANARY_FILE)
    assert references is not None
    try:
        faulty.server.wait_until_ready()
        yield faulty, faulty.record([case.prompt for case in references.cases])
    finally:
        faulty.server.end()


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Faulty, References]]:
    """A generated model with references that were recorded while it was healthy, as for a
    recipe.
    """
    folder = tmp_path_factory.mktemp("larger")
    model = write_checkpoint(folder / "model", LARGER, "modelopt", w4a4=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "nibble-demo" / name, model)
    faulty = serve_with_faults(folder, str(model))
    try:
        faulty.server.wait_until_ready()
        yield faulty, faulty.record(PROMPTS)
    finally:
        faulty.server.end()


def caught(faulty: Faulty, references: References | None, fault: str) -> set[str]:
    found = faulty.canary(fault, references)
    assert set(found) == set(COLUMNS) - ({REFERENCES} if references is None else set())
    return {name for name, finding in found.items() if finding.verdict == "failed"}


def test_the_table_has_every_fault() -> None:
    assert set(CAUGHT) == set(ALL_FAULTS)


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=() if one in EACH_KIND else pytest.mark.slow) for one in CAUGHT],
)
def test_each_mechanism_finds_the_faults_of_the_table_and_no_others(
    fault: str, served: str, request: pytest.FixtureRequest
) -> None:
    faulty, references = request.getfixturevalue(served)
    assert caught(faulty, references, fault) == CAUGHT[fault]


@pytest.mark.slow
def test_without_references_the_other_two_find_what_they_found_with_them(
    larger: tuple[Faulty, References],
) -> None:
    faulty, _ = larger
    found = {fault: caught(faulty, None, fault) for fault in CAUGHT}
    assert found == {fault: set(names - {REFERENCES}) for fault, names in CAUGHT.items()}


@pytest.fixture(scope="module")
def coherent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    """A model that answers coherence's questions, and has no references."""
    folder = tmp_path_factory.mktemp("coherent")
    model = write_coherent_model(folder / "model")
    faulty = serve_with_faults(folder, str(model), NIBBLE_CANARY="strict")
    try:
        faulty.server.wait_until_ready()
        yield faulty
    finally:
        faulty.server.end()


@pytest.mark.slow  # trains a model: five minutes of a core
@pytest.mark.parametrize("fault", sorted(set(CAUGHT) - {"KV scale wrong by 2"}))
def test_coherence_finds_what_leaves_no_answer_right_and_nothing_else(
    fault: str, coherent: Faulty
) -> None:
    found = coherent.canary(fault, None, coherence=True)["coherence"]
    assert (found.verdict == "failed") == (fault in INCOHERENT), found


@pytest.mark.parametrize("served", SERVED)
def test_a_server_whose_fault_is_gone_is_found_healthy_again(
    served: str, request: pytest.FixtureRequest
) -> None:
    faulty, references = request.getfixturevalue(served)
    assert caught(faulty, references, "none") == set()


def test_status_tells_what_ran_and_what_was_proved_before_ready(
    demo: tuple[Faulty, References],
) -> None:
    server = demo[0].server
    status = server.status()
    assert status is not None
    assertion, canary = status["assertion"], status["canary"]
    assert (assertion["verdict"], assertion["deviations"]) == ("passed", [])
    ran = assertion["ran"][0]
    assert ran["linear"] == {"nvfp4: CpuNvFp4LinearKernel": 8}
    assert ran["moe"] == {"nvfp4: CpuModelOptNvFp4MoE": 4}
    assert (ran["attention"], ran["kv_cache_dtype"]) == ({"CPU_ATTN": 4}, ["bfloat16"])
    assert (ran["cudagraph_mode"], ran["compilation_mode"]) == ("NONE", "NONE")
    assert canary["verdict"] == "passed"
    assert {found["mechanism"] for found in canary["findings"]} == set(COLUMNS)
    assert sum(found["seconds"] for found in canary["findings"]) < 10
    history = {entry["phase"]: entry["at_s"] for entry in status["history"]}
    assert history["warm-up"] < history["canary"] < history["ready"]


def test_nibble_status_shows_them(demo: tuple[Faulty, References]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nibble", "status"],
        env=demo[0].server.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "linear: nvfp4: CpuNvFp4LinearKernel in 8 layer(s)" in done.stdout
    assert "references: passed: 6 prompts" in done.stdout


def test_what_is_recorded_for_a_recipe_is_found_by_a_start_of_its_model(
    demo: tuple[Faulty, References], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = demo[0]
    faulty.inject()
    monkeypatch.setenv("NIBBLE_ROOT", str(tmp_path))
    addresses = ["--url", f"http://127.0.0.1:{faulty.server.port}"]
    addresses += ["--control", f"http://127.0.0.1:{faulty.server.control_port}"]
    program = [sys.executable, str(ROOT / "models" / "record_canary.py")]
    subprocess.run([*program, *addresses, "--recipe", "acme/Bird-NVFP4"], check=True, timeout=120)
    settings, checkpoint = SimpleNamespace(model="acme/Bird-NVFP4"), SimpleNamespace(path=None)
    target = SimpleNamespace(device="cpu")
    plan: Any = SimpleNamespace(
        settings=settings, checkpoint=checkpoint, args={}, hardware=detect(), target=target
    )
    references = references_of(plan, ("fp4",))
    assert (
        references is not None and len(references.cases) == 9 and references.activations == ("fp4",)
    )
    assert references.where == str(tmp_path / "recipes/acme/Bird-NVFP4.nibble-canary.json")
    assert references.mean_limit == MEAN_LIMIT  # recorded on this machine
    assert caught(faulty, references, "none") == set()
    assert REFERENCES in caught(faulty, references, "wrong chat template")


def end_of_start(
    tmp_path: Path,
    model: str,
    meanwhile: Callable[[Server], None] = lambda server: None,
    **environ: str,
) -> tuple[int, str]:
    """Exit code and last line of a start that is to fail; `meanwhile` runs again and again until
    it has.
    """
    server = Server(tmp_path / "server", ["serve", model, *FLAGS], **environ)
    try:
        while server.process.poll() is None:
            assert time.monotonic() < server.started + 240
            meanwhile(server)
            time.sleep(0.05)
        code = server.wait(1)
    finally:
        server.end()
    return code, server.err.read_text().strip().splitlines()[-1]


@pytest.mark.slow  # tests/unit/test_assertion.py judges every deviation
def test_a_slow_fallback_ends_the_start_with_exit_8_and_says_what_ran(tmp_path: Path) -> None:
    code, line = end_of_start(
        tmp_path,
        "nibble-demo-nvfp4",
        VLLM_DISABLED_KERNELS="CpuNvFp4LinearKernel",
        NIBBLE_CANARY="off",
    )
    assert code == 8
    assert (
        "nvfp4 linear layers: EmulationNvFp4LinearKernel; expected CpuNvFp4LinearKernel (target"
        " cpu)" in line
    )
    assert "set NIBBLE_KERNEL_ASSERTION=warn to serve anyway" in line


def test_wrong_scales_in_the_checkpoint_end_the_start_by_the_recorded_answers(
    demo: tuple[Faulty, References], tmp_path: Path
) -> None:
    """Every kernel computes what the weights say, so the layers pass; the gate never opened."""
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    arithmetic = {"hardware": detect().arithmetic("cpu"), "build": compiled_id()}
    about = {"activations": ["fp4"], "arithmetic": arithmetic}
    write_references(model / CANARY_FILE, list(demo[1].cases), about)
    tensors = load_file(model / "model.safetensors")
    for name in [f"model.layers.1.self_attn.{part}_proj.weight_scale" for part in "qkv"]:
        tensors[name] = tensors[name].view(torch.uint8).roll(1, -1).view(torch.float8_e4m3fn)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    answered: set[int] = set()

    def knock(server: Server) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            body = {"model": "default", "prompt": "Hello", "max_tokens": 1}
            answered.add(server.ask("/v1/completions", body, timeout_s=5)[0])

    code, line = end_of_start(tmp_path, str(model), knock, NIBBLE_CANARY="strict")
    assert code == 8
    assert "the canary failed: references: " in line
    assert answered == {503}, "before ready the supervisor alone is answered"


@pytest.mark.slow
def test_layers_of_an_export_without_scales_for_activations_are_compared_and_right(
    tmp_path: Path,
) -> None:
    """W4A16_NVFP4 as ModelOpt and `nibble convert` write it; vLLM makes room for such scales all
    the same.
    """
    convert("nibble-demo", tmp_path / "model", "nvfp4")
    # A small model without references answers no question rightly
    server = Server(
        tmp_path / "server", ["serve", str(tmp_path / "model"), *FLAGS], NIBBLE_CANARY="warn"
    )
    try:
        status = server.wait_until_ready().status()
    finally:
        server.end()
    assert status is not None
    found = {one["mechanism"]: one["verdict"] for one in status["canary"]["findings"]}
    assert (found["layers"], found["consistency"]) == ("passed", "passed")
    assert status["assertion"]["ran"][0]["activations"] == ["bf16"]


@pytest.mark.slow  # tests/kernels/test_proof_compare.py finds it
@pytest.mark.parametrize("tied", [False, True], ids=["head", "head and embedding in one"])
def test_one_nan_in_a_head_too_large_to_be_read_ends_the_start(tmp_path: Path, tied: bool) -> None:
    """The NaN is in the row of a token that no prompt has. Every answer has its logit; an
    embedding meets it only with that token.
    """
    shape = Shape(hidden=512, intermediate=256, heads=8, kv_heads=2, head_dim=64, vocabulary=8192)
    model = write_checkpoint(tmp_path / "model", shape, "modelopt", w4a4=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "nibble-demo" / name, model)
    tensors = load_file(model / "model.safetensors")
    if tied:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        del tensors["lm_head.weight"]
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert head.nbytes > SMALL_BYTES
    head[8000, 7] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, line = end_of_start(tmp_path, str(model), NIBBLE_CANARY="strict")
    assert code == 8
    assert "the canary failed: layers: 1 layer(s) " in line and "lm_head: NaN or infinity" in line

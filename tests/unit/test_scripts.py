"""scripts/serve*.sh are a few lines over `nibble serve`, and nothing they are given is ignored
silently.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nibble.machine.paths import root
from nibble.recipes.recipe import list_recipes

SCRIPTS = root() / "scripts"
MODELS = {
    "serve.sh": "ig1/Qwen3.5-27B-NVFP4",
    "serve-nemotron.sh": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "serve-gemma4.sh": "RedHatAI/gemma-4-31B-it-NVFP4",
    "serve-devstral.sh": "BrainForge/Devstral-2-123B-Instruct-2512-NVFP4",
    "serve-glm47.sh": "Salyut1/GLM-4.7-NVFP4",
    "serve-qwen3-next.sh": "nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4",
    "serve-cloverlm.sh": "daslab-testing/CloverLM",
    "serve-cute.sh": "ig1/Qwen3.5-27B-NVFP4",
}
OURS = ("NIBBLE_", "VLLM_", "MODEL", "HF_", "PORT", "HOST", "CUTE_")


def run(script: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/nonexistent", "NIBBLE_TARGET": "cpu"}
    command = [str(SCRIPTS / script), *words]
    return subprocess.run(
        command,
        env=clean | offline | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_script_of_the_seeds_is_here() -> None:
    assert {path.name for path in SCRIPTS.glob("serve*.sh")} == set(MODELS)


@pytest.mark.parametrize("script", MODELS)
def test_a_script_is_a_few_lines_and_its_model_has_a_recipe(script: str) -> None:
    lines = (SCRIPTS / script).read_text().splitlines()
    assert len(lines) <= (36 if script == "serve.sh" else 6)
    assert MODELS[script] in list_recipes(root())


needs_venv = pytest.mark.skipif(
    not (root() / ".venv/bin/nibble").exists(), reason="nibble is not installed in .venv"
)


@needs_venv
@pytest.mark.parametrize("script", [name for name in MODELS if name != "serve-cute.sh"])
def test_a_script_serves_its_own_model(script: str) -> None:
    # Without a network the model cannot be had; the refusal names which one was wanted.
    done = run(script)
    assert done.returncode == 4 and MODELS[script] in done.stderr and "Traceback" not in done.stderr


@needs_venv
def test_another_model_may_be_named_by_variable_or_argument() -> None:
    assert "acme/other" in run("serve.sh", HF_MODEL="acme/other").stderr
    assert "acme/other" in run("serve.sh", MODEL_PATH="acme/other").stderr
    assert "acme/other" in run("serve-nemotron.sh", "acme/other").stderr
    assert "acme/other" in run("serve-gemma4.sh", GEMMA4_MODEL_PATH="acme/other").stderr


@needs_venv
@pytest.mark.parametrize(
    ("script", "environ", "named"),
    [
        ("serve-cute.sh", {}, "NIBBLE_ATTENTION"),
        ("serve.sh", {"CUTE_WO_SPLIT": "8"}, "CUTE_WO_SPLIT=8"),
    ],
)
def test_what_has_no_kernel_or_model_yet_exits_5_naming_what_is_missing(
    script: str, environ: dict[str, str], named: str
) -> None:
    done = run(script, **environ)
    assert done.returncode == 5 and named in done.stderr and done.stderr.count("\n") == 1


@needs_venv
def test_tq_and_debug_reach_nibble() -> None:
    done = run("serve.sh", "--tq", "nonsense", "--debug")
    assert done.returncode == 5 and "nonsense" in done.stderr


@needs_venv
def test_cloverlm_is_served_with_the_options_of_its_authors_script() -> None:
    words = [
        "--api",
        "--model",
        "acme/Clover",
        "--port",
        "8123",
        "--host",
        "127.0.0.1",
        "--tp",
        "1",
    ]
    done = run(
        "serve-cloverlm.py", *words, "--max-model-len", "1024", "--gpu-memory-utilization", "0.9"
    )
    assert done.returncode == 4 and "acme/Clover" in done.stderr and "Traceback" not in done.stderr
    refused = run("serve-cloverlm.py", *words, "--max-model-len", "many")
    assert refused.returncode == 2 and "max-model-len" in refused.stderr.lower()
    offline = run("serve-cloverlm.py", "--model", "acme/Clover", "a prompt")
    assert (
        offline.returncode == 4
        and "acme/Clover" in offline.stderr
        and "Traceback" not in offline.stderr
    )
    both = run("serve-cloverlm.py", *words, "a prompt")
    assert both.returncode == 2 and "--api takes no prompts" in both.stderr


def test_cloverlm_offline_says_what_to_install_where_nothing_is(tmp_path: Path) -> None:
    """A checkout without a .venv, and a Python that has the standard library alone."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "nibble").symlink_to(root() / "nibble")
    script = shutil.copy(SCRIPTS / "serve-cloverlm.py", tmp_path / "scripts")
    command = [sys.executable, "-I", "-S", script, "a prompt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 3 and "run `make setup`" in done.stderr and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize("verb", ["serve", "plan", "test"])
def test_make_names_no_model_of_its_own(verb: str) -> None:
    """nibble has the default; a test that names its own model would be given two."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("MODEL", "HF_MODEL")
    }
    recipes = f"setup setup-dev lint:\n\t@true\n{verb}:\n\t@echo MODEL=$${{MODEL-}}\n"
    makefile = f"{(root() / 'Makefile').read_text()}\n{recipes}"
    command = ["make", "-f", "-", verb]
    done = subprocess.run(
        command, input=makefile, env=environ, capture_output=True, text=True, check=True
    )
    assert "MODEL=\n" in done.stdout

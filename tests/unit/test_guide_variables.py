"""Every variable of older guides' scripts has an effect or an error that names it.

tests/fixtures/guide_variables.toml lists them. Where the guides' texts are (GUIDES names their
folder), no name in a text may be missing from the list.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from nibble.engine.schema import load_schema
from nibble.errors import ExitCode, NibbleError
from nibble.machine.paths import root
from nibble.settings.environment import accept
from nibble.settings.older_guides import DEAD_VARIABLES, successor_of
from nibble.settings.options import options
from nibble.settings.sources import load_settings

GUIDES = Path(os.environ.get("GUIDES", "/work/shared/seeds"))
LISTED = tomllib.loads((root() / "tests/fixtures/guide_variables.toml").read_text())
PASSED: dict[str, str] = LISTED.pop("passed")
BUILD = set(LISTED.pop("build")["dgx-vllm"])
SCRIPTS = {
    f"{guide}/{script}": names for guide, table in LISTED.items() for script, names in table.items()
}
SERVE = sorted({name for names in SCRIPTS.values() for name in names})
KNOWN = load_schema().envs
OPTION_NAMES = {name: option for option in options().values() for name in option.env}
# Read by one script of nibble's alone.
SCRIPT_ONLY = {"GEMMA4_MODEL_PATH"}
VALUES = {
    "CUTE_WO_SPLIT": "8",
    "GPU_MEMORY_UTIL": "0.5",
    "GPU_MEM_UTIL": "0.5",
    "SERVE_GPU_UTIL": "0.5",
    "HOST": "127.0.0.2",
    "HEAD_IP": "10.0.0.1",
    "WORKER_IP": "10.0.0.2",
    "NUM_GPUS": "2",
}


@pytest.mark.parametrize("name", SERVE)
def test_a_variable_takes_effect_or_is_refused_by_name(name: str) -> None:
    if name in PASSED:
        accepted = accept({name: "1"}, KNOWN, in_image=True)
        assert accepted.environ == {name: "1"} and not accepted.notices
    elif name in OPTION_NAMES:
        _changes_an_option(name)
    elif name not in SCRIPT_ONLY:
        successor = successor_of(name)
        assert successor, f"nibble ignores {name}"
        for value in successor.examples:
            _is_translated_or_refused(name, value)


def _changes_an_option(name: str) -> None:
    option = OPTION_NAMES[name]
    value = VALUES.get(name, "16")
    accepted = accept({name: value}, KNOWN, in_image=True)
    settings = load_settings({}, accepted.environ).settings
    field = next(field for field, other in options().items() if other is option)
    default = type(settings).model_fields[field].default
    assert getattr(settings, field) not in (default, None), name


def _is_translated_or_refused(name: str, value: str) -> None:
    try:
        accepted = accept({name: value}, KNOWN, in_image=True)
    except NibbleError as error:
        refusal = error
    else:
        refusal = None
    if refusal:
        assert refusal.code == ExitCode.CONFIG and name in refusal.line()
        return
    assert name not in accepted.environ
    assert len(accepted.notices) == 1 and f"{name}={value}" in accepted.notices[0]


def test_no_name_is_both_passed_on_and_replaced() -> None:
    assert not {name for name in PASSED if successor_of(name) or name in OPTION_NAMES}
    assert set(PASSED) <= set(SERVE)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SPEC_TOKENS", "two", "a whole number"),
        ("MAX_NUM_BATCHED_TOKENS", "-1", "a whole number"),
        ("COMPILATION_CONFIG", "{", "a JSON object"),
    ],
)
def test_a_value_that_cannot_be_translated_is_refused_by_name(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(NibbleError) as caught:
        accept({name: value}, KNOWN, in_image=True)
    assert caught.value.code == ExitCode.CONFIG
    assert name in caught.value.line() and expected in caught.value.line()


def test_todays_name_wins_over_the_guides() -> None:
    accepted = accept({"LOG_LEVEL": "DEBUG", "VLLM_LOGGING_LEVEL": "INFO"}, KNOWN, in_image=True)
    assert accepted.environ == {"VLLM_LOGGING_LEVEL": "INFO"}


def test_a_log_level_of_another_program_changes_nothing() -> None:
    accepted = accept({"LOG_LEVEL": "trace"}, KNOWN, in_image=True)
    assert accepted.environ == {} and "vLLM has other log levels" in accepted.notices[0]


@pytest.mark.parametrize("name", ["CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR"])
def test_variables_of_cutlass_pass(name: str) -> None:
    assert accept({name: "1"}, KNOWN, in_image=True).environ == {name: "1"}


def test_every_example_is_a_flag_and_choice_of_the_pinned_vllm() -> None:
    schema = load_schema()
    for name, successor in DEAD_VARIABLES.items():
        for value in successor.examples:
            for flag, content in (successor.flags(value) or {}).items():
                problems = (
                    schema.check_json(flag, content)
                    if isinstance(content, dict)
                    else [schema.check_value(flag, content)]
                )
                assert not [problem for problem in problems if problem], f"{name}={value}"


def test_the_container_gets_every_name_that_has_an_effect() -> None:
    """scripts/serve.sh hands on variables by name. Paths of this machine mean nothing there."""
    pattern = re.search(r"grep -E '(\^\([^']+)'", (root() / "scripts/serve.sh").read_text())
    assert pattern
    ignored = {"HOME", "PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VERSION", "CPU_ARCH"}
    ignored |= {"TRITON_PTXAS_PATH", "GEMMA4_MODEL_PATH", "HF_HOME", "HOST"}
    missing = [name for name in SERVE if not re.match(pattern[1], name)]
    assert not set(missing) - ignored


def test_compose_hands_on_every_name_that_means_something_in_its_container() -> None:
    listed = yaml.safe_load((root() / "docker/compose.yaml").read_text())["x-common"]["environment"]
    # Published ports, nodes (profile cluster), this machine's programs, kernels of another image.
    elsewhere = {"HOST", "PORT", "HEAD_IP", "WORKER_IP", "GEMMA4_MODEL_PATH"}
    elsewhere |= {"VLLM_BIN", "VLLM_PYTHON", "VLLM_VERSION"}
    elsewhere |= {"CPU_ARCH", "CUDA_HOME", "CUDA_VERSION", "HF_HOME", "HOME", "LD_LIBRARY_PATH"}
    elsewhere |= {"PATH", "TRITON_PTXAS_PATH"}
    missing = {name for name in SERVE if not re.match("NVLLM_|CUTE_(?!WO_SPLIT)", name)}
    assert sorted(missing - set(listed) - elsewhere) == []
    assert all(value is None for name, value in listed.items() if not name.startswith("NIBBLE_"))


@pytest.mark.parametrize(
    ("script", "name"),
    [("build.sh", name) for name in sorted(BUILD - {"BASE_IMAGE"})]
    + [("scripts/push.sh", name) for name in sorted(BUILD) if name.startswith("IMAGE_")],
)
def test_names_of_other_build_scripts_are_refused(script: str, name: str) -> None:
    words = ["cpu"] if script == "build.sh" else ["nothing"]
    done = subprocess.run(
        [root() / script, *words],
        env={
            "PATH": os.environ["PATH"],
            "DOCKER": "/nonexistent/docker",
            name: "x",
            "IMAGE": "a/b",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and name in done.stderr, done.stderr


def _names(text: str) -> set[str]:
    """Variables that a text sets for a program, reads in a shell, or lists in a table."""
    found = re.findall(r"(?:-e |export )([A-Z][A-Z0-9_]*)=", text)
    found += re.findall(r"^([A-Z][A-Z0-9_]+)=", text, re.MULTILINE)
    found += re.findall(r"\$\{?([A-Z][A-Z0-9_]*)\b", text)
    found += re.findall(r"\b((?:VLLM|HF|NCCL|CUTE|PYTORCH)_[A-Z0-9_]*[A-Z0-9])=?", text)
    table = text.partition("Environment variables\n")[2].partition("\nContainer modes")[0]
    found += re.findall(r"^([A-Z][A-Z0-9_]*) ", table, re.MULTILINE)
    return set(found)


# Names in the texts that mean kernels and backends, not variables of a server.
NOT_VARIABLES = {"CUTE_PAGED", "VLLM_CUTLASS"}


@pytest.mark.skipif(not GUIDES.is_dir(), reason="the guides' texts are not here (GUIDES)")
def test_no_name_of_the_guides_is_missing_from_the_list() -> None:
    texts = "\n".join(path.read_text() for path in sorted(GUIDES.glob("*.txt")))
    names = _names(texts)
    assert {"TP", "VLLM_PYTHON", "GPU_MEM_UTIL", "TENSOR_PARALLEL_SIZE", "CUTE_WO_SPLIT"} <= names
    assert sorted(names - set(SERVE) - BUILD - NOT_VARIABLES) == []

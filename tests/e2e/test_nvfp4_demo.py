"""The demo models in NVFP4 through a real vLLM on the CPU: right as nibble serves them, wrong
without the merge of scales.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_dialogues import UNKNOWN_ANSWER, read_other_prompts, read_questions

from tests.support.paths import IN_VLLM, ROOT
from tests.support.servers.serving import Server, clean_environ

pytestmark = pytest.mark.vllm
PROGRAM = IN_VLLM / "demo_in_vllm.py"
QUESTIONS = {
    row.question: row.answer for row in read_questions()
}  # the BF16 model's answers, word for word


def answers(model: str, backend: str, tmp_path: Path, **environ: str) -> dict[str, str]:
    """What `model` answers to each question in a separate vLLM."""
    words = [sys.executable, str(PROGRAM), str(ROOT / "models" / model), backend]
    environment = clean_environ(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0", **environ)
    done = subprocess.run(
        words,
        input=json.dumps(list(QUESTIONS)),
        env=environment,
        text=True,
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(zip(QUESTIONS, json.loads(lines[0].removeprefix("RESULT ")), strict=True))


def wrong(found: dict[str, str]) -> list[str]:
    return [question for question, answer in found.items() if answer != QUESTIONS[question]]


# Demos are served in eager mode on the CPU unless told otherwise; other models are compiled.
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["nibble-demo-nvfp4", "--no-enforce-eager"], id="compiled"),
        pytest.param(["nibble-demo-moe-nvfp4"], id="experts", marks=pytest.mark.slow),
    ],
)
def test_nibble_serves_the_nvfp4_demo_with_the_answers_of_the_bf16_one(
    words: list[str], tmp_path: Path
) -> None:
    server = Server(tmp_path, ["serve", *words, "--max-model-len", "512"])
    prompts, _ = read_other_prompts()
    expected = QUESTIONS | dict.fromkeys(prompts[::8], UNKNOWN_ANSWER)

    def ask(question: str) -> str:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 100,
        }
        status, answer = server.ask("/v1/chat/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]

    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(expected, pool.map(ask, expected), strict=True))
    finally:
        server.end()
    assert {
        question: answer for question, answer in found.items() if answer != expected[question]
    } == {}


TOOLS = (
    "bash",
    "dirname",
    "env",
    "lscpu",
    "readlink",
    "uname",
)  # what a start may want of a machine; no compiler


@pytest.fixture
def uncompiled(tmp_path: Path) -> dict[str, str]:
    """Variables for a machine without compilers, and nibble-kernels as installed there."""
    tools, sources, site = tmp_path / "bin", tmp_path / "sources", tmp_path / "site"
    tools.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(tools)])
    assert [
        name
        for name in ("c++", "cc", "g++", "gcc", "clang", "nvcc")
        if shutil.which(name, path=path)
    ] == []
    shutil.copytree(
        ROOT / "kernels",
        sources,
        ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"),
    )
    words = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(site),
    ]
    environ = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": path}
    subprocess.run([sys.executable, "-m", "pip", *words, str(sources)], check=True, env=environ)
    return {"PATH": path, "PYTHONPATH": str(site)}


@pytest.mark.slow
def test_without_a_compiler_the_demo_is_served_in_plain_torch_and_one_line_says_so(
    uncompiled: dict[str, str], tmp_path: Path
) -> None:
    server = Server(
        tmp_path / "server",
        ["serve"],
        MODEL="nibble-demo-nvfp4",
        NIBBLE_CANARY="strict",
        **uncompiled,
    )
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is NVFP4?"}],
        "max_tokens": 100,
    }
    try:
        server.wait_until_ready()
        status, answer = server.ask("/v1/chat/completions", body)
        told = server.status()
    finally:
        server.end()
    assert (status, answer["choices"][0]["message"]["content"]) == (
        200,
        QUESTIONS["What is NVFP4?"],
    )
    lines = [line for line in server.log().splitlines() if "plain torch" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "[nibble] warning: nibble's kernels are plain torch code (not compiled when it was"
        " installed)"
    )
    assert told is not None
    assert (told["assertion"]["verdict"], told["assertion"]["deviations"]) == ("passed", [])
    found = {finding["mechanism"]: finding["verdict"] for finding in told["canary"]["findings"]}
    assert found == dict.fromkeys(("layers", "consistency", "references"), "passed")


@pytest.mark.slow
def test_vllm_alone_with_an_nvfp4_kernel_for_the_cpu_loads_the_demo_and_answers_wrongly(
    tmp_path: Path,
) -> None:
    found = answers("nibble-demo-nvfp4", "emulation", tmp_path, VLLM_PLUGINS="")
    assert len(wrong(found)) > len(QUESTIONS) / 2, found


@pytest.mark.slow
def test_with_the_merge_the_same_kernel_answers_right(tmp_path: Path) -> None:
    assert wrong(answers("nibble-demo-nvfp4", "emulation", tmp_path)) == []

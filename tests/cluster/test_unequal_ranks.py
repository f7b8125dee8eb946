"""Two machines that would not serve one model: the preflight names node and difference, with Ray and without (exit 9).

The nodes are processes on two hosts of namespaces; nothing is loaded before the preflight.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from changed_code import changed_kernels, changed_nibble, changed_patches
from serving import ROOT
from two_hosts import ADDRESSES, Host, Process, two_hosts

pytestmark = pytest.mark.vllm
DEMO, NVFP4 = (str(ROOT / "models" / f"nibble-demo{form}") for form in ("", "-nvfp4"))
RANK_0, RANK_1 = (f"{address} (rank {rank})" for rank, address in enumerate(ADDRESSES))
WITHOUT_RAY = {"NIBBLE_NNODES": "2", "TENSOR_PARALLEL_SIZE": "2"}
FIT = "preflight: 2 nodes fit together"
COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as found:
            yield found
    except OSError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Row:
    """What rank 1 has in place of rank 0's NVFP4 demo of 1024 tokens, and the words of the refusal."""

    words: tuple[str, ...]
    refusal: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


WORDS = ("serve", NVFP4, "--max-model-len", "1024")
ON_RANK_0 = f"on {RANK_0}"
SETTINGS = {
    "model": Row(
        ("serve", DEMO, "--max-model-len", "1024"),
        (f"the model {DEMO} is not {NVFP4} of {RANK_0}: config.json has other content; ",),
    ),
    "dtype": Row((*WORDS, "--dtype", "float32"), ("--dtype is float32 (command line --dtype) and unset " + ON_RANK_0,)),
    "activations": Row(
        WORDS,
        ("--additional-config nibble.nvfp4_activations is bf16 (environment NIBBLE_NVFP4_ACTIVATIONS) and unset",),
        {"NIBBLE_NVFP4_ACTIVATIONS": "bf16"},
    ),
    "length": Row(
        ("serve", NVFP4, "--max-model-len", "512"),
        ("--max-model-len is 512 (command line --max-model-len) and 1024 (command line --max-model-len) " + ON_RANK_0,),
    ),
    "variable": Row(
        WORDS,
        ("the variable VLLM_FLOAT32_MATMUL_PRECISION is medium and unset " + ON_RANK_0,),
        {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"},
    ),
}
CODE = {
    "nibble": (changed_nibble, "nibble's code differs from that of {first}: file drain.py has other content"),
    "kernels": (changed_kernels, "the build of nibble's kernels differs from that of {first}: file "),
    "patches": (changed_patches, "the patches of vLLM differs from that of {first}: patch "),
}
QUICK = ("model", "activations", "patches")


def rows(names: Sequence[str]) -> list:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def together(
    hosts: tuple[Host, Host], folder: Path, words: Sequence[str], environ: Mapping[str, str], **more: str
) -> tuple[Process, Process]:
    """Rank 0 as ever and rank 1 with its own `words` and `environ`; `more` is both's."""
    both = {**WITHOUT_RAY, "NIBBLE_ROOT": str(ROOT), **more}
    head = hosts[0].start(folder / "0", *WORDS, **both, NIBBLE_NODE_RANK="0")
    return head, hosts[1].start(folder / "1", *words, **{**both, "NIBBLE_NODE_RANK": "1", **environ})


def must_be_refused(head: Process, node: str, words: Sequence[str]) -> None:
    assert head.wait() == 9, head.said()[-3000:]
    last = head.said().splitlines()[-1]
    assert last.startswith(f"nibble: error: node {node}: "), last
    assert all(one in last for one in words), last
    assert "Traceback" not in head.said()


@pytest.mark.parametrize("name", rows([*SETTINGS, *CODE]))
def test_without_ray_a_rank_that_differs_is_named_before_anything_loads(
    hosts: tuple[Host, Host], tmp_path: Path, name: str
) -> None:
    if name in CODE:
        change, words = CODE[name]
        row = Row(WORDS, (words.format(first=RANK_0),), {"PYTHONPATH": str(change(tmp_path / "changed"))})
    else:
        row = SETTINGS[name]
    head, rank1 = together(hosts, tmp_path, row.words, row.environ)
    try:
        must_be_refused(head, RANK_1, row.refusal)
    finally:
        head.end()
        rank1.end()

"""Two machines that would not serve one model: the preflight names node and difference, with Ray
and without (exit 9).

The nodes are processes on two hosts of namespaces; nothing is loaded before the preflight.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.cluster.two_hosts import ADDRESSES, Host, Process, two_hosts
from tests.support.paths import ROOT
from tests.support.releases.changed_code import (
    KERNEL,
    changed_kernels,
    changed_nibble,
    changed_patches,
    without_comparisons,
)

pytestmark = pytest.mark.vllm
DEMO, NVFP4 = (str(ROOT / "models" / f"nibble-demo{form}") for form in ("", "-nvfp4"))
RANK_0, RANK_1 = (f"{address} (rank {rank})" for rank, address in enumerate(ADDRESSES))
WITHOUT_RAY = {"NIBBLE_NNODES": "2", "TENSOR_PARALLEL_SIZE": "2"}
FIT = "preflight: 2 nodes are compatible"
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
    """What rank 1 has in place of rank 0's NVFP4 demo of 1024 tokens, and the words of the
    refusal.
    """

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
    "dtype": Row(
        (*WORDS, "--dtype", "float32"),
        ("--dtype is float32 (command line) and unset " + ON_RANK_0,),
    ),
    "activations": Row(
        WORDS,
        (
            (
                "--additional-config nibble.nvfp4_activations is bf16 (environment"
                " NIBBLE_NVFP4_ACTIVATIONS) and unset"
            ),
        ),
        {"NIBBLE_NVFP4_ACTIVATIONS": "bf16"},
    ),
    "length": Row(
        ("serve", NVFP4, "--max-model-len", "512"),
        (
            "--max-model-len is 512 (command line --max-model-len) and 1024 (command line"
            " --max-model-len) " + ON_RANK_0,
        ),
    ),
    "variable": Row(
        WORDS,
        ("the variable VLLM_FLOAT32_MATMUL_PRECISION is medium and unset " + ON_RANK_0,),
        {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"},
    ),
}
CODE = {
    "nibble": (
        changed_nibble,
        "nibble's code differs from that of {first}: file drain.py has other content",
    ),
    "kernels": (
        changed_kernels,  # "has other content" where the installed wheel says what it was made from
        f"the build of nibble's kernels differs from that of {{first}}: file {KERNEL} ",
    ),
    "patches": (changed_patches, "the set of vLLM patches differs from that of {first}: patch "),
}
QUICK = ("model", "activations", "patches")


def rows(names: Sequence[str]) -> list:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def together(
    hosts: tuple[Host, Host],
    folder: Path,
    words: Sequence[str],
    environ: Mapping[str, str],
    **more: str,
) -> tuple[Process, Process]:
    """Rank 0 as ever and rank 1 with its own `words` and `environ`; `more` is both's."""
    both = {**WITHOUT_RAY, "NIBBLE_ROOT": str(ROOT), **more}
    head = hosts[0].start(folder / "0", *WORDS, **both, NIBBLE_NODE_RANK="0")
    return head, hosts[1].start(
        folder / "1", *words, **{**both, "NIBBLE_NODE_RANK": "1", **environ}
    )


def of_the_hub(home: Path, commit: str, name: str = "main") -> dict[str, str]:
    """The variables of a Hugging Face cache in `home` with acme/demo at `commit`, which `name`
    points to.
    """
    storage = home / "hub" / "models--acme--demo"
    shutil.copytree(NVFP4, storage / "snapshots" / commit)
    (storage / "refs").mkdir()
    (storage / "refs" / name).write_text(commit)
    return {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}


def other_values(folder: Path) -> None:
    """As after further training: the same headers, other weights."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))


def other_layers(folder: Path) -> None:
    """The first and the last layer have each other's names: every shape, type and kernel is the
    same.
    """
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    swap = {b"model.layers.0.": b"model.layers.3.", b"model.layers.3.": b"model.layers.0."}
    header = re.sub(rb"model\.layers\.[03]\.", lambda match: swap[match[0]], content[8:end])
    weights.write_bytes(content[:8] + header + content[end:])


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
        row = Row(
            WORDS, (words.format(first=RANK_0),), {"PYTHONPATH": str(change(tmp_path / "changed"))}
        )
    else:
        row = SETTINGS[name]
    head, rank1 = together(hosts, tmp_path, row.words, row.environ)
    try:
        must_be_refused(head, RANK_1, row.refusal)
    finally:
        head.end()
        rank1.end()


HUB_WORDS = ("serve", "acme/demo", "--max-model-len", "1024")


@pytest.mark.slow
def test_another_revision_of_the_same_model_is_refused_and_both_are_named(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    here, there = (
        of_the_hub(tmp_path / f"hf{rank}", commit) for rank, commit in enumerate(COMMITS)
    )
    other_values(tmp_path / "hf1" / "hub" / "models--acme--demo" / "snapshots" / COMMITS[1])
    both = {**WITHOUT_RAY, "NIBBLE_ROOT": str(ROOT)}
    head = hosts[0].start(tmp_path / "0", *HUB_WORDS, **both, **here, NIBBLE_NODE_RANK="0")
    rank1 = hosts[1].start(tmp_path / "1", *HUB_WORDS, **both, **there, NIBBLE_NODE_RANK="1")
    try:
        must_be_refused(head, RANK_1, [*COMMITS, "values in model.safetensors has other content"])
    finally:
        head.end()
        rank1.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["pinned", "another path", "from the head", "another commit, the same files"]
)
def test_ranks_whose_model_has_the_same_content_fit_together(
    hosts: tuple[Host, Host], tmp_path: Path, how: str
) -> None:
    both = {**WITHOUT_RAY, "NIBBLE_ROOT": str(ROOT)}
    here, words = of_the_hub(tmp_path / "hf0", COMMITS[0]), HUB_WORDS
    if how == "pinned":
        there = of_the_hub(tmp_path / "hf1", COMMITS[0], "other") | {"NIBBLE_REVISION": COMMITS[0]}
    elif how == "another commit, the same files":
        there = of_the_hub(tmp_path / "hf1", COMMITS[1])
    elif how == "from the head":
        there = {"NIBBLE_CLUSTER_MODEL": "head"}
    else:
        shutil.copytree(NVFP4, tmp_path / "copy")
        there, words = {}, ("serve", str(tmp_path / "copy"), "--max-model-len", "1024")
    head = hosts[0].start(tmp_path / "0", *HUB_WORDS, **both, **here, NIBBLE_NODE_RANK="0")
    rank1 = hosts[1].start(tmp_path / "1", *words, **both, **there, NIBBLE_NODE_RANK="1")
    try:
        head.wait_said(FIT)
    finally:
        head.end()
        rank1.end()


@pytest.mark.slow
def test_where_the_preflight_finds_nothing_the_workers_reports_end_the_start_with_8(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """Rank 0 has the BF16 demo, rank 1 the NVFP4 one: every kernel is one that its own plan
    expects.
    """
    blind = str(without_comparisons(tmp_path / "blind"))
    both = {**WITHOUT_RAY, "NIBBLE_ROOT": str(ROOT), "PYTHONPATH": blind}
    head = hosts[0].start(tmp_path / "0", "serve", DEMO, *WORDS[2:], **both, NIBBLE_NODE_RANK="0")
    rank1 = hosts[1].start(tmp_path / "1", *WORDS, **both, NIBBLE_NODE_RANK="1")
    try:
        assert head.wait(500) == 8, head.said()[-3000:]
        last = head.said().splitlines()[-1]
        assert (
            f"node {RANK_1}: rank 1 differs from the other ranks: quantization: modelopt_fp4"
            in last
        )
        assert "expected as rank 0: none" in last
    finally:
        head.end()
        rank1.end()


@pytest.mark.slow
def test_where_no_report_differs_either_the_canarys_references_end_the_start_with_8(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """Rank 1 has two layers exchanged: what each rank runs is what its plan expects, and the
    answers are wrong.
    """
    blind = str(without_comparisons(tmp_path / "blind"))
    shutil.copytree(NVFP4, tmp_path / "copy")
    other_layers(tmp_path / "copy")
    both = {**WITHOUT_RAY, "NIBBLE_ROOT": str(ROOT), "PYTHONPATH": blind, "NIBBLE_CANARY": "strict"}
    eager = ("--enforce-eager",)  # the demo's recipe knows the demo by its path
    head = hosts[0].start(tmp_path / "0", *WORDS, *eager, **both, NIBBLE_NODE_RANK="0")
    words = ("serve", str(tmp_path / "copy"), *WORDS[2:], *eager)
    rank1 = hosts[1].start(tmp_path / "1", *words, **both, NIBBLE_NODE_RANK="1")
    try:
        assert head.wait(500) == 8, head.said()[-3000:]
        last = head.said().splitlines()[-1]
        assert "the canary failed" in last and "references" in last, last
    finally:
        head.end()
        rank1.end()


# --- with Ray: one plan, the server's; each node's code, environment and files are its own ---

RAY = {"NUM_GPUS": "1", "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}', "NIBBLE_ROOT": str(ROOT)}
HEAD, WORKER = ADDRESSES


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """Two separate hosts, the first with a Ray head."""
    pytest.importorskip("ray")
    try:
        with two_hosts() as (first, second):
            head = first.start(tmp_path_factory.mktemp("head"), "ray-head", **RAY)
            try:
                head.wait_said("Ray head is up", 180)
                yield first, second
            finally:
                head.end()
    except OSError as error:
        pytest.skip(str(error))


def served_through_ray(
    hosts: tuple[Host, Host], folder: Path, **worker: str
) -> tuple[Process, Process]:
    """A worker with its own variables, and the server on the head's host."""
    node = hosts[1].start(folder / "worker", "ray-worker", **{**RAY, **worker})
    node.wait_said("has joined", 180)
    own = {**RAY, "NUM_GPUS": "", "NIBBLE_CLUSTER": "ray", "TENSOR_PARALLEL_SIZE": "2"}
    return node, hosts[0].start(folder / "serve", *WORDS, **own)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in CODE] + ["variable"]
)
def test_with_ray_a_node_that_differs_is_named_before_anything_loads(
    ray_head: tuple[Host, Host], tmp_path: Path, name: str
) -> None:
    if name == "variable":
        own: Mapping[str, str] = SETTINGS[name].environ
        refusal = f"the variable VLLM_FLOAT32_MATMUL_PRECISION is medium and unset on {HEAD}"
    else:
        change, words = CODE[name]
        own, refusal = {"PYTHONPATH": str(change(tmp_path / "changed"))}, words.format(first=HEAD)
    node, server = served_through_ray(ray_head, tmp_path, **own)
    try:
        must_be_refused(server, WORKER, [refusal])
    finally:
        server.end()
        node.end()


@pytest.mark.slow
@pytest.mark.parametrize("other", ["model", "revision"])
def test_with_ray_another_model_at_the_same_path_is_named(
    ray_head: tuple[Host, Host], tmp_path: Path, other: str
) -> None:
    there = tmp_path / "other"
    shutil.copytree(DEMO if other == "model" else NVFP4, there)
    if other == "revision":
        other_values(there)
    ray_head[1].mount(there, Path(NVFP4))
    try:
        node, server = served_through_ray(ray_head, tmp_path)
        try:
            what = "config.json" if other == "model" else "values in model.safetensors"
            must_be_refused(
                server,
                WORKER,
                [f"the model {NVFP4} is not", f"of {HEAD}: {what} has other content"],
            )
        finally:
            server.end()
            node.end()
    finally:
        ray_head[1].unmount(Path(NVFP4))

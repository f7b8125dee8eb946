"""Containers of one image that would not serve one model: refused by name before anything loads
(exit 9).

More kinds of differences, without containers: test_unequal_ranks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.cluster.cluster_nodes import DEMO, SUBNET, node
from tests.support.paths import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.slow]
WORDS = ("serve", DEMO, "--max-model-len", "1024")
INSTALLED = (  # Debian 12's, of the tests' base
    "/opt/venv/lib/python3.11/site-packages/nibble/serve/drain.py"
)
RANK_0, RANK_1 = f"{SUBNET}.11 (rank 0)", f"{SUBNET}.12 (rank 1)"


@pytest.fixture
def changed_drain(tmp_path: Path) -> Path:
    path = tmp_path / "drain.py"
    path.write_text((ROOT / "nibble" / "serve" / "drain.py").read_text() + "# changed\n")
    path.chmod(0o644)
    return path


def refusal(
    image: str, net: str, words: Sequence[str], options: Sequence[str] = (), **more: str
) -> str:
    """What rank 0 says of a rank 1 with other `words`, `options` and variables."""
    both = {"NIBBLE_NNODES": "2", "HEAD_IP": f"{SUBNET}.11", "TENSOR_PARALLEL_SIZE": "2"}
    with (
        node(image, net, 11, *WORDS, **both, NIBBLE_NODE_RANK="0") as head,
        node(image, net, 12, *words, options=options, **{**both, "NIBBLE_NODE_RANK": "1"}, **more),
    ):
        assert head.container.exit_code() == 9
        return head.logs().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (("serve", f"{DEMO}-nvfp4", *WORDS[2:]), {}, f"the model {DEMO}-nvfp4 is not {DEMO} of {RANK_0}: config.json has other"),  # noqa: E501
        (("serve", DEMO, "--max-model-len", "512"), {}, "--max-model-len is 512 (command line --max-model-len) and 1024"),  # noqa: E501
        (WORDS, {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"}, "the variable VLLM_FLOAT32_MATMUL_PRECISION is medium and unset"),  # noqa: E501
    ],
    ids=["model", "length", "variable"],
)  # fmt: skip
def test_a_rank_with_other_settings(
    cpu_image: str, net: str, words: Sequence[str], environ: dict[str, str], said: str
) -> None:
    line = refusal(cpu_image, net, words, **environ)
    assert line.startswith(f"nibble: error: node {RANK_1}: ") and said in line, line


def test_a_rank_with_another_file_of_nibbles(cpu_image: str, net: str, changed_drain: Path) -> None:
    mounted = ["--volume", f"{changed_drain}:{INSTALLED}:ro"]
    line = refusal(cpu_image, net, WORDS, mounted)
    assert (
        f"node {RANK_1}: nibble's code differs from that of {RANK_0}: file drain.py has other"
        " content" in line
    )

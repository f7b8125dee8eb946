"""Two machines with a data parallel replica each, between which the experts of one model are
divided.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cluster.cluster_nodes import Node, node
from tests.support.paths import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.slow]

MODEL = "/opt/nibble/models/nibble-demo-moe-nvfp4"
WORDS = (
    "serve",
    MODEL,
    "--max-model-len",
    "1024",
    "--data-parallel-size",
    "2",
    "--enable-expert-parallel",
)
QUESTIONS = ROOT / "models" / "demo_questions.jsonl"


def test_experts_on_two_machines_answer_as_they_were_taught(
    cpu_image: str, net: str, client: Node
) -> None:
    """The start itself is half of it: no replica may wait for what the other one does not do."""
    # The canary's references are of one machine.
    common = {"NIBBLE_NNODES": "2", "HEAD_IP": "10.89.7.61", "NIBBLE_CANARY": "warn"}
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:8]]
    with (
        node(cpu_image, net, 61, *WORDS, NIBBLE_NODE_RANK="0", **common) as head,
        node(cpu_image, net, 62, *WORDS, NIBBLE_NODE_RANK="1", **common) as rank1,
    ):
        head.wait_ready()
        assert rank1.parts()

        def ask(row: dict[str, str]) -> str:
            messages = [{"role": "user", "content": row["question"]}]
            body = {"model": "default", "messages": messages, "max_tokens": 100, "temperature": 0}
            status, answer = client.ask("10.89.7.61:8000", "/v1/chat/completions", body, 200)
            assert status == 200, head.logs()[-4000:]
            return answer["choices"][0]["message"]["content"].strip()

        with ThreadPoolExecutor() as pool:  # both replicas get some
            assert list(pool.map(ask, rows)) == [row["answer"] for row in rows]

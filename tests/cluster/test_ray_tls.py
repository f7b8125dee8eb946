"""Ray with TLS: the certificates of docs/cluster.md, the answers of one machine, and a client that
has no certificate.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.cluster_nodes import DEMO, TOKEN, Node, Serve, greedy, node

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HEAD, WORKER = "10.89.7.31", "10.89.7.32"
FILES = {
    "RAY_TLS_SERVER_CERT": "/tls/node.crt",
    "RAY_TLS_SERVER_KEY": "/tls/node.key",
    "RAY_TLS_CA_CERT": "/tls/ca.crt",
}
RAY = {"HEAD_IP": HEAD, "NUM_GPUS": "1", "RAY_USE_TLS": "1", **FILES}
MAKE = """
openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj /CN=cluster -keyout ca.key -out ca.crt
for address in %s; do
  mkdir $address
  cp ca.crt $address/
  openssl req -newkey rsa:3072 -nodes -subj /CN=$address -keyout $address/node.key -out node.csr
  openssl x509 -req -in node.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out $address/node.crt \\
    -extfile <(echo subjectAltName=IP:$address,IP:127.0.0.1,DNS:localhost)
done
chmod -R a+rX .
"""  # noqa: E501
CERTIFICATE = (
    "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2])), timeout=5))"
)
# Ray itself goes on trying for more than a minute.
JOIN = (
    "import ray, signal, sys; signal.alarm(40); ray.init(address=sys.argv[1],"
    " _node_ip_address=sys.argv[2])"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = ["bash", "-e", "-c", MAKE % f"{HEAD} {WORKER}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def head(cpu_image: str, net: str, certificates: Path) -> Iterator[Node]:
    mount = ["--volume", f"{certificates / HEAD}:/tls:ro"]
    with node(cpu_image, net, 31, "ray-head", options=mount, **RAY) as found:
        found.wait_for(lambda: "Ray head is up" in found.logs(), 90, "up")
        yield found


@pytest.fixture(scope="module")
def worker(head: Node, cpu_image: str, net: str, certificates: Path) -> Iterator[Node]:
    mount = ["--volume", f"{certificates / WORKER}:/tls:ro"]
    with node(cpu_image, net, 32, "ray-worker", options=mount, **RAY) as found:
        found.wait_for(lambda: "has joined" in found.logs(), 90, "joined")
        yield found


def test_rays_ports_and_nibbles_show_their_nodes_certificate(
    head: Node, worker: Node, client: Node, certificates: Path
) -> None:
    for address, port in (
        (HEAD, 6379),
        (HEAD, 6380),
        (HEAD, 6388),
        (worker.address, 6380),
        (WORKER, 6388),
    ):
        shown = client.python(CERTIFICATE, address, str(port)).stdout
        assert shown.strip() == (certificates / address / "node.crt").read_text().strip(), (
            address,
            port,
        )


def test_the_right_token_without_a_certificate_is_not_enough(head: Node, client: Node) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    assert client.python(JOIN, f"{HEAD}:6379", client.address, **token).returncode != 0
    ask = (
        "from nibble.cli.app import main; import sys; sys.argv[1:] = ['cluster', 'status']; main()"
    )
    refused = client.python(ask, HEAD_IP=HEAD, NIBBLE_CLUSTER_TOKEN=TOKEN)
    assert refused.returncode == 9
    assert "rank" not in refused.stdout


def test_answers_over_tls_are_those_of_one_machine(
    one_machines_answers: list[str], worker: Node, head: Node, client: Node, tmp_path: Path
) -> None:
    serve = Serve(head, tmp_path / "log", DEMO, TENSOR_PARALLEL_SIZE="2")
    try:
        serve.wait_ready()
        assert greedy(client, head) == one_machines_answers
    finally:
        serve.process.kill()

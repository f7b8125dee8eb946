"""Several machines."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, SecretStr, field_validator

from nibble.settings.declare import option


class ClusterOptions(BaseModel):
    """The group `Cluster`."""

    cluster: Literal["auto", "ray", "mp"] = option(
        "auto",
        "Cluster",
        "Connection of ranks on several machines: `ray`, `mp` (vLLM without Ray) or `auto`"
        " (derived from the other options).",
        "NIBBLE_CLUSTER",
        flag="--cluster",
        expected="auto, ray or mp",
    )
    nnodes: int | None = option(
        None,
        "Cluster",
        "Machines that serve one model together without Ray.",
        "NIBBLE_NNODES",
        flag="--nnodes",
        vllm="--nnodes",
        expected="a whole number from 1 to 1024",
        ge=1,
        le=1024,
    )
    node_rank: int | None = option(
        None,
        "Cluster",
        "Number of this machine among them; number 0 has the API and the address HEAD_IP.",
        "NIBBLE_NODE_RANK",
        flag="--node-rank",
        vllm="--node-rank",
        expected="a whole number from 0 to 1023",
        ge=0,
        le=1023,
    )
    head_ip: str | None = option(
        None,
        "Cluster",
        "Address of the head node.",
        "HEAD_IP",
        expected="an IP address or host name",
        min_length=1,
    )
    worker_ip: str | None = option(
        None,
        "Cluster",
        "Address at which other nodes reach this node; on this node it wins over HEAD_IP.",
        "WORKER_IP",
        expected="an IP address or host name",
        min_length=1,
    )
    num_gpus: int | None = option(
        None,
        "Cluster",
        "GPUs that this node offers to Ray; `plan` assumes the same number.",
        "NUM_GPUS",
        flag="--num-gpus",
        expected="a whole number from 0 to 1024",
        ge=0,
        le=1024,
    )
    ray_auth_token: SecretStr | None = option(
        None,
        "Cluster",
        "Cluster token, the same on every node, with and without Ray.",
        ("RAY_AUTH_TOKEN", "NIBBLE_CLUSTER_TOKEN"),
        secret=True,
        expected="a token",
    )
    cluster_wait_seconds: int = option(
        300,
        "Cluster",
        "Seconds that `serve` waits for the other nodes.",
        "NIBBLE_CLUSTER_WAIT_SECONDS",
        flag="--cluster-wait-seconds",
        expected="a whole number of seconds from 0 to 86400",
        ge=0,
        le=86400,
    )
    cluster_model: Literal["own", "head"] = option(
        "own",
        "Cluster",
        "Source of the model on other nodes: `own` (their cache or the Hub) or `head` (the"
        " head's files, verified).",
        "NIBBLE_CLUSTER_MODEL",
        flag="--cluster-model",
        expected="own or head",
    )
    cluster_interface: str | None = option(
        None,
        "Cluster",
        "Network interface of the cluster's traffic. Default: the one with this node's address.",
        "NIBBLE_CLUSTER_INTERFACE",
        flag="--cluster-interface",
        expected="the name of an interface, such as enp1s0f0np0",
        min_length=1,
        max_length=15,
    )
    cluster_min_gb_per_s: float | None = option(
        None,
        "Cluster",
        "Lowest accepted bus bandwidth of the all-reduce between nodes, in 10^9 bytes/s."
        " Default: 1 with GPUs, 0.01 without.",
        "NIBBLE_CLUSTER_MIN_GB_PER_S",
        flag="--cluster-min-gb-per-s",
        expected="a number from 0 up",
        ge=0,
        le=100000,
    )

    @field_validator("head_ip", "worker_ip")
    @classmethod
    def _host(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.:-]+", value, re.ASCII):
            raise ValueError("not an address")
        return value

    @field_validator("ray_auth_token")
    @classmethod
    def _usable_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"[\x21-\x7e]+", value.get_secret_value()):
            raise ValueError("with blanks or control characters")
        return value

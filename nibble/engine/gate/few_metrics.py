"""A few of vLLM's metrics for the status page: rendering all of them takes 15 times as long."""

from __future__ import annotations

import os
from collections.abc import Collection
from urllib.parse import parse_qs, urlencode

FEW_PATH = "/nibble/engine/metrics"


def path_for(names: Collection[str]) -> str:
    """The path, with its query, that answers samples of these names."""
    return f"{FEW_PATH}?{urlencode([('name', name) for name in sorted(names)])}"


def few_metrics(query: bytes) -> bytes | None:
    """The samples that the query names, in Prometheus's text format. None where vLLM's registry
    reads files of several processes, which have no names.
    """
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return None
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    names = parse_qs(query.decode(errors="replace")).get("name", [])
    return generate_latest(get_prometheus_registry().restricted_registry(names))

"""Sets the size of the queue of a worker's answers from VLLM_MQ_MAX_CHUNK_BYTES_MB.

An engine and a worker process have two queues in /dev/shm. vLLM 0.32 uses the variable only for the
queue of requests (v1/executor/multiproc_executor.py:151). The queue of answers always has 10 chunks
of 24 MiB (:624, distributed/device_communicators/shm_broadcast.py:492), but Docker and Kubernetes
give a container 64 MiB. Smaller chunks lose no messages: a message that is larger than a chunk goes
through a socket (shm_broadcast.py:936), which takes longer.
"""

from __future__ import annotations

from typing import Any

from vllm import envs

from nibble.engine.contract import CHUNK_MIB
from nibble.engine.plugin.require import replace, required


def size_answer_queue() -> None:
    """Use the variable for both queues, if it is set. Raises VllmMismatch."""
    if not required(envs, "is_set", "name")(CHUNK_MIB):
        return
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.executor import multiproc_executor

    readers = ("n_reader", "n_local_reader")
    required(MessageQueue, "__init__", "self", *readers, "max_chunk_bytes")

    class SizedQueue(MessageQueue):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            chunk_bytes = required(envs, CHUNK_MIB) << 20
            super().__init__(*arguments, **{"max_chunk_bytes": chunk_bytes} | options)

    replace(multiproc_executor, "MessageQueue", SizedQueue)

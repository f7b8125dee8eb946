"""The queue of a worker process's answers, of the size that VLLM_MQ_MAX_CHUNK_BYTES_MB names.

An engine and a worker process have two queues in /dev/shm. The variable sizes the queue of requests
(vllm 0.32 v1/executor/multiproc_executor.py:151). The queue of answers has 10 chunks of 24 MiB
whatever the variable says (:624, distributed/device_communicators/shm_broadcast.py:492), and Docker
and Kubernetes give a container 64 MiB. A message that is larger than a chunk goes through a socket
(shm_broadcast.py:936), so a small chunk costs time, not messages.
"""

from __future__ import annotations

from typing import Any

from vllm import envs

from nibble.engine.contract import CHUNK_MIB
from nibble.engine.plugin.require import replace, required


def size_answer_queue() -> None:
    """Let the variable size both queues where it is set."""
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

    replace(multiproc_executor, "MessageQueue", SizedQueue)  # a name that it imports for itself

"""The queues between an engine and its worker processes: their size, and how a CPU waits at them.

An engine and a worker process have two queues in /dev/shm. vLLM 0.32 uses the variable only for the
queue of requests (v1/executor/multiproc_executor.py:151). The queue of answers always has 10 chunks
of 24 MiB (:624, distributed/device_communicators/shm_broadcast.py:492), but Docker and Kubernetes
give a container 64 MiB. Smaller chunks lose no messages: a message that is larger than a chunk goes
through a socket (shm_broadcast.py:936), which takes longer.

A reader asks the memory again and again, with `sched_yield` in between, for a second after its last
message (shm_broadcast.py:207): through every step of an engine that is in use. On a CPU, that loop
takes a core from the threads that compute. The socket that wakes a reader after that second is no
way out: with its high-water mark of 1 it loses a notice that follows another within a millisecond,
and the reader then waits for up to 5 s (seen with two ranks).
"""

from __future__ import annotations

import time
from typing import Any

from vllm import envs

from nibble.engine.contract import CHUNK_MIB
from nibble.engine.plugin.require import replace, required, required_of_instances

LEAST_SLEEP_S, MOST_SLEEP_S = 20e-6, 1e-3


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


def sleep_between_looks() -> None:
    """On the CPU platform, let readers sleep between two looks at the memory.

    They sleep for a twentieth of the time that they have waited, which a step gets longer by at
    most.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    condition = required(shm_broadcast, "SpinCondition")
    required(condition, "wait", "self", "timeout_ms")
    required_of_instances(condition, "last_read", "busy_loop_s")

    class SleepingCondition(condition):
        def wait(self, timeout_ms: int | None = None) -> None:
            waited_s = time.monotonic() - self.last_read
            if waited_s > self.busy_loop_s:
                super().wait(timeout_ms)
            else:
                time.sleep(min(max(waited_s / 20, LEAST_SLEEP_S), MOST_SLEEP_S))

    replace(shm_broadcast, "SpinCondition", SleepingCondition)

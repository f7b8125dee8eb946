"""The queue of a worker's answers is as large as VLLM_MQ_MAX_CHUNK_BYTES_MB says, and larger
messages arrive all the same; on a CPU its readers sleep.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor import multiproc_executor as executor

from nibble.engine.contract import CHUNK_MIB
from nibble.engine.plugin.queues import size_answer_queue, sleep_between_looks

multiproc_executor: Any = executor

pytestmark = pytest.mark.vllm
VLLMS_OWN_BYTES = 24 << 20


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiproc_executor, "MessageQueue", MessageQueue)


def reader_of(queue: Any) -> Any:
    """The only reader of a queue in this process, both ready."""
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    queue.wait_until_ready()
    ready.join(timeout=10)
    return reader


def test_without_the_variable_it_stays_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHUNK_MIB, raising=False)
    size_answer_queue()
    assert multiproc_executor.MessageQueue is MessageQueue
    queue: Any = MessageQueue(1, 1)
    assert queue.buffer.max_chunk_bytes == VLLMS_OWN_BYTES


def test_the_variable_sizes_it_and_a_larger_message_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHUNK_MIB, "1")
    size_answer_queue()
    answers = multiproc_executor.MessageQueue(1, 1)  # as WorkerProc._init_message_queues makes it
    assert answers.buffer.max_chunk_bytes == 1 << 20
    assert answers.buffer.shared_memory.size < 11 << 20
    reader = reader_of(answers)
    for message in (b"small", b"x" * (3 << 20)):
        answers.enqueue(message)
        assert reader.dequeue(timeout=10) == message


def test_a_size_that_the_caller_gives_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHUNK_MIB, "1")
    size_answer_queue()
    assert (
        multiproc_executor.MessageQueue(1, 1, max_chunk_bytes=2 << 20).buffer.max_chunk_bytes
        == 2 << 20
    )


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A queue and its reader, as a CPU's engine has them."""
    monkeypatch.setattr(shm_broadcast, "SpinCondition", shm_broadcast.SpinCondition)
    sleep_between_looks()
    queue: Any = MessageQueue(1, 1)
    return queue, reader_of(queue)


def test_on_a_cpu_a_reader_that_waits_takes_no_core(
    sleeping: tuple[Any, Any],
) -> None:
    queue, reader = sleeping
    for number in range(3):
        sent = threading.Timer(0.3, queue.enqueue, [number])
        sent.start()
        began_cpu_s = time.thread_time()
        assert reader.dequeue(timeout=10) == number
        assert time.thread_time() - began_cpu_s < 0.06  # vLLM's own: 0.3


def test_on_a_cpu_messages_that_follow_each_other_closely_all_arrive_at_once(
    sleeping: tuple[Any, Any],
) -> None:
    queue, reader = sleeping

    def send() -> None:
        for number in range(200):
            queue.enqueue(number)
            time.sleep(0.0003 * (number % 3))

    sender = threading.Thread(target=send)
    sender.start()
    began_s = time.monotonic()
    assert [reader.dequeue(timeout=10) for _ in range(200)] == list(range(200))
    assert time.monotonic() - began_s < 4.0  # 5 s: what one lost notice costs
    sender.join()

"""How much of /dev/shm vLLM needs, and smaller queues for one worker if it is small. Pure.

Docker and Kubernetes give a container 64 MiB by default. An engine and a worker process exchange
messages in two queues of ten chunks each (vllm 0.32
distributed/device_communicators/shm_broadcast.py:493). Requests have chunks of
VLLM_MQ_MAX_CHUNK_BYTES_MB. Answers have chunks of 24 MiB, or of that variable if nibble's plugin is
loaded (nibble/engine/plugin/queues.py). vLLM refuses a queue that is larger than the free space
(:244). Pages that no message has touched take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.engine.contract import CHUNK_MIB as VARIABLE
from nibble.errors import ExitCode, NibbleError
from nibble.machine.targets import Target
from nibble.plan.choice import Choice, Choices
from nibble.plan.cpu_engine import is_one_process
from nibble.plan.inputs import PlanInputs
from nibble.plan.topology import BACKEND, Topology

CHUNKS = 10
REQUEST_CHUNK_MIB = 16  # vllm 0.32 envs.py:1868
ANSWER_CHUNK_MIB = 24  # vllm 0.32 shm_broadcast.py:492
SMALL_CHUNK_MIB = 1
MIB = 1 << 20
BOTH_QUEUES_BYTES = CHUNKS * (REQUEST_CHUNK_MIB + ANSWER_CHUNK_MIB) * MIB
SMALL_QUEUES_BYTES = CHUNKS * 2 * SMALL_CHUNK_MIB * MIB
# Workers of one machine also exchange tensors and NCCL's buffers in /dev/shm. Two workers on two
# CPU cores took 16 MiB before they created the queue of answers; with 256 MiB in all they ended
# after the load (2026-11-23). More cores and NCCL take more.
BESIDE_THE_QUEUES_BYTES = 256 * MIB
SEVERAL_WORKERS_BYTES = 1 << 30
ADVICE = (
    "start the container with --shm-size 1g or --ipc host (in Kubernetes, mount an emptyDir with"
    " medium: Memory at /dev/shm)"
)


def queue_environment(
    inputs: PlanInputs, args: Mapping[str, Choice], topology: Topology
) -> Choices:
    """Small queues for a server with one worker process, if vLLM's two default queues do not
    fit.
    """
    free_bytes = inputs.shm_free_bytes
    if free_bytes is None or free_bytes >= BOTH_QUEUES_BYTES:
        return {}
    if topology.ranks > 1 or not has_queues(inputs.target, args, inputs.environ, topology):
        return {}
    reason = (
        f"/dev/shm has {free_bytes // MIB} MiB free, but the queues between the engine and its"
        f" worker are {CHUNKS * REQUEST_CHUNK_MIB} and {CHUNKS * ANSWER_CHUNK_MIB} MiB by default;"
        " a larger message uses a socket"
    )
    return {VARIABLE: Choice(SMALL_CHUNK_MIB, "nibble's default", reason)}


def has_queues(
    target: Target, args: Mapping[str, Any], environ: Mapping[str, str], topology: Topology
) -> bool:
    """Whether a worker is a process apart from the engine."""
    if topology.is_headless:  # it reads the queue of rank 0 over the network
        return False
    backend = args[BACKEND].value if BACKEND in args else None
    if target.device == "cpu":
        return not is_one_process(target, args, environ, topology)
    return topology.ranks > 1 or backend in ("mp", "ray")


def needed_bytes(topology: Topology, child: Mapping[str, str], plugin_sizes_answers: bool) -> int:
    """Bytes without which a start fails: the larger queue, or both at the smallest size, and what
    several workers exchange.

    `child` is vLLM's environment.
    """
    given = child.get(VARIABLE, "").strip()
    chunk_mib = int(given) if given.isdigit() else None
    requests_mib = REQUEST_CHUNK_MIB if chunk_mib is None else chunk_mib
    answers_mib = ANSWER_CHUNK_MIB if chunk_mib is None or not plugin_sizes_answers else chunk_mib
    if topology.mode == "mp":  # answers then have a smaller queue (multiproc_executor.py:641)
        answers_mib = 0
    queues = max(SMALL_QUEUES_BYTES, CHUNKS * max(requests_mib, answers_mib) * MIB)
    return queues + (BESIDE_THE_QUEUES_BYTES if topology.ranks_here > 1 else 0)


def check_shared_memory(free_bytes: int | None, needed: int, workers: int) -> list[str]:
    """Warnings about little shared memory. Raises NO_FIT if less than the `needed` bytes of queues
    is free.
    """
    if free_bytes is None:
        free_bytes = 0
    who = f"{workers} workers" if workers > 1 else "a worker process"
    if free_bytes < needed:
        what = (
            f"/dev/shm has {free_bytes // MIB} MiB free, but vLLM needs {needed // MIB} MiB there"
            f" for {who}"
        )
        raise NibbleError(ExitCode.NO_FIT, what=what, action=ADVICE)
    if workers > 1 and free_bytes < SEVERAL_WORKERS_BYTES:
        return [f"/dev/shm has only {free_bytes // MIB} MiB free for {who}: {ADVICE}"]
    return []

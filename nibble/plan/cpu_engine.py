"""The engine on a CPU: one process, and a thread for each core. Pure.

vLLM 0.32 starts a worker process on the CPU (platforms/cpu.py:332), since OpenMP reads its settings
when a process starts, and keeps one core for the engine process, which polls for the worker's
answers (utils/ompmultiprocessing.py:43). nibble sets OpenMP's variables before vLLM starts, so both
are one process and no core waits.
"""

from __future__ import annotations

from collections.abc import Mapping

from nibble.machine.targets import Target
from nibble.plan.choice import OURS, Choice, Choices
from nibble.plan.inputs import PlanInputs
from nibble.plan.startup import has_several_processes
from nibble.plan.topology import Topology

ONE_PROCESS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING"  # "0": vLLM's CPU platform leaves the executor as it is
)
THREADS = "OMP_NUM_THREADS"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
# A user who divides the cores wants the worker process that vLLM binds to them.
_USERS_DIVISION = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")


def is_one_process(
    target: Target, args: Mapping[str, Choice], environ: Mapping[str, str], topology: Topology
) -> bool:
    """Whether engine and worker share a process. `environ`: the user's."""
    return (
        target.device == "cpu"
        and topology.mode == "machine"
        and topology.ranks == 1
        and not has_several_processes(args)
        and environ.get(ONE_PROCESS, "0") == "0"
        and not any(environ.get(name) for name in _USERS_DIVISION)
    )


def cpu_environment(inputs: PlanInputs, args: Mapping[str, Choice], topology: Topology) -> Choices:
    """Variables for one process with all cores; none where vLLM's worker process stays."""
    if not is_one_process(inputs.target, args, inputs.environ, topology):
        return {}
    together = "engine and worker are one process: no core is kept for waiting"
    forked = "the engine forks from the server, which has imported all modules"
    found = {ONE_PROCESS: Choice("0", OURS, together), START_METHOD: Choice("fork", OURS, forked)}
    if cores := inputs.hardware.compute:
        found[THREADS] = Choice(str(cores.threads), OURS, f"one for each of {cores.reason}")
    return found

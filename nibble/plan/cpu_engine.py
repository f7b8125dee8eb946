"""The engine on a CPU: one process, a thread for each core, and prompts in short chunks. Pure.

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
from nibble.plan.startup import SPECULATIVE, has_several_processes
from nibble.plan.topology import Topology

ONE_PROCESS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING"  # "0": vLLM's CPU platform leaves the executor as it is
)
THREADS = "OMP_NUM_THREADS"
SPINS = "GOMP_SPINCOUNT"  # of an OpenMP thread before it sleeps; by default some milliseconds
_FEW_SPINS = "1000"  # some microseconds
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
BATCHED_TOKENS = "--max-num-batched-tokens"
# Bytes of weights times tokens of a prompt, by second and core. Two cores of an EPYC with AVX-512
# read a prompt at 130 tokens/s through 0.93 GB of NVFP4 (2026-11-23).
_PROMPT_RATE = 60e9
_ATTENTION = {"full_attention", "sliding_attention"}
_LEAST_TOKENS, _MOST_TOKENS = 256, 2048  # vLLM's default on a CPU (vllm 0.32 arg_utils.py:2975)
# A user who divides the cores wants the worker process that vLLM binds to them.
BIND = "VLLM_CPU_OMP_THREADS_BIND"
_USERS_DIVISION = (BIND, "VLLM_CPU_NUM_OF_RESERVED_CPU")


# Whose layers the plugin computes as a few operators (engine/plugin/cpu_decoder.py).
_OPERATORS = frozenset(f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3"))
_EAGER = "--enforce-eager"
_WHY_EAGER = "a few operators compute each layer, without the minute that compilation takes"
# What changes the layers, or asks for vLLM's own way of computing them.
_OTHER_LAYERS = ("--enable-lora", "--compilation-config", "--linear-backend")


def layer_operators(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choices:
    """No compilation where a few operators compute each layer."""
    return {_EAGER: Choice(True, OURS, _WHY_EAGER)} if has_operators(inputs, args) else {}


def has_operators(inputs: PlanInputs, args: Mapping[str, Choice]) -> bool:
    """Whether the plugin's operators compute the layers, unless the user has them compiled."""
    checkpoint = inputs.checkpoint
    if inputs.target.device != "cpu" or checkpoint is None or not checkpoint.scheme.is_nvfp4:
        return False
    quantization, dtype = checkpoint.scheme.vllm_quantization, args.get("--dtype")
    kept = checkpoint.text_config.get("dtype", checkpoint.text_config.get("torch_dtype"))
    computed = kept if dtype is None or dtype.value == "auto" else dtype.value
    return (
        checkpoint.architecture in _OPERATORS
        and quantization in ("modelopt_fp4", "compressed-tensors")
        and "+" not in checkpoint.scheme.name
        and str(computed) == "bfloat16"
        and not any(flag in args and args[flag].value is not False for flag in _OTHER_LAYERS)
        and not has_several_processes(args)
    )


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
    """Variables for one process with all cores, or for several that share them."""
    if not is_one_process(inputs.target, args, inputs.environ, topology):
        return _shared_cores(inputs, topology)
    together = "engine and worker are one process: no core is kept for waiting"
    forked = "the engine forks from the server, which has imported all modules"
    found = {ONE_PROCESS: Choice("0", OURS, together), START_METHOD: Choice("fork", OURS, forked)}
    if cores := inputs.hardware.compute:
        found[THREADS] = Choice(str(cores.threads), OURS, f"one for each of {cores.reason}")
    if has_operators(inputs, args) and _EAGER in args and args[_EAGER].value is True:
        found[SPINS] = Choice(_FEW_SPINS, OURS, "torch's threads leave the cores to the operators'")
    return found


def _shared_cores(inputs: PlanInputs, topology: Topology) -> Choices:
    """Threads of ranks that are more than the NUMA nodes, to each of which vLLM would bind one."""
    cores, ranks = inputs.hardware.compute, topology.ranks_here
    is_users = any(inputs.environ.get(name) for name in (*_USERS_DIVISION, THREADS))
    if inputs.target.device != "cpu" or cores is None or is_users or ranks <= cores.numa_nodes:
        return {}
    nodes = f"{cores.numa_nodes} NUMA node{'s' * (cores.numa_nodes != 1)}"
    why = f"vLLM binds one rank to a NUMA node; {ranks} ranks share {nodes}"
    threads = max(1, cores.threads * cores.numa_nodes // ranks)
    return {
        BIND: Choice("nobind", OURS, why),
        THREADS: Choice(str(threads), OURS, f"of each of {ranks} ranks on {cores.reason}"),
    }


def prompt_chunk(inputs: PlanInputs, args: Mapping[str, Choice]) -> Choices:
    """The tokens of a step, so that a chunk of a prompt takes about a second: other sequences wait
    that long, and a start computes one chunk of this size.

    Not for models whose minimum only vLLM knows: with images, or with states instead of a KV cache.
    """
    checkpoint, cores = inputs.checkpoint, inputs.hardware.compute
    if inputs.target.device != "cpu" or checkpoint is None or checkpoint.weights is None:
        return {}
    step_bytes = checkpoint.weights.decode_bytes_per_step
    chunked = args.get("--enable-chunked-prefill")
    if not step_bytes or cores is None or (chunked and chunked.value is False):
        return {}
    is_plain = (checkpoint.architecture or "").endswith("ForCausalLM") and not checkpoint.has_vision
    kinds = set(checkpoint.text_config.get("layer_types") or ())
    if not is_plain or kinds - _ATTENTION or set(SPECULATIVE) & set(args):
        return {}
    sequences = args.get("--max-num-seqs")  # vLLM refuses fewer tokens than sequences
    least = max(_LEAST_TOKENS, int(sequences.value) if sequences else 0)
    tokens = int(_PROMPT_RATE * cores.threads / step_bytes) // 128 * 128
    if max(tokens, least) >= _MOST_TOKENS:
        return {}
    reason = (
        f"about a second of a prompt on {cores.threads} cores, estimated from"
        f" {step_bytes / (1 << 30):.2f} GiB of weights"
    )
    return {BATCHED_TOKENS: Choice(max(tokens, least), OURS, reason)}

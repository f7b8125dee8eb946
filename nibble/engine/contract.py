"""What nibble tells its vLLM plugin, and what the plugin reports: the names and shapes of both.

nibble's supervisor and the plugin (nibble/engine/plugin) run in different processes and meet in
environment variables, a flag, files and JSON. Both import this module, so it uses the standard
library alone.
"""

from __future__ import annotations

import re
import signal
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    TypedDict,
    TypeVar,
    get_args,
    get_type_hints,
)

VLLM_VERSION = "0.32.0"  # that the plugin is made for

# --- how vLLM finds the plugin (entry points of pyproject.toml) -----------------------------------

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN, REPORT_PLUGIN = "nibble", "nibble_proof"
ALLOWED_PLUGINS = "VLLM_PLUGINS"  # vllm 0.32 plugins/__init__.py: a list of those to load
OPERATORS = "nibble_kernels"  # the package without which the plugin does nothing

# --- variables ------------------------------------------------------------------------------------

REPORT_FOLDER = "NIBBLE_PROOF"  # of the supervisor's, for reports and references
PULSE_FOLDER = "NIBBLE_PULSE"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # vLLM's: results do not depend on the batch
CHUNK_MIB = "VLLM_MQ_MAX_CHUNK_BYTES_MB"  # vLLM's, for requests; the plugin sizes answers by it too

# --- options: the key "nibble" of vLLM's --additional-config --------------------------------------

CONFIG_FLAG, CONFIG_KEY = "--additional-config", "nibble"

Activations = Literal["checkpoint", "bf16"]
HeadFormat = Literal["off", "nvfp4"]
Kernel = Literal["vllm", "nibble"]
ScaleMode = Literal["token", "batch-pow2", "batch"]
Switch = Literal["on", "off"]


@dataclass(frozen=True)
class Options:
    """The plugin's options.

    - nvfp4_activations: the checkpoint's format, or bf16 (weight-only).
    - quantize_lm_head: nvfp4 quantizes a BF16 output head when it is loaded.
    - linear_kernel, moe_kernel: vLLM's choice, or nibble's kernel for NVFP4 weights with
      unquantized activations on a GPU.
    - act_scale_mode: the group of values that shares a scale in Quartet II's activations
      (nibble_kernels.quartet2).
    - vllm_shapes: rows and columns of the layers that keep vLLM's choice with linear_kernel nibble,
      such as 4096x14336,6144x4096; the plan sets it from trials on this machine.
    - compact_json: whether JSON by a schema has no blanks between its values.
    - sparse_fp4: whether nibble's linear kernel packs weights that are 2:4 sparse
      (nibble_kernels.nvfp4_sparse).
    - step_graph: whether a decode step runs from CUDA graphs as a whole (plugin/step_graph).
    """

    nvfp4_activations: Activations = "checkpoint"
    quantize_lm_head: HeadFormat = "off"
    linear_kernel: Kernel = "vllm"
    moe_kernel: Kernel = "vllm"
    act_scale_mode: ScaleMode = "token"
    compact_json: Switch = "off"
    sparse_fp4: Switch = "off"
    step_graph: Switch = "off"
    vllm_shapes: str = ""

    @property
    def weights_only(self) -> bool:
        """Whether activations stay in BF16, also if the checkpoint quantizes them."""
        return self.nvfp4_activations == "bf16"

    def leaves_to_vllm(self, rows: int, columns: int) -> bool:
        """Whether a layer of this shape keeps vLLM's choice."""
        return f"{rows}x{columns}" in self.vllm_shapes.split(",")

    @classmethod
    def from_config(cls, additional: object) -> Options:
        """Read from a value of --additional-config. Raises ValueError for an unknown key or
        value.
        """
        given = given_options(additional)
        if isinstance(additional, Mapping) and additional.get(CONFIG_KEY, given) is not given:
            raise ValueError(
                f"{CONFIG_FLAG} {CONFIG_KEY} is {additional[CONFIG_KEY]!r}: expected an object"
            )
        types = get_type_hints(cls)
        for name, value in given.items():
            if name in PLANNED_OPTIONS and _SHAPES.fullmatch(str(value)):
                continue
            allowed = get_args(types.get(name))
            if not allowed:
                setting = f'{CONFIG_FLAG} {{"{CONFIG_KEY}": {{"{name}": "{value}"}}}}'
                raise ValueError(f"{setting}: expected one of {', '.join(OPTIONS)}")
            if value not in allowed:
                raise ValueError(
                    f"{CONFIG_FLAG} {CONFIG_KEY}.{name} is {value!r}: expected"
                    f" {' or '.join(map(str, allowed))}"
                )
        return cls(**given)


PLANNED_OPTIONS = ("vllm_shapes",)  # without a setting of the user's
_SHAPES = re.compile(r"(\d+x\d+(,\d+x\d+)*)?")
OPTIONS = tuple(field.name for field in fields(Options) if field.name not in PLANNED_OPTIONS)


def given_options(additional: object) -> Mapping[str, Any]:
    """The plugin's options in a value of --additional-config, unchecked."""
    found = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# --- classes whose names appear in reports, in plans and in targets/*.toml ------------------------

CPU_LINEAR, GPU_LINEAR = "CpuNvFp4LinearKernel", "NibbleNvFp4LinearKernel"
CPU_EXPERTS = ("CpuModelOptNvFp4MoE", "CpuCompressedTensorsNvFp4MoE")
GPU_EXPERTS = ("NibbleModelOptNvFp4MoE", "NibbleCompressedTensorsNvFp4MoE")
GPU_E4M3_EXPERTS = (
    "NibbleModelOptFp8MoE",
    "NibbleFp8MoE",
    "NibbleCompressedTensorsFp8MoE",
)
QUARTET2_LINEAR = "Quartet2LinearMethod"
OUR_CLASSES = frozenset(
    {CPU_LINEAR, GPU_LINEAR, *CPU_EXPERTS, *GPU_EXPERTS, *GPU_E4M3_EXPERTS, QUARTET2_LINEAR}
)

Class = TypeVar("Class", bound=type)


def reported_as(name: str) -> Callable[[Class], Class]:
    """Decorator for a class of the plugin: its name must be `name`, as this module states it.
    Raises TypeError when the module loads.
    """

    def check(decorated: Class) -> Class:
        if decorated.__name__ != name:
            raise TypeError(f"{decorated.__name__} is {name} in nibble/engine/contract.py")
        return decorated

    return check


# --- CloverLM -------------------------------------------------------------------------------------

CLOVERLM_MODEL_TYPE, CLOVERLM_ARCHITECTURE = "cloverlm", "CloverLMForCausalLM"
QUARTET2 = "quartet2"  # --quantization
TOKENMONSTER = "tokenmonster"  # --tokenizer-mode
VOCABULARY = "englishcode-32000-strict-nocapcode-v1-eot=14199.vocab"
VOCABULARY_SOURCE = "https://huggingface.co/gvlassis/tokenmonster"

# --- errors of a load, which the supervisor finds in vLLM's log -----------------------------------

# vLLM's message (vllm 0.32 model_loader/default_loader.py:564).
NOT_INITIALIZED = "Following weights were not initialized from checkpoint: "
TENSOR_ERROR, SCALE_ERROR = "TensorError", "ScaleError"  # nibble_kernels.merge raises ScaleError
DOES_NOT_FIT, NOT_LOADED = "does not fit the model", "was not loaded"

# --- files of REPORT_FOLDER -----------------------------------------------------------------------

WORKER_REPORTS = "worker-*.json"
REFERENCES = "references.json"  # maps a Format to the file with its tensors
REFERENCES_PENDING = "references.pending"  # while it exists, workers wait for REFERENCES

Format = Literal["fp4", "bf16"]  # of the activations that a computed reference is made for


def worker_report(pid: int) -> str:
    """The name of one worker's report."""
    return WORKER_REPORTS.replace("*", str(pid))


def reporting_pid(file: Path) -> str:
    """The process id in the name of a report."""
    return file.stem.removeprefix(WORKER_REPORTS.partition("*")[0])


# --- reports --------------------------------------------------------------------------------------

Part = Literal["linear", "moe", "routing", "attention", "weights"]
WEIGHTED_PARTS: tuple[Part, ...] = (
    "linear",
    "moe",
)  # parts whose layer checks report `activations`


class KernelsUsed(TypedDict):
    """The kernels that a worker runs, read from its modules after the warm-up.

    `linear`, `moe` and `attention` count layers for each kernel, such as
    {"nvfp4: MarlinNvFp4LinearKernel": 64}. `operators` maps a device to "compiled", or to the
    reason why nibble's operators run as plain torch code there.
    """

    linear: dict[str, int]
    moe: dict[str, int]
    attention: dict[str, int]
    kv_cache_dtype: list[str]
    model_dtype: str
    stage: int
    architecture: str
    quantization: str | None
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    cudagraph_mode: str
    cudagraphs_captured: int
    compilation_mode: str
    sampler: str
    operators: dict[str, str]
    device: str


class LayerCheck(TypedDict):
    """Layers of one part and kind, compared with reference.py: their number, how many were
    compared, and how many are wrong.

    `activations` lists the forms that agree, such as "fp4, one scale" (see `formats_of`).
    `worst_error` is "inf" if a value is not finite. `wrong_layers` and `not_compared` describe the
    first few.
    """

    part: str
    kind: str
    layers: int
    compared: int
    activations: list[str]
    worst_error: float | str | None
    wrong: int
    wrong_layers: list[str]
    not_compared: list[str]


class Halves(TypedDict, total=False):
    """Median relative errors of the first and the second half of the tokens."""

    early: float
    late: float


class PointComparison(Halves):
    """The input of the product `at`. `noise` is the reference's rounding error there."""

    at: str
    noise: float


class LayerDifference(Halves):
    """A layer's contribution to the residual stream: its error, the `factor` by which it is too
    large, and the norm of the output.
    """

    factor: float
    norm: float


class LayerComparison(LayerDifference):
    """A layer's difference. `noise` is the reference's rounding error, `inside` compares the inputs
    of the layer's products.
    """

    noise: float
    inside: list[PointComparison]


class NormsComparison(TypedDict):
    compared: int
    wrong: list[str]


class LogitsComparison(TypedDict):
    error: float
    factor: float
    token: int
    off: float
    spread: float


class Comparison(TypedDict):
    """A worker's model compared with a computed reference. `cache` is the format of the KV cache,
    bf16 or fp8.
    """

    tokens: int
    embedding: float
    layers: list[LayerComparison]
    cache: str
    norms: NormsComparison
    logits: LogitsComparison | None


class NotCompared(TypedDict):
    not_compared: str  # the reason


class WorkerReport(TypedDict):
    """The content of `worker-PID.json`. `problem` says why parts are missing; empty if complete."""

    rank: int
    ran: KernelsUsed | None
    checks: list[LayerCheck]
    definition: Comparison | NotCompared | None
    problem: str
    seconds: float
    node: NotRequired[str]  # added by the supervisor; empty for the supervisor's machine


def formats_of(checks: Iterable[Mapping[str, Any]]) -> set[str]:
    """Formats of activations in which the layers agree with the reference: "fp4", "bf16", or
    "plain" for unquantized layers.
    """
    return {
        form.partition(",")[0]
        for check in checks
        if check["part"] in WEIGHTED_PARTS
        for form in check["activations"]
    }


# --- tensors of a computed reference --------------------------------------------------------------

INSIDE, NORM, NOISE = "inside", "norm", "noise"


class InsidePoint(NamedTuple):
    """A tensor `inside:LAYER:NUMBER:NAME,NAME`: the input of the modules NAME of a layer."""

    layer: int
    number: int
    names: list[str]

    @property
    def key(self) -> str:
        return f"{INSIDE}:{self.layer}:{self.number}:{','.join(self.names)}"

    @classmethod
    def from_key(cls, key: str) -> InsidePoint | None:
        """None for a tensor of another kind."""
        kind, _, rest = key.partition(":")
        if kind != INSIDE or rest.endswith(f":{NOISE}"):
            return None
        layer, number, names = rest.split(":")
        return cls(int(layer), int(number), names.split(","))


def inside_noise(layer: int) -> str:
    """The key of the reference's rounding errors at a layer's points, by their number."""
    return f"{INSIDE}:{layer}:{NOISE}"


def norm_key(name: str) -> str:
    """The key of a norm's weight."""
    return f"{NORM}:{name}"


def norm_name(key: str) -> str:
    """The norm whose weight the tensor is; empty for a tensor of another kind."""
    kind, _, name = key.partition(":")
    return name if kind == NORM else ""


# --- files of PULSE_FOLDER ------------------------------------------------------------------------

HEALTH = "/health?nibble"  # the supervisor's request; the plugin hides it from the access log
IDLE, STEP, CALL = 0, 1, 2
PulseKind = Literal["api", "engine"]
STACKS_SIGNAL = signal.SIGUSR2  # makes a process write the Python stacks of its threads


def pulse_file(kind: PulseKind, pid: int | Literal["*"]) -> str:
    return f"{kind}-{pid}"


def steps_file(pid: int | Literal["*"]) -> str:
    """The file in which an engine core counts its steps (StepCounts)."""
    return f"steps-{pid}"


def stacks_file(pid: int) -> str:
    return f"stacks-{pid}"


class PulseRecord(NamedTuple):
    """The content of a process's file.

    `turns` grows with each step or answer. `doing` is IDLE, STEP (a step of the model) or CALL (a
    utility). `requests` counts the unfinished requests, `tokens` the tokens of the running batch.
    `paused` is true while the engine sleeps.
    """

    pid: int
    doing: int
    paused: bool
    turns: int
    requests: int
    tokens: int

    def write(self, file: Any) -> None:
        """Write to `file`, a buffer of PULSE_BYTES."""
        _PULSE.pack_into(file, 0, _MAGIC, *self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PulseRecord | None:
        """None for another layout."""
        if len(data) != PULSE_BYTES:
            return None
        magic, pid, doing, paused, *counts = _PULSE.unpack(data)
        return cls(pid, doing, bool(paused), *counts) if magic == _MAGIC else None


_MAGIC = b"nblpuls1"
_PULSE = struct.Struct("=8sIBBxxQQQ")
PULSE_BYTES = _PULSE.size


# --- steps of the model, by the path that they took -----------------------------------------------

StepPath = Literal["graph", "inputs", "vllm"]
# Why a step took its path. `graph`: CUDA graphs prepare the inputs, run the model and sample.
# `inputs`: they prepare the inputs and run the model; vLLM's code samples. `vllm`: vLLM's path.
STEP_REASONS: Mapping[str, StepPath] = {
    "steady": "graph",
    "random_sampler": "inputs",
    "new_sampling": "inputs",
    "grammar": "vllm",
    "thinking_budget": "vllm",
    "unsupported": "vllm",
    "arrival": "vllm",
    "prefill": "vllm",
    "drafts": "vllm",
    "encoder": "vllm",
    "preemption": "vllm",
    "cache_blocks": "vllm",
    "no_graph": "vllm",
    "capture_failed": "vllm",
    "new_batch_size": "vllm",
    "empty": "vllm",
}


class StepCounts:
    """The layout of `steps_file`: one number for each of STEP_REASONS."""

    reasons = tuple(STEP_REASONS)
    _magic = b"nblstep1"
    _struct = struct.Struct(f"=8s{len(reasons)}Q")
    size = _struct.size

    @classmethod
    def write(cls, file: Any, counts: Mapping[str, int]) -> None:
        """Write to `file`, a buffer of `size` bytes."""
        cls._struct.pack_into(file, 0, cls._magic, *(counts.get(name, 0) for name in cls.reasons))

    @classmethod
    def read(cls, data: bytes) -> dict[str, int]:
        """Empty for another layout."""
        if len(data) != cls.size:
            return {}
        magic, *counts = cls._struct.unpack(data)
        return dict(zip(cls.reasons, counts, strict=True)) if magic == cls._magic else {}

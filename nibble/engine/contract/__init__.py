"""What nibble and its vLLM plugin agree on: options, and the names that both use.

nibble's supervisor and the plugin (nibble/engine/plugin) run in different processes and meet in
environment variables, a flag, files and JSON. Both import this package, so it uses the standard
library alone: report.py has the reports of workers, reference.py the tensors of a computed
reference, pulse.py the progress of vLLM's processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_type_hints

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
DraftHead = Literal["bf16", "nvfp4"]
Kernel = Literal["vllm", "nibble"]
AttentionKernel = Literal["vllm", "nibble", "few"]
ScaleMode = Literal["token", "batch-pow2", "batch"]
Switch = Literal["on", "off"]


@dataclass(frozen=True)
class Options:
    """The plugin's options.

    - nvfp4_activations: the checkpoint's format, or bf16 (weight-only).
    - quantize_lm_head: nvfp4 quantizes a BF16 output head when it is loaded.
    - draft_head: nvfp4 gives an EAGLE or MTP drafter an NVFP4 copy of its BF16 output head
      (plugin/draft_head.py).
    - linear_kernel, moe_kernel: vLLM's choice, or nibble's kernels for NVFP4 weights on a GPU,
      with unquantized activations or, on SM12x, with NVFP4 ones.
    - attention_kernel: vLLM's choice, or nibble's kernel for decode steps, or for those of few
      requests (plugin/attention).
    - attention_front: whether one kernel computes norms of queries and keys, RoPE and the cache
      write (plugin/attention/front.py).
    - linear_attention: whether nibble's kernels compute decode steps and short prompts of linear
      attention (plugin/gated_delta.py).
    - shared_expert: whether nibble's kernel of routed experts computes a shared one too
      (plugin/shared_expert.py).
    - act_scale_mode: the group of values that shares a scale in Quartet II's activations
      (nibble_kernels.quartet2).
    - vllm_shapes: rows and columns of the layers that keep vLLM's choice with linear_kernel nibble,
      such as 4096x14336,6144x4096; the plan sets it from trials on this machine.
    - e4m3_linear: vLLM's choice, or nibble's kernel for few rows of FP8 linear layers beside it
      (plugin/e4m3_linear.py).
    - compact_json: whether JSON by a schema has no blanks between its values.
    - sparse_fp4: whether nibble's linear kernel packs weights that are 2:4 sparse
      (nibble_kernels.nvfp4_sparse).
    - step_graph: whether a decode step runs from CUDA graphs as a whole (plugin/step_graph).
    """

    nvfp4_activations: Activations = "checkpoint"
    quantize_lm_head: HeadFormat = "off"
    draft_head: DraftHead = "bf16"
    linear_kernel: Kernel = "vllm"
    moe_kernel: Kernel = "vllm"
    attention_kernel: AttentionKernel = "vllm"
    attention_front: Switch = "off"
    linear_attention: Switch = "off"
    shared_expert: Switch = "off"
    act_scale_mode: ScaleMode = "token"
    compact_json: Switch = "off"
    sparse_fp4: Switch = "off"
    step_graph: Switch = "off"
    vllm_shapes: str = ""
    e4m3_linear: Kernel = "vllm"

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
            if name == "vllm_shapes" and _SHAPES.fullmatch(str(value)):
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


PLANNED_OPTIONS = ("vllm_shapes", "e4m3_linear")  # without a setting of the user's
_SHAPES = re.compile(r"(\d+x\d+(,\d+x\d+)*)?")
OPTIONS = tuple(field.name for field in fields(Options) if field.name not in PLANNED_OPTIONS)


def given_options(additional: object) -> Mapping[str, Any]:
    """The plugin's options in a value of --additional-config, unchecked."""
    found = additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# --- classes whose names appear in reports, in plans and in targets/*.toml ------------------------

CPU_LINEAR, GPU_LINEAR = "CpuNvFp4LinearKernel", "NibbleNvFp4LinearKernel"
GPU_E4M3_LINEAR = "NibbleE4m3LinearKernel"
CPU_EXPERTS = ("CpuModelOptNvFp4MoE", "CpuCompressedTensorsNvFp4MoE")
GPU_EXPERTS = ("NibbleModelOptNvFp4MoE", "NibbleCompressedTensorsNvFp4MoE")
# With FP4 activations, on GPUs of this major compute capability.
FP4_PRODUCTS = 12
GPU_W4A4_LINEAR = "NibbleNvFp4W4A4LinearKernel"
GPU_W4A4_EXPERTS = ("NibbleModelOptW4A4MoE", "NibbleCompressedTensorsW4A4MoE")
GPU_E4M3_EXPERTS = (
    "NibbleModelOptFp8MoE",
    "NibbleFp8MoE",
    "NibbleCompressedTensorsFp8MoE",
)
QUARTET2_LINEAR = "Quartet2LinearMethod"
# The name of nibble's attention backend, and of vLLM's that it stands in for.
ATTENTION, FLASH_ATTENTION = "CUTE_PAGED", "FLASH_ATTN"
OUR_CLASSES = frozenset(
    {CPU_LINEAR, GPU_LINEAR, GPU_W4A4_LINEAR, GPU_E4M3_LINEAR, QUARTET2_LINEAR}
    | {*CPU_EXPERTS, *GPU_EXPERTS, *GPU_W4A4_EXPERTS, *GPU_E4M3_EXPERTS}
)

Class = TypeVar("Class", bound=type)


def reported_as(name: str) -> Callable[[Class], Class]:
    """Decorator for a class of the plugin: its name must be `name`, as this module states it.
    Raises TypeError when the module loads.
    """

    def check(decorated: Class) -> Class:
        if decorated.__name__ != name:
            raise TypeError(f"{decorated.__name__} is {name} in nibble/engine/contract")
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

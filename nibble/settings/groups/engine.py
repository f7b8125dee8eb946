"""vLLM's engine, its kernels and the canary."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, field_validator

from nibble.engine import contract
from nibble.settings.declare import option, token_count

TURBOQUANT_DEFAULT = "turboquant_k8v4"


class EngineOptions(BaseModel):
    """The group `Engine`."""

    max_model_len: int | None = option(
        None,
        "Engine",
        "Context length in tokens, such as 32768 or 32K. Default: the recipe's or the model's.",
        "MAX_MODEL_LEN",
        flag="--max-model-len",
        vllm="--max-model-len",
        expected="a whole number of tokens from 1 up, such as 32768 or 32K",
        ge=1,
        le=1 << 31,
    )
    max_num_seqs: int | None = option(
        None,
        "Engine",
        "Sequences decoded at the same time. Default: the recipe's or the target's.",
        "MAX_NUM_SEQS",
        flag="--max-num-seqs",
        vllm="--max-num-seqs",
        expected="a whole number from 1 to 65536",
        ge=1,
        le=65536,
    )
    tensor_parallel_size: int | None = option(
        None,
        "Engine",
        "GPUs that each layer of one model is split over. Default: the recipe's, else 1.",
        ("TENSOR_PARALLEL_SIZE", "TP"),
        flag="--tensor-parallel-size",
        vllm="--tensor-parallel-size",
        expected="a whole number from 1 to 1024",
        ge=1,
        le=1024,
    )
    pipeline_parallel_size: int | None = option(
        None,
        "Engine",
        "Stages that the layers of one model are split into. Default: 1.",
        "NIBBLE_PIPELINE_PARALLEL_SIZE",
        flag="--pipeline-parallel-size",
        vllm="--pipeline-parallel-size",
        expected="a whole number from 1 to 1024",
        ge=1,
        le=1024,
    )
    gpu_memory_util: float | None = option(
        None,
        "Engine",
        "Upper limit of the fraction of GPU memory that vLLM takes.",
        ("GPU_MEMORY_UTIL", "GPU_MEM_UTIL", "SERVE_GPU_UTIL"),
        flag="--gpu-memory-utilization",
        vllm="--gpu-memory-utilization",
        expected="a number above 0 and at most 1",
        gt=0,
        le=1,
    )
    kv_cache_bytes: int | None = option(
        None,
        "Engine",
        "Bytes of KV cache; replaces what vLLM would measure.",
        "NIBBLE_KV_CACHE_BYTES",
        flag="--kv-cache-bytes",
        vllm="--kv-cache-memory-bytes",
        expected="a whole number of bytes from 1048576 up",
        ge=1 << 20,
    )
    memory_reserve_gib: float | None = option(
        None,
        "Engine",
        "GiB of memory that plan and watchdog leave to the rest of the machine; 0 disables the"
        " watchdog. Default: the target's.",
        "NIBBLE_MEMORY_RESERVE_GIB",
        flag="--memory-reserve-gib",
        expected="a number of GiB from 0 to 4096",
        ge=0,
        le=4096,
    )
    tq: str | None = option(
        None,
        "Engine",
        "TurboQuant KV cache with more context and lower quality: `1` or a preset. Default:"
        " off; `1` means turboquant_k8v4.",
        "NIBBLE_TQ",
        flag="--tq",
        bare=TURBOQUANT_DEFAULT,
        expected="1 or the name of a preset such as turboquant_k8v4",
    )
    gemma4_attention: Literal["triton", "per-layer", "flashinfer"] = option(
        "triton",
        "Engine",
        "Attention of Gemma 4 on gb10 and sm120: `triton` (vLLM's choice), `per-layer`"
        " (FlashAttention 2 for sliding layers) or `flashinfer`. Only `triton` is measured.",
        "NIBBLE_GEMMA4_ATTENTION",
        flag="--gemma4-attention",
        expected="triton, per-layer or flashinfer",
    )
    nvfp4_activations: contract.Activations = option(
        "checkpoint",
        "Engine",
        "Activations of NVFP4 layers: `checkpoint` (what the checkpoint declares) or `bf16`"
        " (weights alone in NVFP4).",
        "NIBBLE_NVFP4_ACTIVATIONS",
        flag="--nvfp4-activations",
        expected="checkpoint or bf16",
    )
    quantize_lm_head: contract.HeadFormat = option(
        "off",
        "Engine",
        "Quantization of a BF16 output head during the load: `off` or `nvfp4`.",
        "NIBBLE_QUANTIZE_LM_HEAD",
        flag="--quantize-lm-head",
        expected="off or nvfp4",
    )
    draft_head: Literal["auto", contract.DraftHead] = option(
        "auto",
        "Engine",
        "Output head that an EAGLE or MTP drafter reads: `nvfp4` (a copy of a BF16 head,"
        " quantized during the load), `bf16` (as it is) or `auto`: `nvfp4` on hopper with"
        " nibble's linear kernel (docs/nvfp4.md).",
        "NIBBLE_DRAFT_HEAD",
        flag="--draft-head",
        expected="auto, bf16 or nvfp4",
    )
    linear_kernel: Literal["auto", contract.Kernel] = option(
        "auto",
        "Engine",
        "Kernel for NVFP4 weights on a GPU (with FP4 activations nibble's is for SM12x), and for"
        " few rows of FP8 layers beside them: `vllm` (vLLM's choice), `nibble` or `auto`. `auto`"
        " takes nibble's on hopper, elsewhere vLLM's choice, and after trials on this machine the"
        " faster one for each NVFP4 shape and for the FP8 layers together (docs/selftest.md).",
        "NIBBLE_LINEAR_KERNEL",
        flag="--linear-kernel",
        expected="auto, vllm or nibble",
    )
    trials: Literal["auto", "always", "off"] = option(
        "auto",
        "Engine",
        "Whether a start on a GPU tries the kernels of linear layers and experts first, 15 s at"
        " most, where no result is known for the GPU, driver and build: `auto` (except on H100 and"
        " H200), `always` or `off`"
        " (docs/selftest.md).",
        "NIBBLE_TRIALS",
        flag="--trials",
        expected="auto, always or off",
    )
    moe_kernel: Literal["auto", contract.Kernel] = option(
        "auto",
        "Engine",
        "Kernel for experts on a GPU: `vllm` (vLLM's choice), `nibble` (NVFP4 and E4M3 experts,"
        " with FP4 activations on SM12x) or `auto`: for NVFP4 experts nibble's on hopper, else the"
        " faster one after trials on this machine (docs/selftest.md).",
        "NIBBLE_MOE_KERNEL",
        flag="--moe-kernel",
        expected="auto, vllm or nibble",
    )
    attention_kernel: Literal["auto", contract.AttentionKernel] = option(
        "auto",
        "Engine",
        "Attention of decode steps on a GPU: `vllm` (vLLM's choice), `nibble` (nibble's kernel, and"
        " FlashAttention for prompts), `few` (nibble's for steps of one request) or `auto`:"
        " `nibble` on hopper if the model allows it (docs/kernels/decode_attention.md).",
        "NIBBLE_ATTENTION",
        flag="--attention-kernel",
        expected="auto, vllm, nibble or few",
    )
    attention_front: Literal["auto", contract.Switch] = option(
        "auto",
        "Engine",
        "Norms of queries and keys, RoPE and cache writes on a GPU: `on` computes them in one"
        " launch of nibble's where it knows the model, `off` leaves them to vLLM, `auto` is `on` on"
        " hopper (docs/kernels/attention_front.md).",
        "NIBBLE_ATTENTION_FRONT",
        flag="--attention-front",
        expected="auto, on or off",
    )
    linear_attention: Literal["auto", contract.Switch] = option(
        "auto",
        "Engine",
        "Linear attention (gated delta rule, as in Qwen3-Next and Qwen3.5) on a GPU: `on` computes"
        " decode steps in one launch of nibble's and short prompts in four, `off` leaves them to"
        " vLLM, `auto` is `on` on hopper (docs/kernels/linear_attention.md).",
        "NIBBLE_LINEAR_ATTENTION",
        flag="--linear-attention",
        expected="auto, on or off",
    )
    shared_expert: Literal["auto", contract.Switch] = option(
        "auto",
        "Engine",
        "A shared expert beside nibble's routed experts on hopper: `on` computes it in their"
        " launch, as one more expert of each token, `off` leaves it to vLLM, `auto` is `on` there"
        " (docs/kernels/nvfp4_linear.md).",
        "NIBBLE_SHARED_EXPERT",
        flag="--shared-expert",
        expected="auto, on or off",
    )
    sparse_fp4: contract.Switch = option(
        "off",
        "Engine",
        "2:4 sparse NVFP4 weights: `on` packs each weight of nibble's linear kernel that is exactly"
        " 2:4 sparse into 7/9 of its bytes, `off` reads all as dense (docs/kernels/blackwell.md).",
        "NIBBLE_SPARSE_FP4",
        flag="--sparse-fp4",
        expected="on or off",
    )
    act_scale_mode: contract.ScaleMode = option(
        "token",
        "Engine",
        "Group that shares one activation scale in CloverLM: each `token`, the whole `batch`"
        " (its authors' choice), or `batch-pow2` (the batch's scale as a power of two).",
        "NIBBLE_ACT_SCALE_MODE",
        flag="--act-scale-mode",
        expected="token, batch-pow2 or batch",
    )
    compact_json: Literal["auto", contract.Switch] = option(
        "auto",
        "Engine",
        "JSON of structured outputs and tool calls without blanks between values: `on`, `off`"
        " (vLLM's choice) or `auto`, which is `on` where the recipe says so.",
        "NIBBLE_COMPACT_JSON",
        flag="--compact-json",
        expected="auto, on or off",
    )
    step_graph: Literal["auto", contract.Switch] = option(
        "auto",
        "Engine",
        "Steps on a GPU: `on` runs whole decode steps, and the model for short prompts, from CUDA"
        " graphs where the batch allows it (docs/step_graph.md), `off` always takes vLLM's path,"
        " `auto` is `on` where it is tested.",
        "NIBBLE_STEP_GRAPH",
        flag="--step-graph",
        expected="auto, on or off",
    )
    kernel_assertion: Literal["strict", "warn"] = option(
        "strict",
        "Engine",
        "Action if the kernels that run differ from the plan: `strict` ends the start (exit 8),"
        " `warn` continues.",
        "NIBBLE_KERNEL_ASSERTION",
        flag="--kernel-assertion",
        expected="strict or warn",
    )
    canary: Literal["strict", "warn", "off"] = option(
        "strict",
        "Engine",
        "Action if layers or answers are wrong: `strict` ends the start (exit 8), `warn`"
        " continues; `off` skips the check.",
        "NIBBLE_CANARY",
        flag="--canary",
        expected="strict, warn or off",
    )
    reference: Literal["auto", "always", "off"] = option(
        "auto",
        "Engine",
        "Canary answers computed from the checkpoint: `auto` computes them at the first start"
        " if that takes under 60 s, `always` at any cost, `off` uses none.",
        "NIBBLE_REFERENCE",
        flag="--reference",
        expected="auto, always or off",
    )
    debug: bool = option(
        False,
        "Engine",
        "Debug mode with eager execution, no CUDA graphs and verbose logs: 1 or 0.",
        "NIBBLE_DEBUG",
        flag="--debug",
        expected="1 or 0",
    )
    cute_wo_split: int = option(
        1,
        "Engine",
        "K-split of the CuTe output projection; 1 is the only supported value.",
        "CUTE_WO_SPLIT",
        expected="1, 2, 4 or 8",
        ge=1,
        le=8,
    )
    vllm_extra_args: str = option(
        "",
        "Engine",
        "Additional flags for `vllm serve`, split as a shell splits them.",
        "VLLM_EXTRA_ARGS",
    )

    @field_validator("max_model_len", mode="before")
    @classmethod
    def _human_readable_tokens(cls, value: Any) -> Any:
        tokens = token_count(value)
        return value if tokens is None else tokens

    @field_validator("tq", mode="before")
    @classmethod
    def _turboquant_preset(cls, value: Any) -> Any:
        text = str(value).strip().lower() if value is not None else ""
        if text in ("", "0", "false", "off"):
            return None
        if text in ("1", "true", "on"):
            return TURBOQUANT_DEFAULT
        return text if text.startswith("turboquant_") else f"turboquant_{text}"

    @field_validator("cute_wo_split")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value not in (1, 2, 4, 8):
            raise ValueError("not 1, 2, 4 or 8")
        return value

"""Bytes, parameters and bytes read per decode step, from tensor names, types and shapes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nibble.checkpoint.headers import TensorInfo

KINDS = (
    "attention", "linear_attention", "mlp", "moe_experts", "shared_experts", "router", "embedding",
    "lm_head", "norm", "vision", "draft", "scales", "other",
)  # fmt: skip

# Ends of names that hold scales, zero points and global factors of a quantized weight, in any
# dtype.
SCALE = re.compile(
    r"(_scale(_2|_inv)?|_scales|scale_inv|\.scales|qzeros|g_idx|zero_point|_global_scale|input_scale|absmax"
    r"|quant_map|weight_shape|k_scale|v_scale|q_scale|SCB)$"
)
# What a packed format adds to the name of a weight.
PACKING = re.compile(r"(?:_packed|_blocks)$|(?<=\.)q(?=weight$)")
# Weights vLLM divides along their input (its RowParallelLinear), by the names checkpoints give
# them.
SPLIT_ALONG_INPUT = re.compile(
    r"\.(o_proj|down_proj|out_proj|wo|w2|c_proj|dense|dense_4h_to_h|fc2)\.weight(_packed)?$"
)
# First match wins: a vision tower has attention too, a draft head has experts too.
PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "vision",
            r"(^|\.)(visual|vision_\w+|vision|vit_\w+|audio_\w+|multi_modal_projector|mm_projector|image_newline|embed_vision"
            r"|embed_audio|patch_merger|sound_\w+|mlp1)(\.|$)",
        ),
        ("draft", r"(^|\.)(mtp|mtp_\w+|nextn|eagle\w*|draft\w*)(\.|$)"),
        (
            "lm_head",
            r"(^|\.)(lm_head|output_head|embed_out)\.|^output\.weight|^transformer\.linear\.",
        ),
        (
            "embedding",
            r"(^|\.)(embed_tokens\w*|wte|tok_embeddings|word_embeddings|embeddings?|emb)\.|(^|\.)embed_tokens_per_layer",
        ),
        (
            "router",
            r"\.(gate|router|wg|e_score_correction_bias|expert_bias)(\.|$)|shared_expert_gate",
        ),
        ("shared_experts", r"\.shared?_experts?\.|\.shared_mlp\."),
        ("moe_experts", r"\.experts?\.|\.experts_|\.(block_sparse_)?moe\.|switch_mlp"),
        ("norm", r"norm\w*(\.|$)|\.ln_\w+\."),
        (
            "linear_attention",
            r"\.(linear_attn|mamba|mamba2|ssm|delta_net|short_conv|conv)\.|\.mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_)",
        ),
        (
            "attention",
            r"\.(self_attn|attn|attention|self_attention|mhsa|cross_attn|mixer\.[qkvo]_proj)\b|\.(wq|wk|wv|wo)\.",
        ),
        ("mlp", r"\.(mlp|feed_forward|ffn|mixer)\."),
    )
)


@dataclass(frozen=True)
class Weights:
    """What the tensors of a checkpoint add up to.

    Bytes are of the files and so of the memory before vLLM repacks them. `parameters` counts packed
    weights one by one and leaves scales out. `active_parameters` are those a token of the language
    model uses; vision and draft are in neither. `decode_bytes_per_step` is what one decode step of
    one sequence reads: active weights with their scales and the whole output head, of the embedding
    one row only (None: expert count unknown). `split_inputs` are the input features (K) of those
    packed 4-bit weights that tensor parallelism divides along K, experts left out.
    """

    total_bytes: int
    bytes_by_kind: Mapping[str, int]
    scale_bytes: int
    parameters: int
    active_parameters: int | None
    decode_bytes_per_step: int | None
    draft_bytes: int
    vision_bytes: int
    split_inputs: tuple[int, ...] = ()

    def bytes_per_gpu(self, tensor_parallel_size: int) -> int:
        """Bytes on one of `tensor_parallel_size` GPUs: norms and routers are on each, the rest
        is divided.
        """
        replicated = self.bytes_by_kind.get("norm", 0) + self.bytes_by_kind.get("router", 0)
        return replicated + -(-(self.total_bytes - replicated) // tensor_parallel_size)


def measure(
    tensors: Mapping[str, TensorInfo],
    *,
    num_layers: int | None,
    num_experts: int | None,
    experts_per_token: int | None,
) -> Weights:
    """Add up `tensors`. Layers from `num_layers` on are draft (MTP) layers, as DeepSeek and GLM
    store them.
    """
    size: defaultdict[str, int] = defaultdict(int)
    scales: defaultdict[str, int] = defaultdict(int)
    count: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors.values():
        kind, is_scale = _classify(tensor.name, num_layers)
        size[kind] += tensor.nbytes
        if is_scale:
            scales[kind] += tensor.nbytes
            continue
        count[kind] += unpacked_elements(tensor, tensors)
    by_kind = {kind: size[kind] - scales[kind] for kind in KINDS if size[kind]}
    by_kind["scales"] = sum(scales.values())
    factor = _active_share(size["moe_experts"], num_experts, experts_per_token)
    return Weights(
        total_bytes=sum(size.values()),
        bytes_by_kind={kind: by_kind[kind] for kind in KINDS if by_kind.get(kind)},
        scale_bytes=by_kind["scales"],
        parameters=sum(count.values()),
        active_parameters=_active(count, factor),
        decode_bytes_per_step=_active(size, factor),
        draft_bytes=size["draft"],
        vision_bytes=size["vision"],
        split_inputs=_split_inputs(tensors, num_layers),
    )


def _split_inputs(tensors: Mapping[str, TensorInfo], num_layers: int | None) -> tuple[int, ...]:
    return tuple(
        sorted(
            {
                2 * tensor.shape[-1]
                for tensor in tensors.values()
                if tensor.dtype == "U8"
                and tensor.shape
                and SPLIT_ALONG_INPUT.search(tensor.name)
                and is_packed(tensor, tensors)
                and _classify(tensor.name, num_layers)[0] != "moe_experts"
            }
        )
    )


def _active_share(
    expert_bytes: int, num_experts: int | None, experts_per_token: int | None
) -> float | None:
    if not expert_bytes:
        return 1.0
    return experts_per_token / num_experts if num_experts and experts_per_token else None


def _active(amount: Mapping[str, int], expert_share: float | None) -> int | None:
    """Bytes or parameters that one token of the language model uses.

    Without a separate output head a token reads the whole embedding (tied); otherwise it reads one
    row, which counts as 0.
    """
    if expert_share is None:
        return None
    idle = {"vision", "draft", "embedding", "moe_experts"}
    active = sum(value for kind, value in amount.items() if kind not in idle)
    head = 0 if amount.get("lm_head") else amount.get("embedding", 0)
    return active + head + round(amount.get("moe_experts", 0) * expert_share)


LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
INDEX = re.compile(r"\.\d+(?=\.)")


def kind_of(name: str, num_layers: int | None = None) -> str:
    """The part of the model that the tensor `name` belongs to."""
    return _classify(name, num_layers)[0]


def is_scale(name: str) -> bool:
    """Whether the tensor `name` holds scales, zero points or factors of a quantized weight."""
    return _classify(name, None)[1]


def _classify(name: str, num_layers: int | None) -> tuple[str, bool]:
    """(kind, whether it holds scales) of the tensor `name`."""
    kind, is_scale = _classify_skeleton(INDEX.sub(".0", name))
    if num_layers and kind != "vision":
        layer = LAYER.search(name)
        if layer and int(layer[1]) >= num_layers:
            return "draft", is_scale
    return kind, is_scale


@lru_cache(maxsize=4096)
def _classify_skeleton(name: str) -> tuple[str, bool]:
    """`_classify` without layer and expert numbers: 190,000 tensors have some dozens of such
    names.
    """
    kind = next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")
    return kind, bool(SCALE.search(name))


def unpacked_elements(tensor: TensorInfo, tensors: Mapping[str, TensorInfo]) -> int:
    """Weights in `tensor`: two per U8 of a 4-bit format, eight per I32 of a GPTQ or AWQ 4-bit
    one.
    """
    if tensor.dtype == "U8" and is_packed(tensor, tensors):
        return 2 * tensor.elements
    if tensor.dtype == "I32" and tensor.name.endswith(("qweight", "weight_packed")):
        return tensor.elements * 32 // _integer_bits(tensor, tensors)
    return tensor.elements


def is_packed(tensor: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a U8 tensor holds two 4-bit weights a byte: it is named so or a block scale stands
    beside it.
    """
    if tensor.name.endswith(("weight_packed", "_blocks")):
        return True
    ends = (
        "_scale", "_scales", "_weight_scale", ".quant_state.bitsandbytes__nf4",
        ".quant_state.bitsandbytes__fp4",
    )  # fmt: skip
    return any(tensor.name + end in tensors for end in ends)


def _integer_bits(tensor: TensorInfo, tensors: Mapping[str, TensorInfo]) -> int:
    """4 or 8 by the rows of the scales beside it: input features are elements along the packed
    axis times 32/bits.
    """
    shape = tensors.get(tensor.name.replace("weight_packed", "weight_shape"))
    zeros = tensors.get(tensor.name.replace("qweight", "qzeros"))
    scales = tensors.get(tensor.name.replace("qweight", "scales"))
    if shape is None and zeros is not None and scales is not None and zeros.shape[-1]:
        return 32 * zeros.shape[-1] // scales.shape[-1] or 4
    return 4


def expert_counts(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(experts, experts a token uses) of a text config; (None, None) for a dense model."""
    experts = _first(
        config,
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_moe_experts",
    )
    chosen = _first(
        config,
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_top_k",
        "moe_topk",
        "experts_per_token",
        "num_selected_experts",
        "moe_k",
    )
    nested = config.get("moe")
    if experts is None and isinstance(nested, Mapping):  # params.json of Mistral
        return _first(nested, "num_experts"), _first(nested, "num_experts_per_tok")
    return (experts, chosen) if experts and experts > 1 else (None, None)


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    values = [config[key] for key in keys if config.get(key) is not None]
    found = values[0] if values else None
    if isinstance(
        found, (list, tuple)
    ):  # one number a layer in some configs: all the same where it matters
        found = max(found) if found else None
    return int(found) if isinstance(found, (int, float)) else None

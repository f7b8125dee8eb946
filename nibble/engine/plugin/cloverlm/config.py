"""The configuration of CloverLM: config.json of the authors' converter, and keys that it omits."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from nibble.engine.contract import CLOVERLM_MODEL_TYPE

# The default of torch.nn.RMSNorm for float32 and, since torch 2.7, for narrower dtypes.
EPS = 2.0**-23


class CloverLMConfig(PreTrainedConfig):
    """The keys of the published file, and three more:

    rope_base           of the interleaved rotary embedding
    rms_norm_eps        of the norm after each sublayer and of the last norm
    residual_dtype      "float32" keeps the residual stream in float32, as training did; None: the
                        model's dtype
    """

    model_type = CLOVERLM_MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 32000,
        num_hidden_layers: int = 29,
        num_attention_heads: int = 28,
        num_key_value_heads: int = 7,
        head_dim: int = 128,
        hidden_size: int = 3584,
        intermediate_size: int = 14336,
        max_position_embeddings: int = 1024,
        rope_base: float = 1024.0,
        rms_norm_eps: float = EPS,
        residual_dtype: str | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.rope_base = rope_base
        self.rms_norm_eps = rms_norm_eps
        self.residual_dtype = residual_dtype
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)

"""Classes of vLLM 0.32 whose forward is: norm, attention, norm, MLP, each added to the residual.

CAUSAL_MODELS: theirs is that of their MODELS, and the head's product follows.
"""

from __future__ import annotations

from vllm.model_executor.models import llama, mistral, qwen2, qwen3

CAUSAL_MODELS = (
    llama.LlamaForCausalLM,
    mistral.MistralForCausalLM,
    qwen2.Qwen2ForCausalLM,
    qwen3.Qwen3ForCausalLM,
)
MODELS = (llama.LlamaModel, mistral.MistralModel, qwen2.Qwen2Model, qwen3.Qwen3Model)
LAYERS = (
    llama.LlamaDecoderLayer,
    mistral.MistralDecoderLayer,
    qwen2.Qwen2DecoderLayer,
    qwen3.Qwen3DecoderLayer,
)

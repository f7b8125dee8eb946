"""CloverLM (IST-DASLab) for vLLM 0.32: registers the model, its configuration and its tokenizer."""

from __future__ import annotations

from nibble.engine.contract import CLOVERLM_ARCHITECTURE, CLOVERLM_MODEL_TYPE, TOKENMONSTER
from nibble.engine.plugin.require import required

PACKAGE = "nibble.engine.plugin.cloverlm"


def register_cloverlm() -> None:
    """Register the model, its config.json and --tokenizer-mode tokenmonster with vLLM.

    vLLM imports model and tokenizer when it needs them. Raises VllmMismatch.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.transformers_utils import config as vllm_config

    model = f"{PACKAGE}.model:{CLOVERLM_ARCHITECTURE}"
    register_model = required(ModelRegistry, "register_model", "model_arch", "model_cls")
    register_model(CLOVERLM_ARCHITECTURE, model)
    required(vllm_config, "_CONFIG_REGISTRY")[CLOVERLM_MODEL_TYPE] = _config_class()
    tokenizer = (f"{PACKAGE}.tokenizer", "TokenMonsterTokenizer")
    required(TokenizerRegistry, "tokenizers")[TOKENMONSTER] = tokenizer
    renderers = required(RENDERER_REGISTRY, "renderers")
    renderers[TOKENMONSTER] = renderers["hf"]


def _config_class() -> type:
    from nibble.engine.plugin.cloverlm.config import CloverLMConfig

    return CloverLMConfig

"""CloverLM (IST-DASLab) for vLLM 0.32: model, configuration, tokenizer mode. `register` names
them; nothing is imported here.
"""

from __future__ import annotations

PACKAGE = "nibble.engine.plugin.cloverlm"
ARCHITECTURE = "CloverLMForCausalLM"
MODEL_TYPE = "cloverlm"
TOKENIZER_MODE = "tokenmonster"


def register_cloverlm() -> None:
    """Make the model, its config.json and --tokenizer-mode tokenmonster known to vLLM; each is
    imported when it is asked for.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.transformers_utils import config as vllm_config

    ModelRegistry.register_model(ARCHITECTURE, f"{PACKAGE}.model:{ARCHITECTURE}")
    vllm_config._CONFIG_REGISTRY[MODEL_TYPE] = _config_class()
    TokenizerRegistry.tokenizers[TOKENIZER_MODE] = (f"{PACKAGE}.tokenizer", "TokenMonsterTokenizer")
    RENDERER_REGISTRY.renderers[TOKENIZER_MODE] = ("vllm.renderers.hf", "HfRenderer")


def _config_class() -> type:
    from nibble.engine.plugin.cloverlm.config import CloverLMConfig

    return CloverLMConfig

"""CloverLM (IST-DASLab) for vLLM 0.32: model, configuration, tokenizer mode. `register` names
them; nothing is imported here.
"""

from __future__ import annotations

from nibble.engine.contract import CLOVERLM_ARCHITECTURE, CLOVERLM_MODEL_TYPE, TOKENMONSTER

PACKAGE = "nibble.engine.plugin.cloverlm"


def register_cloverlm() -> None:
    """Make the model, its config.json and --tokenizer-mode tokenmonster known to vLLM; each is
    imported when it is asked for.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.transformers_utils import config as vllm_config

    model = f"{PACKAGE}.model:{CLOVERLM_ARCHITECTURE}"
    ModelRegistry.register_model(CLOVERLM_ARCHITECTURE, model)
    vllm_config._CONFIG_REGISTRY[CLOVERLM_MODEL_TYPE] = _config_class()
    TokenizerRegistry.tokenizers[TOKENMONSTER] = (f"{PACKAGE}.tokenizer", "TokenMonsterTokenizer")
    RENDERER_REGISTRY.renderers[TOKENMONSTER] = ("vllm.renderers.hf", "HfRenderer")


def _config_class() -> type:
    from nibble.engine.plugin.cloverlm.config import CloverLMConfig

    return CloverLMConfig

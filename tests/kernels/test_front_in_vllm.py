"""nibble's kernel before attention in a real vLLM on its CPU platform, where FlashAttention's layers
and the kernel's operator are plain torch code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.test_cpu_decoder_in_vllm import as_llama, as_qwen2
from tests.support.changes import OPERATORS
from tests.support.in_vllm.front_in_vllm import TOKENS
from tests.support.models.generated_nvfp4 import Shape, write_checkpoint
from tests.support.paths import IN_VLLM, python_path
from tests.support.servers.serving import clean_environ
from tests.support.vllm_plugins import paged_on_the_cpu
from tests.support.vllm_plugins.install import install

pytestmark = [pytest.mark.vllm, pytest.mark.when_changed(*OPERATORS)]
SHAPE = Shape(head_dim=64)

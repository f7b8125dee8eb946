"""An engine of no cost for vLLM 0.32: `--worker-cls free_engine.FreeWorker` with this folder on
PYTHONPATH.

The worker loads no weights, and a step takes FREE_ENGINE_STEP_MS milliseconds (0: none) in which it
sleeps, so what a server then takes is its API server, and vLLM's scheduler in another process. Only
`benchmarks/api_server.py` uses it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

KV_BYTES = 1 << 30
# SmolLM2's ids of " the" and other short words: text that is detokenized as ordinary text is.
FIRST_WORD, WORDS = 260, 200


class FreeWorker(WorkerBase):
    """Every request that has read its prompt gets the next of WORDS tokens in each step."""

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self._prompt_tokens: dict[str, int] = {}
        self._step = 0
        self._step_s = float(os.environ.get("FREE_ENGINE_STEP_MS", "0")) / 1e3
        self._next_s = 0.0
        self._last: ModelRunnerOutput | None = None

    def load_model(self, **_: Any) -> None:
        """Nothing."""

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def supports_draft_weight_updates(self) -> bool:
        return False

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        """Nothing."""

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        return {
            "layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.int8)
        }

    def determine_available_memory(self) -> int:
        return KV_BYTES

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """Nothing."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        if not scheduler_output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        for ended in scheduler_output.finished_req_ids:
            self._prompt_tokens.pop(ended, None)
        scheduled = scheduler_output.num_scheduled_tokens
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._prompt_tokens[new.req_id] = len(new.prompt_token_ids or ())
            computed[new.req_id] = new.num_computed_tokens
        running = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        self._step += 1
        token = [FIRST_WORD + self._step % WORDS]
        requests = list(scheduled)
        self._last = ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: index for index, request in enumerate(requests)},
            sampled_token_ids=[
                token if computed[one] + scheduled[one] >= self._prompt_tokens[one] else []
                for one in requests
            ],
        )
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._step_s
        return self._last

    def take_draft_token_ids(self) -> None:
        return None

    def execute_dummy_batch(self) -> None:
        """Nothing."""

    def reset_mm_cache(self) -> None:
        """Nothing."""

    def check_health(self) -> None:
        """It is healthy as long as it runs."""

    def shutdown(self) -> None:
        """Nothing."""

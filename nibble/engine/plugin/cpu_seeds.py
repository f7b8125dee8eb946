"""Requests with `seed` on vLLM's CPU platform, where one with a prompt in pieces ends vLLM 0.32.

vLLM samples after each piece of a prompt and drops the token of all but the last. It then sets the
request's generator back by four (v1/worker/gpu_model_runner.py:3502), which torch has for CUDA
alone: "CPU Generator does not use offset" ends the worker, and with it every request. Here the
state from before the sampling comes back, so an answer does not depend on the pieces.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from nibble.engine.plugin.require import replace, required, required_of_instances


def keep_generators() -> None:
    """Replace two methods of the model runner, on the CPU platform only. Raises VllmMismatch."""
    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    required_of_instances(GPUModelRunner, "input_batch", "discard_request_mask")
    required_of_instances(InputBatch, "generators", "num_reqs")
    sample = required(GPUModelRunner, "_sample", "self", "logits", "spec_decode_metadata")
    bookkeep = required(GPUModelRunner, "_bookkeeping_sync")

    def sample_and_set_back(self: Any, *rest: Any, **more: Any) -> Any:
        states = {number: made.get_state() for number, made in _dropped(self).items()}
        found = sample(self, *rest, **more)
        for number, state in states.items():
            self.input_batch.generators[number].set_state(state)
        return found

    def bookkeep_without_offsets(self: Any, *rest: Any, **more: Any) -> Any:
        dropped = _dropped(self)
        for number in dropped:
            del self.input_batch.generators[number]
        try:
            return bookkeep(self, *rest, **more)
        finally:
            self.input_batch.generators.update(dropped)

    replace(GPUModelRunner, "_sample", sample_and_set_back)
    replace(GPUModelRunner, "_bookkeeping_sync", bookkeep_without_offsets)


def _dropped(runner: Any) -> dict[int, Any]:
    """The generators of requests whose token of this step is dropped, by their row."""
    batch = runner.input_batch
    mask = runner.discard_request_mask.np
    return {
        number: made
        for number, made in batch.generators.items()
        if number < batch.num_reqs and mask[number]
    }

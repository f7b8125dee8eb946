"""Decode steps on the CPU that are one operator, without what vLLM prepares for other kernels.

A step in which every sequence has one token needs each one's token, position, slot, blocks and
length. vLLM 0.32 also makes inputs of kernels that do not run then (gpu_model_runner.py's
_prepare_inputs and _build_attention_metadata), in Python and once a step. It still updates its
requests before such a step and samples after it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.ec_transfer import has_ec_transfer
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
from vllm.v1.worker.gpu_input_batch import InputBatch

from nibble.engine.plugin.cpu_decoder import OperatorForward, operators_of
from nibble.engine.plugin.cpu_leading import leading_logits
from nibble.engine.plugin.plain_decoders import CAUSAL_MODELS
from nibble.engine.plugin.require import replace, required, required_of_instances

# A runner with one of these prepares more than a step of one operator takes.
_OTHER_FEATURES = (
    "speculative_config",
    "lora_config",
    "is_pooling_model",
    "uses_mrope",
    "enable_prompt_embeds",
    "supports_mm_inputs",
    "use_async_scheduling",
    "use_aux_hidden_state_outputs",
    "broadcast_pp_output",
    "eplb_state",
    "num_prompt_logprobs",
    "execute_model_state",
)


def shorten_steps() -> None:
    """Replace the CPU runner's execute_model. Raises VllmMismatch."""
    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    name = "execute_model"
    execute = required(CPUModelRunner, name, "self", "scheduler_output", "intermediate_tensors")
    required(CPUModelRunner, "_update_states", "self", "scheduler_output")
    required_of_instances(CPUModelRunner, *_OTHER_FEATURES, "discard_request_mask", "requests")
    required_of_instances(CPUModelRunner, "kv_cache_config", "kv_connector_output", "input_batch")
    required_of_instances(SchedulerOutput, "num_scheduled_tokens", "total_num_scheduled_tokens")
    required_of_instances(SchedulerOutput, "scheduled_new_reqs")
    required_of_instances(InputBatch, "num_computed_tokens_cpu", "token_ids_cpu", "block_table")
    required_of_instances(MultiGroupBlockTable, "block_tables")
    required_of_instances(BlockTable, "block_table", "block_size")

    @functools.wraps(execute)
    @torch.inference_mode()
    def execute_or_shorten(
        self: Any, scheduler_output: Any, intermediate_tensors: Any = None
    ) -> Any:
        if intermediate_tensors is None and _has_one_token_each(scheduler_output):
            operators = _operators_of(self)
            if operators is not None:
                return _execute(self, operators, scheduler_output)
        return execute(self, scheduler_output, intermediate_tensors)

    replace(CPUModelRunner, name, execute_or_shorten)


def _has_one_token_each(scheduled: Any) -> bool:
    """Whether every request has one token. A new one may want the log-probs of its prompt."""
    tokens = scheduled.total_num_scheduled_tokens
    return 0 < tokens == len(scheduled.num_scheduled_tokens) and not scheduled.scheduled_new_reqs


def _operators_of(runner: Any) -> OperatorForward | None:
    """The operators of the runner's model, if a step of theirs is all that it needs."""
    model = runner.model
    if type(model) not in CAUSAL_MODELS or any(getattr(runner, name) for name in _OTHER_FEATURES):
        return None
    operators = operators_of(model)
    parallel = runner.parallel_config
    if (
        operators is None
        or not operators.has_steps()
        or parallel.world_size * parallel.data_parallel_size != 1
        or len(runner.kv_cache_config.kv_cache_groups) != 1
        or has_kv_transfer_group()
        or has_ec_transfer()
        or any((each._forward_hooks or each._forward_pre_hooks) for each in (model, model.model))
    ):
        return None
    return operators


def _execute(runner: Any, operators: OperatorForward, scheduled: Any) -> None:
    """As GPUModelRunner.execute_model: the logits are left for sample_tokens."""
    runner._update_states(scheduled)
    batch = runner.input_batch
    count = batch.num_reqs
    hidden = operators.step(*_inputs(batch, count))
    # What is sampled after a piece of a prompt that is not its last is dropped.
    lengths = np.array([runner.requests[each].num_tokens for each in batch.req_ids], np.int32)
    runner.discard_request_mask.np[:count] = batch.num_computed_tokens_cpu[:count] + 1 < lengths
    with leading_logits(runner.model, batch, scheduled):
        logits = runner.model.compute_logits(hidden)
    runner.execute_model_state = gpu_model_runner.ExecuteModelState(
        scheduled, logits, None, None, hidden, hidden, None, None, None, None
    )
    runner.kv_connector_output = None


def _inputs(batch: Any, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of each sequence: its token int64, position int64, slot int64, blocks int32 [blocks], and
    length int32.
    """
    rows = np.arange(count)
    positions = batch.num_computed_tokens_cpu[:count].astype(np.int64)
    table = batch.block_table.block_tables[0]
    blocks = table.block_table.np[:count]
    size = table.block_size
    slots = blocks[rows, positions // size].astype(np.int64) * size + positions % size
    tokens = batch.token_ids_cpu[rows, positions].astype(np.int64)
    lengths = (positions + 1).astype(np.int32)
    given = (tokens, positions, slots, blocks, lengths)
    return tuple(map(torch.from_numpy, given))  # type: ignore[return-value]

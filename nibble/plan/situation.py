"""What a decider reads and what it returns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.plan.choice import Choice, Flags, tensor_parallel_size
from nibble.plan.inputs import PlanInputs
from nibble.plan.memory import MemoryPlan
from nibble.plan.nvfp4_options import with_served_activations
from nibble.plan.part_kernels import PartKernels
from nibble.plan.topology import Topology, find_topology
from nibble.recipes.rules import Rule


@dataclass(frozen=True)
class Situation:
    """The inputs of the plan, and everything decided so far."""

    inputs: PlanInputs
    flags: Flags = field(default_factory=Flags)
    rules: tuple[Rule, ...] = ()
    notices: tuple[str, ...] = ()
    linear_kernels: PartKernels = field(default_factory=PartKernels)
    expert_kernels: PartKernels = field(default_factory=PartKernels)
    e4m3_kernels: PartKernels = field(default_factory=PartKernels)
    draft_head: Choice | None = None
    step_graph: Choice | None = None
    attention: Choice | None = None
    attention_front: Choice | None = None
    linear_attention: Choice | None = None
    shared_expert: Choice | None = None
    memory: MemoryPlan | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Flag -> value."""
        return self.flags.plain

    @cached_property
    def served(self) -> PlanInputs:
        """The inputs, with the activations that the server will use in the checkpoint's place."""
        checkpoint: Checkpoint | None = with_served_activations(self.inputs.checkpoint, self.values)
        return replace(self.inputs, checkpoint=checkpoint)

    @property
    def tensor_parallel(self) -> int:
        """The number of GPUs that each layer is split over."""
        return tensor_parallel_size(self.values)

    @cached_property
    def topology(self) -> Topology:
        """Where the ranks run. Raises USAGE and CONFIG; see `find_topology`."""
        on_gpus = self.inputs.target.device == "cuda"
        gpus_here = len(self.inputs.hardware.gpus) if on_gpus else None
        return find_topology(self.inputs.loaded.settings, self.values, gpus_here)

    def after(self, decision: Decision) -> Situation:
        """This situation with a decision added."""
        return replace(
            self,
            flags=self.flags.add(decision.flags),
            rules=(*self.rules, *decision.rules),
            notices=(*self.notices, *decision.notices),
            linear_kernels=decision.linear_kernels or self.linear_kernels,
            expert_kernels=decision.expert_kernels or self.expert_kernels,
            e4m3_kernels=decision.e4m3_kernels or self.e4m3_kernels,
            draft_head=decision.draft_head or self.draft_head,
            step_graph=decision.step_graph or self.step_graph,
            attention=decision.attention or self.attention,
            attention_front=decision.attention_front or self.attention_front,
            linear_attention=decision.linear_attention or self.linear_attention,
            shared_expert=decision.shared_expert or self.shared_expert,
            memory=decision.memory or self.memory,
        )


@dataclass(frozen=True)
class Decision:
    """What one decider adds. Each choice names its layer."""

    flags: Mapping[str, Choice] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    notices: tuple[str, ...] = ()
    linear_kernels: PartKernels | None = None
    expert_kernels: PartKernels | None = None
    e4m3_kernels: PartKernels | None = None
    draft_head: Choice | None = None
    step_graph: Choice | None = None
    attention: Choice | None = None
    attention_front: Choice | None = None
    linear_attention: Choice | None = None
    shared_expert: Choice | None = None
    memory: MemoryPlan | None = None


Decider = Callable[[Situation], Decision]

"""What a plan says of the kernels of linear layers, and of experts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nibble.plan.choice import Choice
from nibble.plan.inputs import PlanInputs
from nibble.trials.choose import LINEAR, Part, ShapeChoice, Use, is_proven, our_fault

DEFAULT_SEQUENCES = 256  # vLLM's, where nothing sets --max-num-seqs
UNTRIED = "a start here, or `nibble tune`, tries it on this machine"


@dataclass(frozen=True)
class PartKernels:
    """`choice`: `vllm` or `nibble` with the reason; None on the CPU and for a checkpoint without
    such layers. `shapes`: the choice for each shape, where trials on this machine count.
    `backend`: a --linear-backend in place of vLLM's choice, which was wrong here. `uses`: the
    shapes that a start tries first, with nibble's kernel (`tries_ours`), for time too (`is_timed`);
    empty for another machine. `part`: the trials of these layers.
    """

    choice: Choice | None = None
    shapes: tuple[ShapeChoice, ...] = ()
    backend: str = ""
    notices: tuple[str, ...] = ()
    uses: tuple[Use, ...] = ()
    tries_ours: bool = False
    is_timed: bool = False
    part: Part = LINEAR


def before_times(inputs: PlanInputs, choice: Choice, part: Part, ours: str) -> Choice | None:
    """The choice of layers that share one kernel where times do not decide: nibble's, named `ours`,
    has a fault, or vLLM's is chosen and nibble's is not yet proven here. None where times decide.
    """
    record = inputs.trials
    assert record is not None
    if fault := our_fault(record, part):
        return replace(choice, value="vllm", reason=f"{ours} is not used: {fault.line()}")
    if choice.value != "vllm" or is_proven(record, part):
        return None
    untried = inputs.loaded.settings.trials != "off"
    return replace(choice, reason=f"{choice.reason}; {UNTRIED}") if untried else choice

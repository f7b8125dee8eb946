"""Everything that a plan is made from, already read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target
from nibble.plan.choice import Choice
from nibble.plan.moe_tuning import TunedConfigs
from nibble.recipes.resolution import ResolvedRecipe
from nibble.recipes.rules import Rule
from nibble.settings.environment import Accepted
from nibble.settings.sources import Loaded
from nibble.trials.record import Record


@dataclass(frozen=True)
class LocalFiles:
    """Folders that were fetched from the Hub: the model's, and others by their Hub id."""

    model: Path | None = None
    others: Mapping[str, Path] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.model is not None or bool(self.others)


@dataclass(frozen=True)
class PlanInputs:
    """Everything that a plan is made from. `cli_flags` and `extra_flags` are vLLM flags as
    `engine/flags.py` reads them.
    """

    loaded: Loaded
    accepted: Accepted
    cli_flags: Mapping[str, Any]
    extra_flags: Mapping[str, Any]
    hardware: Hardware
    target: Target
    target_choice: Choice
    checkpoint: Checkpoint | None
    checkpoint_note: str
    recipe: ResolvedRecipe | None
    local: LocalFiles = field(default_factory=LocalFiles)
    is_demo: bool = False
    tuned_configs: TunedConfigs | None = None
    rules: tuple[Rule, ...] = ()
    # `compiled_id` of the installed packages (engine/installed.py); empty: another machine
    build: str = ""
    vllm: str = ""
    can_compile: bool | None = None  # this machine has FlashInfer's compiler; None: another machine
    without_cpp_compiler: bool = False  # on the CPU torch.compile needs one
    shm_free_bytes: int | None = None  # in /dev/shm; None: another machine, or no /dev/shm
    chat_template: str = ""  # of the model's folder; empty: none, or not on this disk
    without_plugin: str = ""  # why vLLM will not load nibble's plugin here; empty if unknown
    trials: Record | None = None  # results of kernels on this machine; None: another machine
    trial_notes: tuple[str, ...] = ()  # entries of them that were dropped
    without_gpu_kernels: str = ""  # why nibble's kernels cannot run here; empty if unknown

    @property
    def environ(self) -> dict[str, str]:
        """The environment that vLLM would get without the plan's choices. The user's variables win
        over the settings file's.
        """
        return {**self.loaded.file_env, **self.accepted.environ}

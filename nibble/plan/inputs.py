"""All that a plan is made of, already read. Pure."""

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
from nibble.recipes.recipe import ResolvedRecipe
from nibble.recipes.rules import Rule
from nibble.settings.environment import Accepted
from nibble.settings.sources import Loaded


@dataclass(frozen=True)
class LocalFiles:
    """Folders of what was fetched from the Hub: the model, and others by their Hub id."""

    model: Path | None = None
    others: Mapping[str, Path] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.model is not None or bool(self.others)


@dataclass(frozen=True)
class Ingredients:
    """All a plan is made of. `cli_flags` and `extra_flags` are vLLM flags in the form of
    `vllm_args`.
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
    # `compiled_id` of what is installed here (build_id.py); empty: a plan for another machine
    build: str = ""
    vllm: str = ""
    can_compile: bool | None = None  # whether FlashInfer's compiler is here; None: not this machine
    without_cpp_compiler: bool = False  # on the CPU, where torch.compile needs one
    shm_free_bytes: int | None = None  # in /dev/shm; None: not this machine, or there is none
    without_gpu_kernels: str = (
        ""  # why nibble's cannot run here; empty also where that is not known
    )

    @property
    def environ(self) -> dict[str, str]:
        """What vLLM finds in its environment, but for the plan's own choices: the settings
        file's below the user's.
        """
        return {**self.loaded.file_env, **self.accepted.environ}

"""The plan: every value that nibble uses, its source and its reason. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nibble.checkpoint import Checkpoint
from nibble.engine.flags import write_flag
from nibble.machine.hardware import Hardware
from nibble.machine.targets import Target
from nibble.plan.budget import Budget, DecodeBound, host_reserve_bytes
from nibble.plan.choice import Choice, Flags
from nibble.plan.compile_cache import CachePlan
from nibble.plan.environment import may_need_the_hub
from nibble.plan.memory import Limits, Step, limits
from nibble.plan.moe_tuning import Alias
from nibble.plan.part_kernels import PartKernels
from nibble.plan.topology import Topology
from nibble.recipes.resolution import ResolvedRecipe
from nibble.settings.options import Settings, options

GIB = 1 << 30

# vLLM's dependency model_hosting_container_standards loads code that these variables name, outside
# of nibble's gate.
WRAPPING_PREFIXES = (
    *("CUSTOM_FASTAPI_", "CUSTOM_PRE_PROCESS"),
    *("CUSTOM_POST_PROCESS", "CUSTOM_SCRIPT_FILENAME"),
)


@dataclass(frozen=True)
class Plan:
    """What `nibble serve` will do; `nibble plan` prints it."""

    model: str
    served_names: tuple[str, ...]
    target: Target
    hardware: Hardware
    checkpoint: Checkpoint | None
    checkpoint_note: str
    recipe: ResolvedRecipe | None
    settings: Settings
    choices: Mapping[str, Choice]
    args: Flags
    env: Flags
    rules: tuple[str, ...]
    notices: tuple[str, ...]
    budget: Budget
    ladder: tuple[Step, ...]
    bound: DecodeBound
    moe_alias: Alias | None
    topology: Topology
    caches: CachePlan
    linear_kernels: PartKernels = field(default_factory=PartKernels)
    expert_kernels: PartKernels = field(default_factory=PartKernels)
    e4m3_kernels: PartKernels = field(default_factory=PartKernels)

    @property
    def revision(self) -> str | None:
        """The commit, branch or tag to fetch, or None."""
        choice = self.args.get("--revision")
        return str(choice.value) if choice else None

    @property
    def memory_limits(self) -> Limits:
        """The limits of host memory at which the watchdog acts."""
        reserve_gib = self.settings.memory_reserve_gib
        reserve_bytes = None if reserve_gib is None else int(reserve_gib * GIB)
        total_bytes = self.hardware.memory_total_bytes
        return limits(host_reserve_bytes(self.target, total_bytes, reserve_bytes))

    def argv(self) -> list[str]:
        """The arguments of `vllm`, without any secret."""
        arguments = ["serve", self.model]
        on_disk = self.checkpoint is not None and self.checkpoint.path is not None
        for name, choice in self.args.items():
            # A folder has no revisions.
            if not (on_disk and name in ("--revision", "--code-revision")):
                arguments += write_flag(name, choice.value)
        return arguments

    def vllm_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of the vLLM process: the user's, without secrets and variables that only
        nibble reads, and the plan's own.
        """
        withheld = {"VLLM_EXTRA_ARGS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
        for option in options().values():
            if option.secret:
                withheld |= set(option.env) | {f"{name}_FILE" for name in option.env}
        kept = {
            name: value
            for name, value in environ.items()
            if name not in withheld and not name.startswith(WRAPPING_PREFIXES)
        }
        if may_need_the_hub(self.args) and self.settings.hf_token is not None:
            kept["HF_TOKEN"] = self.settings.hf_token.get_secret_value()
        return kept | {name: str(choice.value) for name, choice in self.env.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json and /status, without secrets."""
        return {
            "model": self.model,
            "served_names": list(self.served_names),
            "target": self.target.name,
            "recipe": _describe_recipe(self.recipe),
            "checkpoint": describe_checkpoint(self.checkpoint, self.checkpoint_note),
            "topology": self.topology.to_json(),
            "choices": {name: choice.to_json() for name, choice in self.choices.items()},
            "args": {name: choice.to_json() for name, choice in self.args.items()},
            "env": {name: choice.to_json() for name, choice in self.env.items()},
            "budget": self.budget.to_json(),
            "memory_limits": asdict(self.memory_limits),
            "to_need_less": [str(step) for step in self.ladder],
            "decode_bound": self.bound.to_json(),
            "linear_shapes": [shape.to_json() for shape in self.linear_kernels.shapes],
            "expert_shapes": [shape.to_json() for shape in self.expert_kernels.shapes],
            "e4m3_shapes": [shape.to_json() for shape in self.e4m3_kernels.shapes],
            "expected": dict(self.recipe.expected) if self.recipe else {},
            "rules": list(self.rules),
            "notices": list(self.notices),
            "cache_entries": [key.name for key in self.caches.keys],
            "command": ["vllm", *self.argv()],
        }  # fmt: skip


def _describe_recipe(recipe: ResolvedRecipe | None) -> dict[str, Any] | None:
    return recipe and {"id": recipe.id, "status": recipe.status, "evidence": recipe.evidence}


def describe_checkpoint(checkpoint: Checkpoint | None, note: str) -> dict[str, Any]:
    """The checkpoint as plain data, or the reason why it is unknown."""
    if checkpoint is None:
        return {"note": note}
    weights = checkpoint.weights
    return {
        "id": checkpoint.id,
        "revision": checkpoint.revision,
        "architecture": checkpoint.architecture,
        "scheme": checkpoint.scheme.name,
        "max_model_len": checkpoint.max_model_len,
        "weights_bytes": weights.total_bytes if weights else None,
        "weights_bytes_by_kind": dict(weights.bytes_by_kind) if weights else None,
        "parameters": weights.parameters if weights else None,
        "active_parameters": weights.active_parameters if weights else None,
        "decode_bytes_per_step": weights.decode_bytes_per_step if weights else None,
    }

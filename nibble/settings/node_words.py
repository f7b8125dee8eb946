"""Checks the command line of `ray-head` and `ray-worker`: options of a Ray node, no model. Pure."""

from __future__ import annotations

from nibble.errors import ExitCode, NibbleError
from nibble.settings.command_line import CommandLine
from nibble.settings.options import options

# Fields of Settings that a Ray node reads; the rest belong to `serve`.
NODE_FIELDS = (
    "head_ip", "worker_ip", "num_gpus", "cluster_interface", "ray_auth_token", "target",
    "memory_reserve_gib", "cache_dir", "config",
)  # fmt: skip
WHAT_THEY_DO = {
    "ray-head": (
        "Starts the head node of a Ray cluster in the foreground, and prints its address and the"
        " file of the token."
    ),
    "ray-worker": (
        "Joins the Ray cluster of HEAD_IP as a worker, in the foreground. It needs the head's"
        " token."
    ),
}


def check_node_words(command: CommandLine, verb: str) -> None:
    """Raise USAGE for a model, a flag of `vllm serve` or an option of `serve`: a Ray node ignores
    them.
    """
    flags = {name: option.flag for name, option in options().items()}
    others = [str(flags[name]) for name in command.values if name not in ("model", *NODE_FIELDS)]
    others += list(command.flags)
    if "model" in command.values:
        what = f"`{verb}` takes no model, but the command line has {command.values['model']!r}"
    elif others:
        what = f"`{verb}` does not take {others[0]}"
    else:
        return
    expected = f"the flags that `nibble {verb} --help` shows"
    raise NibbleError(
        ExitCode.USAGE, what=what, expected=expected, action="drop it, or give it to `nibble serve`"
    )

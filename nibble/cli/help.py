"""Help of the verbs that take nibble's options and vLLM's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nibble.hub.packaged import DEFAULT_MODEL
from nibble.machine.paths import demo_models
from nibble.settings.node_words import NODE_FIELDS, WHAT_THEY_DO
from nibble.settings.options import Settings, options

# What a verb has beside the options of all.
SWITCHES = {
    "serve": (
        "--detach starts the server in the background; --json prints the address of its status,"
        " and the"
        " plan."
    ),
    "plan": "--json prints everything.",
    "inspect": ("--deep reads every block scale of a folder; --json prints everything."),
    "pull": (
        "--dry-run prints what a pull would download and whether it fits; --json prints it as JSON."
    ),
    "tune": (
        "--shape ROWSxCOLUMNS takes the place of a model's shapes; --seconds is for each kernel"
        " (15); --json prints everything."
    ),
    "cluster manifest": (
        "--image, --shm, --cache, --rdma and --host-network are the pods' (docs/cluster.md)."
    ),
}


_SEVERAL = "[MODEL | [ALIAS=]MODEL [ALIAS=]MODEL ...]"
_MODELS: Mapping[str, str] = {
    "serve": _SEVERAL,
    "plan": _SEVERAL,
    "cluster manifest": "kuberay|lws [MODEL]",
}


def show_verb_help(verb: str) -> None:
    """Print the help of a verb that takes nibble's options and vLLM's flags, or of a Ray node,
    which takes some of nibble's.
    """
    console = Console(highlight=False)
    if verb in WHAT_THEY_DO:
        lines = [f"usage: nibble {verb} [FLAGS]", "", WHAT_THEY_DO[verb]]
        fields: Sequence[str] = NODE_FIELDS
    else:
        lines = [
            f"usage: nibble {verb} {_MODELS.get(verb, '[MODEL]')} [FLAGS]",
            "",
            f"MODEL is a Hugging Face id, a folder, {DEFAULT_MODEL}, or a demo:",
            f"{' or '.join(demo_models())}. Default of serve and plan: {DEFAULT_MODEL}.",
            (
                "FLAGS are those below and any flag of `vllm serve`. The command line wins over"
                " VLLM_EXTRA_ARGS, that over"
            ),
            (
                "other variables, these over the user's TOML file, the recipe, the target, and the"
                " defaults."
            ),
            *([SWITCHES[verb]] if verb in SWITCHES else []),
        ]
        fields = tuple(options())
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    for group in dict.fromkeys(options()[field].group for field in fields):
        console.print(_options_table(group, fields))


def _options_table(group: str, fields: Sequence[str]) -> Table:
    """The options of one group that are in `fields`."""
    table = Table(
        title=group,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, option in options().items():
        if option.group == group and name in fields:
            default = Settings.model_fields[name].default
            shown = f" [{default}]" if default not in (None, "", False) else ""
            table.add_row(option.flag or "", " ".join(option.env[:1]), escape(option.help + shown))
    return table

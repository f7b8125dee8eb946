"""Generated parts of the documentation, between markers, so that they cannot drift from the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from nibble.environment import DEAD_VARIABLES, OTHER_NIBBLE_NAMES
from nibble.errors import ExitCode
from nibble.paths import root
from nibble.recipes import list_recipes, load_recipe
from nibble.settings import Settings, options
from nibble.targets import TARGET_NAMES, load_target
from nibble.vllm_args import OWNED


def options_table() -> str:
    """Every option: environment, flag, default, meaning."""
    rows = ["| environment | flag | default | meaning |", "|---|---|---|---|"]
    for name, option in options().items():
        default = Settings.model_fields[name].default
        shown = (
            ""
            if default is None or default == ""
            else f"`{int(default) if isinstance(default, bool) else default}`"
        )
        names = ", ".join(
            f"`{variable}`" + (f", `{variable}_FILE`" if option.secret else "") for variable in option.env
        )
        rows.append(f"| {names} | {f'`{option.flag}`' if option.flag else ''} | {shown} | {option.help} |")
    return "\n".join(rows)


def other_names_table() -> str:
    """Variables with our prefix that are not options of the server."""
    rows = ["| environment | meaning |", "|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {meaning} |" for name, meaning in OTHER_NIBBLE_NAMES.items()])


def owned_table() -> str:
    """Flags nibble sets itself, and what to use instead."""
    rows = ["| flag of `vllm serve` | use |", "|---|---|"]
    return "\n".join(rows + [f"| `{flag}` | {use} |" for flag, use in OWNED.items()])


def dead_table() -> str:
    """Variables of old guides and what becomes of them; `1` stands for the value where the effect depends on it."""
    rows = ["| variable | what nibble does |", "|---|---|"]
    for name, successor in DEAD_VARIABLES.items():
        flags = successor.flags("1")
        shown = " ".join(f"{flag} {value}" for flag, value in flags.items()) if flags else ""
        effect = (
            f"refused: {successor.note}"
            if flags is None
            else (f"`{shown}`" if shown else f"ignored: {successor.note}")
        )
        rows.append(f"| `{name}` | {effect.replace(' 1`', ' VALUE`')} |")
    return "\n".join(rows)


def exit_codes_table() -> str:
    """Exit codes from the enum and the comment beside each."""
    source = Path(__file__).with_name("errors.py").read_text()
    rows = ["| code | meaning |", "|---|---|"]
    for code in ExitCode:
        match = re.search(rf"^    {code.name} = \d+  # (.+)$", source, re.MULTILINE)
        rows.append(f"| {int(code)} | {match[1] if match else ''} |")
    return "\n".join(rows)


def targets_table() -> str:
    """Targets with what they are built for."""
    rows = ["| target | hardware | built for | platforms |", "|---|---|---|---|"]
    for name in TARGET_NAMES:
        target = load_target(name)
        platforms = ", ".join(target.platforms)
        rows.append(
            f"| `{name}` | {target.title} | {target.torch_cuda_arch_list or 'x86-64, Arm'} | {platforms} |"
        )
    return "\n".join(rows)


def recipes_table() -> str:
    """Every recipe with its status on each target."""
    rows = ["| model | " + " | ".join(TARGET_NAMES[:4]) + " |", "|---|" + "---|" * 4]
    for model_id in list_recipes(root()):
        recipe = load_recipe(model_id, root())
        assert recipe is not None
        statuses = [
            recipe.targets[name].status if name in recipe.targets else "unknown" for name in TARGET_NAMES[:4]
        ]
        rows.append(f"| `{model_id}` | " + " | ".join(statuses) + " |")
    return "\n".join(rows)


GENERATED: Mapping[str, Callable[[], str]] = {
    "options": options_table,
    "other-names": other_names_table,
    "owned-flags": owned_table,
    "dead-variables": dead_table,
    "exit-codes": exit_codes_table,
    "targets": targets_table,
    "recipes": recipes_table,
}
_BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def update(check: bool) -> list[Path]:
    """Rewrite (or with `check` only compare) every generated block; the files that were stale."""
    stale: list[Path] = []
    for path in [root() / "README.md", *sorted((root() / "docs").rglob("*.md"))]:
        if not path.is_file():
            continue
        text = path.read_text()
        fresh = _BLOCK.sub(lambda match: f"{match[1]}{GENERATED[match[2]]()}\n{match[4]}", text)
        if fresh != text:
            stale.append(path)
            if not check:
                path.write_text(fresh)
    return stale

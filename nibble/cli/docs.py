"""Writes the generated parts of the documentation, so that they cannot drift from the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from nibble import errors
from nibble.cli.container_commands import BLOCKS, block
from nibble.engine.flags import OWNED
from nibble.engine.patching.probe import Row
from nibble.engine.patching.run import rows as probe_rows
from nibble.engine.patching.series import load_series
from nibble.engine.patching.status import row_order
from nibble.errors import ExitCode
from nibble.machine.paths import root
from nibble.machine.targets import TARGET_NAMES, load_target
from nibble.plan.cluster_ports import firewall_rows
from nibble.recipes.recipe import list_recipes, load_recipe
from nibble.recipes.rules import Condition, Rule, load_rules
from nibble.settings.environment import DEAD_VARIABLES, OTHER_NIBBLE_NAMES
from nibble.settings.options import Settings, options


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
            f"`{variable}`" + (f", `{variable}_FILE`" if option.secret else "")
            for variable in option.env
        )
        rows.append(
            f"| {names} | {f'`{option.flag}`' if option.flag else ''} | {shown} | {option.help} |"
        )
    return "\n".join(rows)


def other_names_table() -> str:
    """Variables with nibble's prefix that are not options of the server."""
    rows = ["| environment | meaning |", "|---|---|"]
    return "\n".join(
        rows + [f"| `{name}` | {meaning} |" for name, meaning in OTHER_NIBBLE_NAMES.items()]
    )


def owned_table() -> str:
    """Flags nibble sets itself, and what to use instead."""
    rows = ["| flag of `vllm serve` | use |", "|---|---|"]
    return "\n".join(rows + [f"| `{flag}` | {use} |" for flag, use in OWNED.items()])


def dead_table() -> str:
    """Variables of old guides and their replacements; `1` stands for the value where the effect
    depends on it.
    """
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


def ports_table() -> str:
    """Ports of a cluster, for a firewall."""
    rows = ["| port | listens | connects |", "|---|---|---|"]
    return "\n".join(
        rows + [f"| {port} | {server} | {clients} |" for port, server, clients in firewall_rows()]
    )


def exit_codes_table() -> str:
    """Exit codes from the enum and the comment beside each."""
    source = Path(errors.__file__).read_text()
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
            f"| `{name}` | {target.title} | {target.torch_cuda_arch_list or 'x86-64, Arm'} |"
            f" {platforms} |"
        )
    return "\n".join(rows)


def recipes_table() -> str:
    """Every recipe with its status on each target."""
    rows = ["| model | " + " | ".join(TARGET_NAMES) + " |", "|---|" + "---|" * len(TARGET_NAMES)]
    for model_id in list_recipes(root()):
        recipe = load_recipe(model_id, root())
        assert recipe is not None
        statuses = [
            recipe.targets[name].status if name in recipe.targets else "unknown"
            for name in TARGET_NAMES
        ]
        rows.append(f"| `{model_id}` | " + " | ".join(statuses) + " |")
    return "\n".join(rows)


def risks_table() -> str:
    """Every known risk: where it applies, what nibble does, the reason and the source."""
    rows = ["| id | where | what nibble does | why | source | row |", "|---|---|---|---|---|---|"]
    for rule in load_rules(root()):
        row = (
            f"`{rule.id}`",
            _where(rule.when),
            _what(rule),
            f"{rule.effect}: {rule.reason}",
            rule.reference,
            rule.row,
        )
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def _where(when: Condition) -> str:
    kinds = {"fp4": "W4A4", "bf16": "W4A16", "fp8": "with FP8 layers", "": ""}
    parts = [
        ", ".join(when.targets),
        "NVFP4" if when.nvfp4 else "",
        kinds[when.activations],
        ", ".join(when.quantization),
        "MoE" if when.moe else "",
        ", ".join(when.families),
    ]
    if when.k_multiple:
        parts.append(f"K of a rank not a multiple of {when.k_multiple}")
    return ", ".join(part for part in parts if part)


def _what(rule: Rule) -> str:
    effects = [f"`--{name} {value}`" for name, value in rule.force.items()]
    effects += [
        f"refuses `--{name} {value}`" for name, many in rule.forbid.items() for value in many
    ]
    effects += [
        f"a notice for `--{name} {value}`" for name, many in rule.warn.items() for value in many
    ]
    effects += [f"`{name}={value}`" for name, value in rule.env.items()]
    return ", ".join(effects)


def patch_list() -> str:
    """The series with the reason of each patch."""
    rows = ["| patch | what it does | touches | goes when |", "|---|---|---|---|"]
    for patch in load_series("vllm").patches:
        touched = ", ".join(f"`{path}`" for path in patch.paths)
        gone = " ".join(patch.headers["X-Remove-When"].split())
        rows.append(f"| `{patch.name}` | {patch.summary} | {touched} | {gone} |")
    return "\n".join(rows)


def probe_tables() -> str:
    """Both tables of the probes: other projects' patches, and defects of vLLM 0.32.0."""
    found = sorted(probe_rows().items(), key=lambda item: row_order(item[1].id))
    tables: list[str] = []
    for title, live in (("Defects that older projects patched", 0), ("Defects of vLLM 0.32.0", 1)):
        lines = [
            f"### {title}",
            "",
            "| id | defect or claim | verdict | what nibble does | probe |",
            "|---|---|---|---|---|",
        ]
        lines += [_probe_line(name, row) for name, row in found if row_order(row.id)[0] == live]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _probe_line(name: str, row: Row) -> str:
    pristine = ", ".join(f"{version} {state}" for version, state in row.expect.items())
    answer = f"{row.instead} ({row.fix.kind} `{row.fix.at}`)" if row.fix else row.instead
    sources = "; ".join(row.references)
    cells = (
        row.id,
        row.title,
        f"{row.verdict} {sources}",
        answer,
        f"`{name}`, {row.how}: {pristine}",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verb_list() -> str:
    """The verbs of `nibble` as a variable of entrypoint.sh."""
    from nibble.cli.app import verbs

    return f"verbs='{' '.join(verbs())}'"


GENERATED: Mapping[str, Callable[[], str]] = {
    "options": options_table,
    "other-names": other_names_table,
    "owned-flags": owned_table,
    "dead-variables": dead_table,
    "cluster-ports": ports_table,
    "exit-codes": exit_codes_table,
    "targets": targets_table,
    "recipes": recipes_table,
    "patch-list": patch_list,
    "patches": probe_tables,
    "risks": risks_table,
    "verbs": verb_list,
    **{name: partial(block, name) for name in BLOCKS},
}
# In Markdown, and as comments of a script.
_BLOCK = re.compile(
    r"((?:<!--|#) generated: ([a-z-]+)(?: -->)?\n)(.*?)((?:<!-- end -->|# end\n))", re.DOTALL
)


def pages() -> list[Path]:
    """Every file that may hold a generated block."""
    found = [root() / "README.md", root() / "docker" / "README.md", root() / "entrypoint.sh"]
    return [path for path in found if path.is_file()] + sorted((root() / "docs").rglob("*.md"))


def update(check: bool) -> list[Path]:
    """Rewrite (or with `check` only compare) every generated block; the files that were stale."""
    stale: list[Path] = []
    for path in pages():
        text = path.read_text()
        fresh = _BLOCK.sub(lambda match: f"{match[1]}{GENERATED[match[2]]()}\n{match[4]}", text)
        if fresh != text:
            stale.append(path)
            if not check:
                path.write_text(fresh)
    return stale

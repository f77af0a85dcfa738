"""The parts of the docs that are made from the code: ``make docs`` writes them, the suite compares them."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import compose

from diptych.data.formats import FURTHER, format_named
from diptych.recipes import RECIPES
from diptych.recipes.recipe import Recipe
from diptych.recipes.towers import TowerSettings
from diptych.registries import READERS, REGISTRIES
from diptych.settings import EncoderSettings, HostSettings, TrainingSettings, literal_choices
from diptych.tables import differences, papers, preset_help, presets, tables_of

_RECIPES: list[Recipe] = [RECIPES[name] for name in RECIPES.own]
ROOT = Path(__file__).parent.parent
HEAD = """# Recipes and their settings

This page is made from the code by `make docs`. Every setting is a flag of `train`; see
[training](training.md) for how to give them. A table lists what a recipe adds or changes against the one it builds on.
"""


TABLES_HEAD = """# Every table and figure of the papers

This page is made from the code by `make docs`. A command trains the rows of a table as they were published (`diptych
reproduce`), measures them under the table's protocol, and prints the published numbers beside the measured ones. With
`ablate` in place of `reproduce`, it runs the same rows under the protocol `plain`, on any data, with the defaults of
their recipes where a row names no preset of its own. Rows that are published only belong to methods that Diptych does
not have. [Training](training.md) explains the flags; the tables themselves are the files in `src/diptych/papers/`.

Each `--data NAME=PATH` is one data set. A table measures the columns whose data are given, and names those that are
missing. `-grid` and `-pictures` are other forms of the same images, which some rows read. `cub`, `sop`, `in-shop` and
`inaturalist` are the folders of those lists, `sts` is SentEval's folder.

Not listed are CODER's Figures 1 and 2 and Figure 1 of its supplement, drawings of the method without measurements.
"""

SHARED: dict[type[TrainingSettings], str] = {
    EncoderSettings: "Encoders by name",
    HostSettings: "Every recipe of two towers",
    TowerSettings: "Every recipe of two towers, and encoders by name",
}
"""Settings that several recipes share, and the heads of their tables."""


def rows(
    kind: type[TrainingSettings],
    over: type[TrainingSettings] | None,
    differs: Mapping[str, str] | None = None,
) -> list[str]:
    """A row per setting that ``over`` lacks, or that has another default or other words there, or that ``differs``."""
    why = {name: f" *Published*: {reason}." for name, reason in (differs or {}).items()}
    before = {f.name: _said(f) for f in dataclasses.fields(over)} if over is not None else {}
    hints = typing.get_type_hints(kind)
    return [
        f"| `--{f.name}` | {_shown(f.default, choices(f, hints[f.name]))} | "
        f"{f.metadata['help']}{'.' * (f.name in why)}{why.get(f.name, '')} |"
        for f in dataclasses.fields(kind)
        if before.get(f.name) != _said(f) or f.name in why
    ]


def choices(field: dataclasses.Field[Any], hint: Any) -> tuple[object, ...]:
    """What may be chosen: the names and forms of a registry, or the values of a ``Literal``."""
    registry = field.metadata["names"]
    return (*registry.own, *registry.forms) if registry else literal_choices(hint)


def names_table() -> str:
    """Every kind of thing that has names, in docs/extending.md."""
    lines = [
        f"| {registry.kind} | `{registry.group}` | {' · '.join(f'`{name}`' for name in registry.own)} |"
        for registry in REGISTRIES
    ]
    return "\n".join(["| kind | group of entry points | names of this package |", "|---|---|---|", *lines])


def formats_table() -> str:
    """Every format that is read, in docs/data.md."""
    lines = []
    for found in map(format_named, READERS.own):
        options = ", ".join(f"`{name}`" for name in found.options if name not in FURTHER)
        lines.append(f"| `{found.name}` | {found.description} | {options} |")
    return "\n".join(["| name | what it looks like | options |", "|---|---|---|", *lines])


def _said(entry: dataclasses.Field[typing.Any]) -> tuple[typing.Any, str]:
    return entry.default, entry.metadata["help"]


def base_of(kind: type[TrainingSettings]) -> type[TrainingSettings]:
    """The settings that these extend: those of another recipe where there is one, else of every recipe."""
    owners = {recipe.settings for recipe in _RECIPES} | set(SHARED)
    found = [base for base in kind.__mro__[1:] if base in owners or base is TrainingSettings]
    return typing.cast("type[TrainingSettings]", found[0])


def recipes_page() -> str:
    """docs/recipes.md."""
    names = {recipe.settings: recipe.name for recipe in reversed(_RECIPES)}
    sections = [HEAD, "## Every recipe\n", _table(rows(TrainingSettings, None))]
    for kind, title in SHARED.items():
        if kind is not TowerSettings:
            sections += [f"## {title}\n", _table(rows(kind, TrainingSettings))]
    for recipe in _RECIPES:
        own = names[recipe.settings] == recipe.name
        base = base_of(recipe.settings) if own else recipe.settings
        built_on = f"`{names[base]}`" if base in names else SHARED.get(base, "what every recipe has").lower()
        sections.append(f"## `{recipe.name}`\n\n{recipe.title}. Builds on {built_on}.\n")
        changed = rows(recipe.settings, base, differences(recipe.name))
        sections.append(_table(changed) if changed else "No other settings.\n")
        if presets(recipe.name):
            sections.append(_presets(recipe))
    return "\n".join(sections)


def readme_table() -> str:
    """The recipes in README.md."""
    lines = [f"| `{recipe.name}` | {recipe.title} |" for recipe in _RECIPES]
    return "\n".join(["| recipe | |", "|---|---|", *lines])


def pages() -> dict[Path, str]:
    """Every file that is made, or holds a part that is, with its content."""
    parts = {
        ROOT / "README.md": ("recipes", readme_table()),
        ROOT / "docs" / "extending.md": ("names", names_table()),
        ROOT / "docs" / "data.md": ("formats", formats_table()),
    }
    made = {ROOT / "docs" / "recipes.md": recipes_page(), ROOT / "docs" / "tables.md": tables_page()}
    for path, (mark, table) in parts.items():
        page = path.read_text("utf-8")
        (old,) = re.findall(rf"<!-- {mark} -->.*?<!-- end -->", page, re.DOTALL)
        made[path] = page.replace(old, f"<!-- {mark} -->\n{table}\n<!-- end -->")
    return made


def _table(lines: list[str]) -> str:
    return "\n".join(["| flag | default · others | |", "|---|---|---|", *lines, ""])


def _presets(recipe: Recipe) -> str:
    """The published settings of a recipe: what each changes against the defaults above."""
    said = preset_help(recipe.name)
    lines = [
        f"| `--preset {name}` | {said[name]} | {' '.join(map(_flag, values.items())) or 'as the defaults'} |"
        for name, values in presets(recipe.name).items()
    ]
    return "\n".join(["| published settings | | changes |", "|---|---|---|", *lines, ""])


def _flag(setting: tuple[str, object]) -> str:
    name, value = setting
    return f"`--{name}`" if value is True else f"`--no_{name}`" if value is False else f"`--{name} {value}`"


def tables_page() -> str:
    """docs/tables.md."""
    sections = [TABLES_HEAD]
    for paper in papers():
        lines = ["| table | what | command | rows | published only |", "|---|---|---|---:|---:|"]
        for table in tables_of(paper).values():
            data = "".join(f" --data {name}=PATH" for name in table.data)
            command = table.command or f"diptych reproduce {paper} --table {table.name}{data}"
            counts = (len(table.rows), sum(row.published_only for row in table.rows))
            shown = " | ".join("" if table.command else str(count) for count in counts)
            lines.append(f"| {table.source} | {table.title} | `{command}` | {shown} |")
        sections.append("\n".join([f"## {paper}\n", *lines, ""]))
    return "\n".join(sections)


def _shown(default: object, choices: tuple[object, ...]) -> str:
    """The default, and behind it what else may be chosen."""
    if isinstance(default, bool):
        return "on" if default else "off"
    others = [f"`{c}`" if " " not in str(c) else str(c) for c in choices if c != default]
    return " · ".join([f"**`{default}`**" if choices else f"`{default}`" if default != "" else "–", *others])


if __name__ == "__main__":
    compose.write()
    for path, content in pages().items():
        path.write_text(content, "utf-8")

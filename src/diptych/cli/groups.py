"""Groups of commands that a registry names, each imported when it is asked for."""

from __future__ import annotations

import itertools

import click

from diptych.errors import SettingsError
from diptych.names import Registry


class Registered(click.Group):
    """The commands of a registry; a plugin's stand behind those of this package."""

    registry: Registry

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, from metadata alone."""
        return list(self.registry)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name, imported now."""
        found = self.registry.find(cmd_name)
        if not isinstance(found, click.Command):
            raise SettingsError(
                f"the {self.registry.kind} '{cmd_name}' is a {type(found).__name__}: let its plugin name a "
                "click.Command."
            )
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments start with; a name that is none of them gets the nearest one as advice."""
        if args and not args[0].startswith("-"):
            try:
                self.registry.check(args[0])
            except SettingsError as error:
                ctx.fail(str(error))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the help of their entries, by section: a help page imports none of them."""
        entries = self.registry.entries()
        own = [entry for entry in entries if entry.name in self.registry.own]
        rest = [(entry.name, entry.help) for entry in entries if entry.name not in self.registry.own]
        for section, some in itertools.groupby(own, lambda entry: entry.section):
            with formatter.section(section.capitalize() or "Commands"):
                formatter.write_dl([(entry.name, entry.help) for entry in some])
        if rest:
            with formatter.section("Plugins"):
                formatter.write_dl(rest)

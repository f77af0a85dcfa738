"""The command line: verbs over the package, no logic of their own."""

from __future__ import annotations

import ast
import atexit
import difflib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from diptych import __version__
from diptych.cli.hints import advice
from diptych.errors import DiptychError, Interrupted
from diptych.names import import_plugins

VERBS = {
    "demo": "demo",
    "teach": "teach",
    "train": "train",
    "evaluate": "evaluate",
    "compare": "evaluate",
    "ablate": "train",
    "reproduce": "reproduce",
    "data": "data",
    "extract": "data",
    "cache": "cache",
    "show": "show",
    "label": "label",
    "index": "index",
    "search": "search",
    "embed": "embed",
    "plan": "plan",
    "serve": "serve",
    "watch": "watch",
    "import": "exchange",
    "export": "exchange",
}
"""Each verb and the module of this folder that holds it, in the order of use."""


class Verbs(click.Group):
    """The verbs, each imported when it is asked for, and the one place where failures become sentences."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb by its name."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"{__name__}.{VERBS[cmd_name]}")
        found = getattr(module, cmd_name, None) or getattr(
            module, f"{cmd_name}_"
        )  # a keyword of Python: import_
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs with the first sentence of each, read from the source: a help page imports no model."""
        room = formatter.width - 6 - max(map(len, VERBS))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(verb, click.Command(verb, help=_help(verb)).get_short_help_str(room)) for verb in VERBS]
            )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that the arguments start with; a name that is none of them gets the nearest one as advice."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            correction = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(VERBS)}."
            ctx.fail(f"there is no verb '{args[0]}': {correction}")
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]  # click's own two overloads, in one
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run a verb; an expected failure is one sentence and status 2, an interrupt a sentence and status 130."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        try:
            import_plugins()
            code = super().main(args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as help_page:
            help_page.show()
            _leave(2)
        except click.UsageError as error:
            see = f" (see '{error.ctx.command_path} --help')" if error.ctx is not None else ""
            _end(f"error: {advice(error)}{see}", 2)
        except (DiptychError, click.ClickException) as error:
            _end(f"error: {error}", 2)
        except OSError as error:
            if error.filename is None:
                raise
            _end(
                f"error: {error.filename} ({error.strerror}): check that it is there and that you may use it.",
                2,
            )
        except Interrupted as note:
            _end(str(note), 130)
        except (KeyboardInterrupt, click.Abort):
            _end("interrupted: what was saved before is intact.", 130)
        return _leave(code if isinstance(code, int) else 0)


def _help(verb: str) -> str:
    """The docstring of a verb, without importing its module."""
    source = (Path(__file__).parent / f"{VERBS[verb]}.py").read_text("utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.rstrip("_") == verb:
            return ast.get_docstring(node) or ""
    return ""


def _end(sentence: str, status: int) -> NoReturn:
    click.echo(sentence, err=True)
    _leave(status)


def _leave(status: int) -> NoReturn:
    """End the process. One of several under torchrun ends at once: threads of torch that are left may abort it on the
    way out ("terminate called without an active exception"), and torchrun would call a finished run failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def underscored(name: str) -> str:
    """``--batch-size`` is ``--batch_size``, in every command."""
    return name.replace("-", "_")


atexit.register(gc.freeze)  # with torch imported, the last look for garbage takes a sixth of a short command


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": underscored},
)
@click.version_option(__version__)
def main() -> None:
    """Diptych: train, evaluate, index and search image-text retrievers."""

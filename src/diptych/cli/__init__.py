"""The command line: verbs over the package, no logic of their own."""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from diptych import __version__
from diptych.cli.flags import RegistryGroup, advice
from diptych.errors import DiptychError, Interrupted, without_torch
from diptych.progress import echo, printable
from diptych.registries import COMMANDS


class Verbs(RegistryGroup):
    """The verbs, and the one place where failures become sentences."""

    registry = COMMANDS

    def main(  # type: ignore[override]  # click's own two overloads, in one
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run a verb; an expected failure is one sentence and status 2, an interrupt a sentence and status 130."""
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as help_page:
            help_page.show()
            _leave(2)
        except click.UsageError as error:
            see = f" (see '{error.ctx.command_path} --help')" if error.ctx is not None else ""
            _end(f"error: {advice(error)}{see}", 2)
        except ModuleNotFoundError as error:
            _end(f"error: {without_torch(error, 'this command')}", 2)
        except (DiptychError, click.ClickException) as error:
            _end(f"error: {printable(str(error))}", 2)
        except UnicodeEncodeError as error:  # of a file system, which may hold any bytes as a name
            if not any("\ud800" <= c <= "\udfff" for c in error.object):
                raise
            names = re.finditer(r"[^\0\t\n]+", error.object)  # of several in one text, say which
            name = printable(next(one[0] for one in names if one.end() > error.start))[-200:]
            _end(f"error: the name '{name}' is not UTF-8: give the file or folder another name.", 2)
        except OSError as error:
            if error.errno is None:  # not of the system
                raise
            file = printable(str(error.filename or "a file or disk that this command needs"))
            _end(f"error: {file} ({error.strerror}): check that it is there and that you may use it.", 2)
        except Interrupted as note:
            _end(str(note), 130)
        except (KeyboardInterrupt, click.Abort):
            _end("interrupted: what was saved before is intact.", 130)
        return _leave(code if isinstance(code, int) else 0)


def _end(sentence: str, status: int) -> NoReturn:
    echo(sentence, err=True)
    _leave(status)


def _leave(status: int) -> NoReturn:
    """End the process. One of several under torchrun ends at once: threads of torch that are left may abort it on the
    way out ("terminate called without an active exception"), and torchrun would call a finished run failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def with_underscores(name: str) -> str:
    """``--batch-size`` is ``--batch_size``, in every command."""
    return name.replace("-", "_")


atexit.register(gc.freeze)  # with torch imported, the last look for garbage takes a sixth of a short command


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": with_underscores},
)
@click.version_option(__version__)
def main() -> None:
    """Diptych: train, evaluate, index and search image-text retrievers."""

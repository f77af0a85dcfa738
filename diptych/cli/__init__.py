"""The command line: verbs over the package, no logic of their own."""

from __future__ import annotations

import click

from diptych import __version__
from diptych.cli import data, demo, search, train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Diptych: train, evaluate, index and search image-text retrievers."""


for _command in (
    demo.demo,
    train.train,
    train.evaluate,
    train.compare,
    train.ablate,
    train.reproduce,
    data.data,
    data.extract,
    search.index,
    search.search,
):
    main.add_command(_command)

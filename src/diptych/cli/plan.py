"""plan: what a collection of a given size takes."""

from __future__ import annotations

import json
from typing import Any

import click

from diptych.progress import echo


def whole(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A whole number that may be written with an exponent: 1e9."""
    try:
        number = float(value)
        if number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"'{value}' is not a whole number: write 1000000 or 1e6.", ctx, param
        ) from None
    return int(number)


@click.command()
@click.option(
    "--items", required=True, metavar="NUMBER", callback=whole, help="images of the collection, as in 1e9"
)
@click.option("--dim", required=True, metavar="NUMBER", callback=whole, help="dimensions of a vector")
@click.option("--qps", default=0.0, help="queries per second")
@click.option(
    "--texts", default="0", metavar="NUMBER", callback=whole, help="texts that are stored beside the images"
)
@click.option(
    "--queries",
    default="0",
    metavar="NUMBER",
    callback=whole,
    help="queries of an evaluation against all images",
)
@click.option(
    "--rate", default=0.0, help="images per second of one encoding worker (default: lite0+minilm on one core)"
)
@click.option("--flop", default=0.0, help="FLOP of encoding one image, as in 8.8e9")
@click.option("--workers", default="1", metavar="NUMBER", callback=whole, help="workers that encode at once")
@click.option("--memory", default=64.0, show_default=True, help="memory of a search machine in GB")
@click.option("--worker_hour", default=0.0, help="price of a worker-hour")
@click.option("--machine_hour", default=0.0, help="price of an hour of a search machine")
@click.option("--gb_month", default=0.0, help="price of a stored gigabyte for a month")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def plan(as_json: bool, **demand: Any) -> None:
    """Estimate bytes, FLOP, hours and money of a large collection.

    Each number says whether it is arithmetic, given, or extrapolated from a measurement, and how far.
    """
    from diptych.runs import plan as planning

    asked = planning.Demand(**demand)
    echo(json.dumps(planning.as_json(asked), indent=1) if as_json else planning.render(asked))

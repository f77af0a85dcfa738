"""The tables of an attack: printed, and put into docs/reliability.md where ``--docs`` asks for it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def add_docs(parser: argparse.ArgumentParser) -> None:
    """The flag."""
    parser.add_argument("--docs", action="store_true", help=f"write the table into docs/{PAGE.name}, too")


def put(name: str, lines: list[str], page: Path = PAGE) -> None:
    """Put lines between ``<!-- name -->`` and ``<!-- end -->`` of the page."""
    text = page.read_text("utf-8")
    place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    assert len(place.findall(text)) == 1, f"{page} has no single place <!-- {name} -->"
    page.write_text(place.sub(lambda _: "".join(f"{line}\n" for line in lines), text), "utf-8")

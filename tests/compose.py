"""Any part on any host: two training steps of a recipe with a pooling or a term of the loss, on toy data."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from golden.kept import unpack
from golden.runs import ON_LABELS, ON_PHOTOS, SMALL

from diptych.errors import DiptychError
from diptych.recipes import RECIPES
from diptych.registries import POOLINGS
from diptych.runs.train import run_recipe
from diptych.settings import HostSettings

HOSTS = [name for name in RECIPES.own if issubclass(RECIPES[name].settings, HostSettings)]
PAIR_SCORERS = ("scan", "sgr", "saf", "cusa-sgr", "cusa-saf")
POOLED = [*HOSTS, "labelwise"]
POOLS = list(POOLINGS.own)
FIXED = ["mean", "max", "kmax", "first"]  # poolings without weights
TERMS = {
    "triplet": "triplet(margin=0.1)",
    "info_nce": "info_nce",
    "visual": "own + visual",
    "textual": "own + textual",
    "dcl": "own + dcl(epsilon=0.2)",
    "dcl_i": "dcl_i",
    "dcl, concepts": "own + 0.5*dcl(view=concepts)",
    "m_dcl": "own + 0.1*m_dcl(queue_size=100)",
    "prototypes": "own + prototypes(clusters=3, start=1)",
    "csa": "own + 10*csa",
    "usa": "own + usa",
    "itm": "own + itm",
    "label": "own + label",
    "masked": "own + masked",
    "csq": "own + csq",
}
"""A cell of the docs per term: the expression that is trained."""
BATCH = {"features": 100, "photos": 20}  # one step an epoch


def train(name: str, folder: Path, **changes: Any) -> dict[str, float]:
    """The terms of the second step of a host; the present folder holds the toys."""
    data = "photos" if name in ON_PHOTOS else "features"
    kind = RECIPES[name].settings
    known = {field.name for field in dataclasses.fields(kind)}
    own = {
        **SMALL, **ON_PHOTOS.get(name, {}), "text_teacher": "toys/bert", "ridge_baseline": False, "queue_size": 100,
        "image_teacher": "toys/vit" if data == "photos" else "stored", "names": False,
        "batch_size": BATCH[data], "epochs": 2, "heads": 2, **changes,
    }  # fmt: skip
    source = f"toys/{data}" + ("?instances=toys/features" if name in ON_LABELS else "")
    settings = kind(**{key: value for key, value in own.items() if key in known})
    run_recipe(RECIPES[name], settings, source, folder, baseline=False, show_progress=False, device="cpu")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if "loss" in line][-1]


def cell(name: str, folder: Path, **changes: Any) -> str:
    """``✓`` where two steps train, else why the host refuses."""
    try:
        terms = train(name, folder, **changes)
    except DiptychError as error:
        return str(error)
    assert math.isfinite(terms["loss"]), (name, changes, terms)
    return "✓"


def toys(folder: Path) -> None:
    """Toy data and toy pretrained models."""
    unpack("toys", folder)


PAGE = Path(__file__).parent.parent / "docs" / "compose.md"


def tables() -> dict[str, str]:
    """The tables of docs/compose.md, by their marks: every cell is trained, which takes a minute or two."""
    terms, refusals = [], {}
    with TemporaryDirectory() as place:
        before, cache = Path.cwd(), os.environ.get("DIPTYCH_CACHE")
        os.chdir(place)
        os.environ["DIPTYCH_CACHE"] = "caches"
        try:
            toys(Path(place))
            poolings = []
            for host in POOLED:
                space = {"space": "feature"} if host == "labelwise" else {}
                made = [
                    cell(host, Path(place) / f"{host}-{pool}", image_pool=pool, text_pool=pool, **space)
                    for pool in POOLS
                ]
                poolings.append(["✓" if said == "✓" else "–" for said in made])
            for host in RECIPES.own:
                made = [cell(host, Path(place) / f"{host}-{term}", objective=TERMS[term]) for term in TERMS]
                refusals |= {term: said for term, said in zip(TERMS, made, strict=True) if said != "✓"}
                terms.append(["✓" if said == "✓" else "–" for said in made])
        finally:
            os.chdir(before)
            os.environ.pop("DIPTYCH_CACHE")
            os.environ.update({} if cache is None else {"DIPTYCH_CACHE": cache})
    return {
        "terms": _table("recipe", list(RECIPES.own), list(TERMS), terms),
        "refusals": "\n".join(f"* `{term}`: {_reason(said)}" for term, said in refusals.items()),
        "poolings": _table("recipe", POOLED, POOLS, poolings),
    }


def written(mark: str) -> str:
    """A table as it stands in the docs."""
    (found,) = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- end -->", PAGE.read_text("utf-8"), re.DOTALL)
    return str(found)


def write() -> None:
    """Put the tables into docs/compose.md."""
    for mark, table in tables().items():
        page = PAGE.read_text("utf-8")
        old = f"<!-- {mark} -->\n{written(mark)}<!-- end -->"
        PAGE.write_text(page.replace(old, f"<!-- {mark} -->\n{table}\n<!-- end -->"), "utf-8")


def _table(corner: str, rows: list[str], columns: list[str], cells: list[list[str]]) -> str:
    lines = [f"| `{row}` | {' | '.join(found)} |" for row, found in zip(rows, cells, strict=True)]
    heads = " | ".join(f"`{column}`" for column in columns)
    return "\n".join([f"| {corner} | {heads} |", "|---" * (len(columns) + 1) + "|", *lines])


def _reason(said: str) -> str:
    """A refusal without the expression that it is about."""
    return re.sub(r"--objective '[^']*', character \d+: (\w+ reads )?", "", said)

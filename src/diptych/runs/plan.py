"""What a collection of a given size takes: bytes, FLOP, hours and, at given prices, money.

Each line says how it was found: ``arithmetic`` (from the numbers that were given), ``given``, or ``extrapolated`` from
a measurement, with the factor between what was measured and what is asked. Factors are linear in items × dimensions for
a scan, in items × log(items) × dimensions for a graph. Nothing was measured on the collection that is asked about.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diptych.errors import SettingsError

HOUR, MONTH = 3600.0, 730.0  # seconds, hours
USABLE = 0.8  # share of a machine's memory that an index may fill


@dataclass(frozen=True)
class Measurement:
    """A number measured at one size; ``items`` and ``dim`` are 0 where they play no part."""

    value: float
    unit: str
    where: str
    items: int = 0
    dim: int = 0

    def __str__(self) -> str:
        size = f" at {self.items:,} × {self.dim}" if self.items else f" at {self.dim}-d" if self.dim else ""
        return f"{self.value:,g} {self.unit}{size}: {self.where}"

    def scaled(self, factor: float) -> str:
        """How far a number is from where it was measured."""
        return (
            f"extrapolated ×{_short(factor)} from {self.value:g} {self.unit} at {self.items:,} × {self.dim}"
        )


_FOUND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))  # docs/scale.md: the commands
MEASURED = {name: Measurement(**one) for name, one in _FOUND["measured"].items()}
NOT_SHOWN: list[str] = _FOUND["not_shown"]


@dataclass(frozen=True)
class PlanLine:
    """One number of a plan, and how it was found."""

    section: str
    what: str
    value: float
    unit: str
    how: str

    def text(self) -> str:
        if self.unit == "bytes":
            return scaled_bytes(self.value)
        return f"{self.value:,.2f}" if self.unit == "money" else f"{_short(self.value)} {self.unit}"


def _amount(help: str, default: float | None = 0.0, least: float = 0.0) -> Any:
    metadata = {"help": help, "least": least}
    return field(metadata=metadata) if default is None else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Demand:
    """What is asked: the collection, the traffic, the machines and their prices (0: unknown). Fields are also flags."""

    items: int = _amount("images of the collection, as in 1e9", None, 1)
    dim: int = _amount("dimensions of a vector", None, 1)
    qps: float = _amount("queries per second")
    texts: int = _amount("texts that are stored beside the images", 0)
    rate: float = _amount("images per second of one encoding worker (default: lite0+minilm on one core)")
    flop: float = _amount("FLOP of encoding one image, as in 8.8e9")
    workers: int = _amount("workers that encode at once", 1, 1)
    memory: float = _amount("memory of a search machine in GB", 64.0, 1)
    queries: int = _amount("queries of an evaluation against all images", 0)
    worker_hour: float = _amount("price of a worker-hour")
    machine_hour: float = _amount("price of an hour of a search machine")
    gb_month: float = _amount("price of a stored gigabyte for a month")

    def __post_init__(self) -> None:
        for name, entry in self.__dataclass_fields__.items():
            value, least = getattr(self, name), entry.metadata["least"]
            if not (math.isfinite(value) and value >= least):
                raise SettingsError(f"--{name} {value:g} is no amount: give {least:g} or more.")


Found = Iterator[tuple[str, float, str, str]]
"""What, value, unit and how of the lines of a section."""


def plan(demand: Demand) -> list[PlanLine]:
    """Every line of a plan."""
    sections = {
        "storage": _storage, "encoding": _encoding, "search, exact": _scanning, "search, graph": _by_graph,
        "evaluation": _evaluating,
    }  # fmt: skip
    return [PlanLine(name, *line) for name, section in sections.items() for line in section(demand)]


def _storage(demand: Demand) -> Found:
    rows = demand.items + demand.texts
    for name, size in (("float32", 4.0), ("float16", 2.0), ("binary codes", 1 / 8)):
        yield f"vectors, {name}", rows * demand.dim * size, "bytes", "arithmetic"
    row, small = MEASURED["row"].value, MEASURED["thumbnail"].value
    files = rows * (demand.dim * 4 + row)
    yield "files of diptych embed", files, "bytes", f"extrapolated, {row:g} bytes a row beside its vector"
    thumbnails = "their thumbnails, unless --no_thumbnails"
    yield thumbnails, demand.items * small, "bytes", f"extrapolated, {small:,.0f} bytes an image"
    if demand.gb_month:
        yield "files, a month", files / 1e9 * demand.gb_month, "money", f"{demand.gb_month:g} a GB-month"


def _encoding(demand: Demand) -> Found:
    known = MEASURED["images"].value
    hours = demand.items / (demand.rate or known) / HOUR
    how = "given rate" if demand.rate else f"extrapolated, {known:g} images/s a worker of one core"
    yield "worker-hours", hours, "h", how
    if demand.workers > 1:
        what = f"hours with {demand.workers:,} workers"
        yield what, hours / demand.workers, "h", f"{how}; shards divide without waiting"
    if demand.flop:
        yield "FLOP", demand.items * demand.flop, "FLOP", "arithmetic"
    if demand.worker_hour:
        yield "cost", hours * demand.worker_hour, "money", f"{demand.worker_hour:g} a worker-hour"


def _scanning(demand: Demand) -> Found:
    scan, alone = MEASURED["scan"], MEASURED["scan_ms"]
    factor = demand.items * demand.dim / (scan.items * scan.dim)
    how, rate = scan.scaled(factor), scan.value / factor
    yield "FLOP of a query", 2.0 * demand.items * demand.dim, "FLOP", "arithmetic"
    seconds = alone.value * factor / 1000
    yield "one query on one machine of two cores", seconds, "s", alone.scaled(factor)
    yield "queries/s of such a machine", rate, "queries/s", how
    # a collection divided over machines is searched by all of them for each query, each in its own part
    yield from _machines(demand, demand.items * demand.dim * 4.0, rate, how, quicker=True)


def _by_graph(demand: Demand) -> Found:
    graph, build, links = MEASURED["graph"], MEASURED["graph_build"], MEASURED["graph_links"].value
    depth = math.log(max(demand.items, 2)) / math.log(graph.items) * demand.dim / graph.dim
    growth = demand.items / build.items * depth
    memory, rate = demand.items * (demand.dim + links), graph.value / depth
    how = graph.scaled(demand.items / graph.items)
    yield "memory, 8-bit codes and links", memory, "bytes", f"extrapolated, {links:g} bytes of links a vector"
    yield "hours to build on two cores", build.value * growth / HOUR, "h", build.scaled(growth)
    slower = f"{how}, slower by the depth ×{_short(depth)}"
    yield "queries/s of a machine of two cores", rate, "queries/s", slower
    yield from _machines(demand, memory, rate, how, quicker=False)


def _machines(demand: Demand, memory: float, rate: float, how: str, *, quicker: bool) -> Found:
    """Machines that hold one copy and, where they are too slow together, further copies.

    ``quicker``: whether a part of the collection is searched the quicker for being smaller; one of a graph hardly is.
    """
    holding = max(1, math.ceil(memory / (demand.memory * 1e9 * USABLE)))
    one = f"machines of {demand.memory:g} GB for one copy"
    yield one, holding, "machines", f"arithmetic, {USABLE:.0%} of the memory used"
    if not demand.qps:
        return
    machines = holding * max(1, math.ceil(demand.qps / (rate * (holding if quicker else 1))))
    yield f"machines for {demand.qps:g} queries/s", machines, "machines", how
    if demand.machine_hour:
        cost = machines * demand.machine_hour * MONTH
        yield "these machines, a month", cost, "money", f"{demand.machine_hour:g} a machine-hour"


def _evaluating(demand: Demand) -> Found:
    if not demand.queries:
        return
    rank, pairs = MEASURED["rank"], float(demand.queries) * demand.items
    hours = pairs / rank.value * demand.dim / rank.dim / HOUR
    yield "FLOP", 2.0 * pairs * demand.dim, "FLOP", "arithmetic"
    how = f"extrapolated, {rank.value / 1e6:,.0f} million pairs/s at {rank.dim}-d"
    yield "core-hours", hours, "h", how


def render(demand: Demand) -> str:
    """A plan as text: its sections, then what it stands on and what was never shown."""
    lines = plan(demand)
    width = max(len(line.what) for line in lines)
    values = max(len(line.text()) for line in lines)
    parts: dict[str, list[str]] = {}
    for line in lines:
        said = f"{line.what:{width}}  {line.text():>{values}}  {line.how}"
        parts.setdefault(line.section, []).append(said)
    parts |= {"extrapolated from": [str(one) for one in MEASURED.values()], "not shown": NOT_SHOWN}
    return "\n\n".join("\n  ".join([section, *said]) for section, said in parts.items())


def as_json(demand: Demand) -> dict[str, Any]:
    """A plan for programs."""
    return {
        "demand": asdict(demand),
        "lines": [asdict(line) for line in plan(demand)],
        "measured": {name: asdict(one) for name, one in MEASURED.items()},
        "not_shown": NOT_SHOWN,
    }


def scaled_bytes(count: float) -> str:
    """``2.05 TB``: powers of 1,000."""
    units = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
    power = min(int(math.log10(count) / 3), len(units) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {units[power]}"


def _short(value: float) -> str:
    """Three digits, with commas or a power of ten."""
    if value == 0 or 0.01 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
    return f"{value:.2e}"

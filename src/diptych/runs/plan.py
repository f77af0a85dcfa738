"""What a collection of a given size takes: bytes, FLOP, hours and, at given prices, money.

Each line says how it was found: ``arithmetic`` (from the numbers that were given), ``given``, or ``extrapolated`` from
a measurement, with the factor between what was measured and what is asked. Factors are linear in items × dimensions for
a scan, in items × log(items) × dimensions for a graph. Nothing was measured on the collection that is asked about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from diptych.errors import SettingsError

HOUR, MONTH = 3600.0, 730.0  # seconds, hours
USABLE = 0.8  # share of a machine's memory that an index may fill


@dataclass(frozen=True)
class Measurement:
    """A number measured at one size; ``items`` and ``dim`` are 0 where they play no part."""

    value: float
    unit: str
    items: int
    dim: int
    where: str


_SEARCHED = "two cores of a shared x86 server (benchmarks/index.py)"
_EMBEDDED = "by processor time (benchmarks/embed.py)"
_GRAPH = f"graph of 8-bit codes, recall@10 0.942, 100 queries at once, {_SEARCHED}"
_LINKS = "what the graph adds to an index on disk, less the 8-bit codes (benchmarks/engines.py)"
_IMAGES = f"diptych embed lite0+minilm of 1,000 Flickr8k photos, {_EMBEDDED}"
_RANKS = f"ranks over shards, 8,192 × 16,384 vectors, {_EMBEDDED}"
_SIZE = 1_000_000, 512  # items and dimensions
MEASURED = {
    "images": Measurement(29.0, "images/s of one core", 0, 0, _IMAGES),
    "row": Measurement(
        135.0, "bytes of id, text and metadata", 0, 0, "its file, images with five texts each"
    ),
    "thumbnail": Measurement(9_400.0, "bytes of a thumbnail", 0, 0, "the same file"),
    "scan": Measurement(77.0, "queries/s", *_SIZE, f"exact search, 100 queries at once, {_SEARCHED}"),
    "scan_ms": Measurement(72.0, "ms for one query", *_SIZE, f"exact search, the median, {_SEARCHED}"),
    "graph": Measurement(856.0, "queries/s", *_SIZE, _GRAPH),
    "graph_build": Measurement(402.0, "s to build", *_SIZE, f"the same graph, {_SEARCHED}"),
    "graph_links": Measurement(148.0, "bytes of links a vector", 100_000, 512, _LINKS),
    "rank": Measurement(63e6, "pairs/s of one core", 0, 512, _RANKS),
}
"""What the model stands on; docs/scale.md has the commands."""

NOT_SHOWN = (
    "a cluster of several Milvus or PostgreSQL servers, newer Milvus servers than 2.3.5",
    "a real network: every cluster here was on one machine",
    "more than 1,000,000 vectors in any engine, and recall on vectors that are harder than those measured",
    "several GPUs at once",
)


@dataclass(frozen=True)
class PlanLine:
    """One number of a plan, and how it was found."""

    section: str
    what: str
    value: float
    unit: str
    how: str

    def text(self) -> str:
        """The value as people read it."""
        if self.unit == "bytes":
            return scaled_bytes(self.value)
        if self.unit == "money":
            return f"{self.value:,.2f}"
        return f"{_short(self.value)} {self.unit}"


@dataclass(frozen=True)
class Demand:
    """What is asked: the collection, the traffic, the machines and their prices (0: unknown)."""

    items: int
    dim: int
    qps: float = 0.0
    texts: int = 0
    rate: float = 0.0  # images a second of one worker
    flop: float = 0.0  # of encoding one image
    workers: int = 1
    memory: float = 64.0  # GB of a search machine
    queries: int = 0  # of an evaluation
    worker_hour: float = 0.0
    machine_hour: float = 0.0
    gb_month: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("items", 1), ("dim", 1), ("workers", 1), ("memory", 1)):
            if not getattr(self, name) >= least:
                raise SettingsError(f"--{name} {getattr(self, name):g} is too small: give at least {least}.")
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise SettingsError(f"--{name} {value:g} is not an amount: give a number of 0 or more.")


def plan(demand: Demand) -> list[PlanLine]:
    """Every line of a plan."""
    return [*_storage(demand), *_encoding(demand), *_searching(demand), *_evaluating(demand)]


def _storage(demand: Demand) -> Iterator[PlanLine]:
    line, rows = partial(PlanLine, "storage"), demand.items + demand.texts
    for name, size in (("float32", 4.0), ("float16", 2.0), ("binary codes", 1 / 8)):
        yield line(f"vectors, {name}", rows * demand.dim * size, "bytes", "arithmetic")
    row, small = MEASURED["row"].value, MEASURED["thumbnail"].value
    files = rows * (demand.dim * 4 + row)
    yield line("files of diptych embed", files, "bytes", _from(f"{row:g} bytes a row beside its vector"))
    thumbnails = "their thumbnails, unless --no_thumbnails"
    yield line(thumbnails, demand.items * small, "bytes", _from(f"{small:,.0f} bytes an image"))
    if demand.gb_month:
        cost = files / 1e9 * demand.gb_month
        yield line("files, a month", cost, "money", f"{demand.gb_month:g} a GB-month")


def _encoding(demand: Demand) -> Iterator[PlanLine]:
    line, known = partial(PlanLine, "encoding"), MEASURED["images"].value
    hours = demand.items / (demand.rate or known) / HOUR
    how = "given rate" if demand.rate else _from(f"{known:g} images/s a worker of one core")
    yield line("worker-hours", hours, "h", how)
    if demand.workers > 1:
        what = f"hours with {demand.workers:,} workers"
        yield line(what, hours / demand.workers, "h", f"{how}; shards divide without waiting")
    if demand.flop:
        yield line("FLOP", demand.items * demand.flop, "FLOP", "arithmetic")
    if demand.worker_hour:
        yield line("cost", hours * demand.worker_hour, "money", f"{demand.worker_hour:g} a worker-hour")


def _searching(demand: Demand) -> Iterator[PlanLine]:
    line, scan, alone = partial(PlanLine, "search, exact"), MEASURED["scan"], MEASURED["scan_ms"]
    factor = demand.items * demand.dim / (scan.items * scan.dim)
    how, rate = _scaled(scan, factor), scan.value / factor
    yield line("FLOP of a query", 2.0 * demand.items * demand.dim, "FLOP", "arithmetic")
    seconds = alone.value * factor / 1000
    yield line("one query on one machine of two cores", seconds, "s", _scaled(alone, factor))
    yield line("queries/s of such a machine", rate, "queries/s", how)
    yield from _machines("search, exact", demand, demand.items * demand.dim * 4.0, rate, how)
    line = partial(PlanLine, "search, graph")
    graph, build, links = MEASURED["graph"], MEASURED["graph_build"], MEASURED["graph_links"].value
    depth = math.log(max(demand.items, 2)) / math.log(graph.items) * demand.dim / graph.dim
    growth = demand.items / build.items * depth
    memory, rate = demand.items * (demand.dim + links), graph.value / depth
    how = _scaled(graph, demand.items / graph.items)
    yield line("memory, 8-bit codes and links", memory, "bytes", _from(f"{links:g} bytes of links a vector"))
    yield line("hours to build on two cores", build.value * growth / HOUR, "h", _scaled(build, growth))
    slower = f"{how}, slower by the depth ×{_short(depth)}"
    yield line("queries/s of a machine of two cores", rate, "queries/s", slower)
    yield from _machines("search, graph", demand, memory, rate, how)


def _machines(section: str, demand: Demand, memory: float, rate: float, how: str) -> Iterator[PlanLine]:
    """Machines that hold one copy and, where they are too slow together, further copies.

    A collection divided over m machines is searched by all of them for each query, each in its own part.
    """
    line, holding = partial(PlanLine, section), max(1, math.ceil(memory / (demand.memory * 1e9 * USABLE)))
    one = f"machines of {demand.memory:g} GB for one copy"
    yield line(one, holding, "machines", f"arithmetic, {USABLE:.0%} of the memory used")
    if not demand.qps:
        return
    scale = holding if section.endswith("exact") else 1  # a part of a graph is hardly quicker than the whole
    machines = holding * max(1, math.ceil(demand.qps / (rate * scale)))
    yield line(f"machines for {demand.qps:g} queries/s", machines, "machines", how)
    if demand.machine_hour:
        cost = machines * demand.machine_hour * MONTH
        yield line("these machines, a month", cost, "money", f"{demand.machine_hour:g} a machine-hour")


def _evaluating(demand: Demand) -> Iterator[PlanLine]:
    if not demand.queries:
        return
    line, rank, pairs = (
        partial(PlanLine, "evaluation"),
        MEASURED["rank"],
        float(demand.queries) * demand.items,
    )
    hours = pairs / rank.value * demand.dim / rank.dim / HOUR
    yield line("FLOP", 2.0 * pairs * demand.dim, "FLOP", "arithmetic")
    yield line("core-hours", hours, "h", _from(f"{rank.value / 1e6:,.0f} million pairs/s at {rank.dim}-d"))


def render(demand: Demand) -> str:
    """A plan as text: its sections, then what it stands on and what was never shown."""
    lines = plan(demand)
    width = max(len(line.what) for line in lines)
    values = max(len(line.text()) for line in lines)
    out = []
    for section in dict.fromkeys(line.section for line in lines):
        out += ["", section]
        own = (line for line in lines if line.section == section)
        out += [f"  {line.what:{width}}  {line.text():>{values}}  {line.how}" for line in own]
    out += ["", "extrapolated from"]
    out += [f"  {one.value:,g} {one.unit}{_size(one)}: {one.where}" for one in MEASURED.values()]
    out += ["", "not shown"]
    out += [f"  {sentence}" for sentence in NOT_SHOWN]
    return "\n".join(out[1:])


def as_json(demand: Demand) -> dict[str, Any]:
    """A plan for programs."""
    return {
        "demand": asdict(demand),
        "lines": [asdict(line) for line in plan(demand)],
        "measured": {name: asdict(one) for name, one in MEASURED.items()},
        "not_shown": list(NOT_SHOWN),
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


def _from(what: str) -> str:
    return f"extrapolated, {what}"


def _scaled(one: Measurement, factor: float) -> str:
    """How far a number is from where it was measured."""
    return f"extrapolated ×{_short(factor)} from {one.value:g} {one.unit} at {one.items:,} × {one.dim}"


def _size(one: Measurement) -> str:
    if one.items:
        return f" at {one.items:,} × {one.dim}"
    return f" at {one.dim}-d" if one.dim else ""

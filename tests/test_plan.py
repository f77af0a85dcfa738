"""The capacity plan: arithmetic by hand, and every other number said to be extrapolated."""

from __future__ import annotations

import json
import math

import pytest
from commands import diptych, refused

from diptych.errors import SettingsError
from diptych.runs.plan import MEASURED, Demand, PlanLine, plan, render, scaled_bytes


def found(demand: Demand, section: str, what: str) -> PlanLine:
    (line,) = [one for one in plan(demand) if one.section == section and one.what == what]
    return line


def test_a_billion_by_hand() -> None:
    demand = Demand(items=10**9, dim=512, qps=100, queries=10**6, flop=8e8, workers=64)
    assert found(demand, "storage", "vectors, float32").value == 10**9 * 512 * 4
    assert found(demand, "storage", "vectors, float16").text() == "1.02 TB"
    assert found(demand, "storage", "vectors, binary codes").value == 64e9
    assert found(demand, "search, exact", "FLOP of a query").value == 1.024e12
    assert found(demand, "evaluation", "FLOP").value == pytest.approx(1.024e18)
    assert found(demand, "encoding", "FLOP").value == 8e17
    hours = found(demand, "encoding", "worker-hours")
    assert hours.value == pytest.approx(10**9 / MEASURED["images"].value / 3600)
    assert found(demand, "encoding", "hours with 64 workers").value == pytest.approx(hours.value / 64)
    copy = found(demand, "search, exact", "machines of 64 GB for one copy")
    assert copy.value == math.ceil(2.048e12 / (64e9 * 0.8)) == 40
    # a query costs a thousand times that at a million; forty machines share it
    alone = MEASURED["scan"].value / 1000
    assert found(demand, "search, exact", "machines for 100 queries/s").value == 40 * math.ceil(
        100 / (alone * 40)
    )


def test_what_was_measured_comes_out_again() -> None:
    """At the measured size the factor is 1 and the number that was measured."""
    scan, graph, build = MEASURED["scan"], MEASURED["graph"], MEASURED["graph_build"]
    exact = found(Demand(items=scan.items, dim=scan.dim), "search, exact", "queries/s of such a machine")
    assert exact.value == scan.value
    assert "extrapolated ×1 from" in exact.how
    demand = Demand(items=graph.items, dim=graph.dim)
    assert found(demand, "search, graph", "queries/s of a machine of two cores").value == graph.value
    assert found(demand, "search, graph", "hours to build on two cores").value * 3600 == pytest.approx(
        build.value
    )


def test_every_line_says_how_it_was_found() -> None:
    demand = Demand(10**8, 256, 50, 10**8, 0, 1e9, 8, 64, 10**4, 0.1, 0.4, 0.02)
    for line in plan(demand):
        assert line.how.startswith(("arithmetic", "extrapolated", "given", "0.")), line
    said = render(demand)
    assert "extrapolated from\n" in said
    assert "not shown\n" in said
    assert all(one.where in said for one in MEASURED.values())


def test_money_is_a_parameter() -> None:
    free = [line.unit for line in plan(Demand(10**6, 512, 10))]
    assert "money" not in free
    demand = Demand(10**6, 512, 10, rate=100, worker_hour=2, machine_hour=0.5, gb_month=0.02)
    assert found(demand, "encoding", "cost").value == pytest.approx(10**6 / 100 / 3600 * 2)
    machines = found(demand, "search, exact", "machines for 10 queries/s").value
    assert found(demand, "search, exact", "these machines, a month").value == machines * 0.5 * 730
    assert "given rate" in found(demand, "encoding", "worker-hours").how


def test_numbers_grow_with_what_is_asked() -> None:
    small, large = (plan(Demand(items, 512, 100, queries=1000)) for items in (10**6, 10**8))
    for one, other in zip(small, large, strict=True):
        if "queries/s" in one.unit:
            assert other.value < one.value
        else:
            assert other.value >= one.value, one.what


@pytest.mark.parametrize(
    ("change", "name"),
    [({"items": 0}, "items"), ({"dim": 0}, "dim"), ({"qps": -1.0}, "qps"), ({"rate": math.inf}, "rate"),
     ({"memory": math.nan}, "memory"), ({"workers": 0}, "workers")],
)  # fmt: skip
def test_amounts_that_are_none_are_refused(change: dict[str, float], name: str) -> None:
    with pytest.raises(SettingsError, match=f"--{name}"):
        Demand(**{"items": 1000, "dim": 8, **change})  # type: ignore[arg-type]


def test_the_command() -> None:
    said = diptych("plan", "--items", "1e9", "--dim", 512, "--qps", 100).stdout
    assert "2.05 TB" in said
    assert "arithmetic" in said
    content = json.loads(diptych("plan", "--items", "1e6", "--dim", "512", "--json").stdout)
    assert content["demand"]["items"] == 10**6
    assert "--items" in refused("plan", "--items", "many", "--dim", 512)
    assert "--items" in refused("plan", "--items", 0, "--dim", 512)
    assert scaled_bytes(0.4) == "0.4 B"
    assert scaled_bytes(1e24) == "1e+06 EB"

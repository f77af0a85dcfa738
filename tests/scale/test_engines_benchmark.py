"""The benchmark behind the table of engines in docs/scale.md: every search, and going on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engines.py"


def test_the_benchmark_measures_every_search(tmp_path: Path) -> None:
    results = tmp_path / "engines.json"
    command = [sys.executable, str(SCRIPT), "--sizes", "500", "--seconds", "0.1"]
    command += ["--engines", "embedded", "postgresql"]  # Milvus would take minutes to start again
    first = subprocess.run([*command, "--results", results], capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    rows = json.loads(results.read_text())
    searches = {(row["engine"], row["search"]) for row in rows}
    assert len(searches) == len(rows) == 5
    for row in rows:
        exact = row["search"] == "exact"
        assert row["recall"] == 1 if exact else row["recall"] > 0.9
        assert (row["build"] is None) == exact
        assert all(row[name] > 0 for name in ("load", "p50", "p99", "rate", "filtered", "disk"))
        assert row["p50"] <= row["p99"]
    again = subprocess.run([*command, "--results", results], capture_output=True, text=True)
    assert again.stdout.splitlines()[-5:] == first.stdout.splitlines()[-5:]  # nothing is measured twice

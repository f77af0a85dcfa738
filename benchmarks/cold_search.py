"""One search on the command line, torch and ONNX Runtime in turns: CPU seconds, peak memory, files entered.

    python benchmarks/cold_search.py demo/emoji.index "rainy weather"

The index's model needs a runtime (``diptych export runtime MODEL``). Each search is a process of its own; the median of
several counts. "Files entered" are those of this package whose functions run, which a profile function counts in a run
apart. The run ends with status 1 where ONNX Runtime takes more than 0.9 s of CPU, 250 MB, or a third of torch's CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import diptych
from diptych.index.models import VARIABLE

SECONDS, MEGABYTES, TIMES = 0.9, 250, 3.0
WALK = """
import os, sys, threading
root = os.path.realpath(sys.argv.pop(1)) + os.sep
seen = set()
def note(frame, event, arg):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(root) and frame.f_code.co_name not in ("<module>", "<lambda>"):
        seen.add(file[len(root):])
from diptych.cli import main
threading.setprofile(note)
sys.setprofile(note)
try:
    main(sys.argv[1:])
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    print("\\n".join(sorted(seen)), file=sys.stderr)
"""


def measured(words: list[str]) -> tuple[float, float, float]:
    """CPU seconds, peak megabytes and seconds of one process."""
    import time

    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "diptych", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the search ended with status {process.returncode}: {' '.join(words)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, time.perf_counter() - start


def walked(words: list[str]) -> list[str]:
    """The files of the package that a search enters."""
    root = str(Path(diptych.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", WALK, root, *words], capture_output=True, text=True, check=True
    )
    return [line for line in done.stderr.splitlines() if line.endswith(".py")]


def main() -> int:
    """Print the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("index")
    parser.add_argument("query")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--files", action="store_true", help="list the files that a search without torch enters"
    )
    given = parser.parse_args()
    words = ["search", given.index, given.query, "--device", "cpu"]
    rounds: dict[str, list[tuple[float, float, float]]] = {"torch": [], "onnx": []}
    for _ in range(given.rounds):
        for name, found in rounds.items():
            os.environ[VARIABLE] = name  # with --backend, a search also checks the model against the index
            found.append(measured(words))
    print("| backend | CPU s | peak MB | s | files entered |\n|---|---|---|---|---|")
    medians = {}
    for name, found in rounds.items():
        cpu, memory, wall = (statistics.median(column) for column in zip(*found, strict=True))
        os.environ[VARIABLE] = name
        entered = walked(words)
        medians[name] = cpu, memory
        print(f"| {name} | {cpu:.2f} | {memory:.0f} | {wall:.2f} | {len(entered)} |", flush=True)
        if given.files and name == "onnx":
            print("\n".join(entered))
    cpu, memory = medians["onnx"]
    return int(cpu > SECONDS or memory > MEGABYTES or medians["torch"][0] < TIMES * cpu)


if __name__ == "__main__":
    sys.exit(main())

"""The standing attacker: hostile inputs for every target, in processes that are watched.

    python tests/attack/watch.py --minutes 30          # make attack
    python tests/attack/watch.py --target readers --first 1234 --inputs 1     # one input again

An input is (target, number): the number seeds everything in it. A process that raises anything but the package's own
errors, takes more than 5 s of a core for one input, waits half a minute without using a core, grows by more than 500
MB, gives a wrong answer or dies is a finding: what other work on the machine delays is none. The run goes on with the
next input, and ends with status 1 when there was a finding, or fewer inputs than ``--least``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from _pytest.outcomes import Skipped

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "src")]

from page import add_docs, put  # noqa: E402

SECONDS = 5.0  # of a core that one input may take, the processes that it starts included
HANGS = 30.0  # seconds of one input in which no thread asks for a core
POLL = 0.05  # seconds between two looks at a process
GROWTH = 500_000_000  # bytes that a process may grow
START = 180.0  # seconds of a core to make a target
PIECE, TURN = 500, 20.0  # inputs, or seconds, of a target before the next has its turn


@dataclass
class Tally:
    """What came of a target."""

    inputs: int = 0
    refused: int = 0
    findings: list[str] = field(default_factory=list)
    largest: int = 0  # growth, in bytes
    slowest: float = 0.0  # seconds of a core


def work(name: str, first: int, count: int, folder: Path) -> None:
    """The process that is watched writes down: the number it is at, how many were refused, its memory at the start."""
    from targets import TARGETS, attacked

    warnings.simplefilter("ignore")
    attack = TARGETS[name](folder)
    refused, base, end = 0, _memory(os.getpid()), time.monotonic() + TURN
    with (folder.parent / "at").open("w", buffering=1) as at:
        for number in range(first, first + count):
            at.write(f"{number} {refused} {base}\n")
            if time.monotonic() > end:
                os._exit(0)
            try:
                refused += attacked(attack, Random(f"{name} {number}"))
            except BaseException:
                traceback.print_exc(limit=-6)
                at.write(f"{number} {refused} {base}\n")
                os._exit(3)
        at.write(f"{first + count} {refused} {base}\n")
    os._exit(0)  # whatever a target left running


def watch(name: str, first: int, count: int, tally: Tally, until: float) -> int:
    """Run some inputs, note what is found, and say which number is next."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        folder = Path(base) / "target"
        folder.mkdir()
        command = [sys.executable, __file__, "--work", name, "--first", str(first), "--inputs", str(count)]
        with (Path(base) / "said").open("w+") as said:
            process = subprocess.Popen(
                [*command, "--folder", str(folder)], stdout=said, stderr=said, start_new_session=True
            )
            at, refused, why = _watched(process, Path(base) / "at", tally, until)
            said.seek(0)
            if why is None and process.returncode not in (0, 3, -9):
                why = f"died with status {process.returncode}"
            if process.returncode == 3:
                why = "raised\n" + said.read()[-1500:]
    tally.refused += refused
    if at is None:
        if why is not None:  # None: the time of the whole run is over
            tally.findings.append(f"{name}: cannot be made: {why}")
        return first + count
    tally.inputs += at - first + (why is not None)
    if why is not None:
        tally.findings.append(f"{name} {at}: {why}")
        return at + 1
    return at


def _watched(
    process: subprocess.Popen[bytes], file: Path, tally: Tally, until: float
) -> tuple[int | None, int, str | None]:
    at: int | None = None
    refused, base, used, waited = 0, 0, 0.0, 0.0
    while True:
        ended = process.poll() is not None
        lines = file.read_text().splitlines() if file.exists() else []
        seconds, works = _seconds(process.pid)
        waited = 0.0 if works else waited + POLL
        if lines and len(lines[-1].split()) == 3:
            now, refused, base = map(int, lines[-1].split())
            if now != at:
                at, used, waited = now, seconds, 0.0
        if ended:
            return at, refused, None
        size = _memory(process.pid)
        if at is not None:
            tally.largest = max(tally.largest, size - base)
            tally.slowest = max(tally.slowest, seconds - used)
        why = None
        if at is not None and size - base > GROWTH:
            why = f"grew by {(size - base) // 1_000_000} MB"
        elif seconds - used > (START if at is None else SECONDS):
            why = f"took more than {START if at is None else SECONDS:g} s of a core"
        elif waited > HANGS:
            why = f"waited for {HANGS:g} s without using a core"
        if why is not None or time.monotonic() > until:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: what it started ends with it
            process.wait()
            return at, refused, why
        time.sleep(POLL)


def _memory(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _seconds(pid: int) -> tuple[float, bool]:
    """Seconds of a core that a process and those it started have used, and whether any thread of them asks for one."""
    used, works = 0.0, False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            works |= state in "RD"  # runs, would run, or waits for a disk
            for child in (thread / "children").read_text().split():
                more, busy = _seconds(int(child))
                used, works = used + more, works or busy
    except OSError:  # it has ended
        pass
    return used, works


@contextmanager
def database() -> Iterator[None]:
    """A PostgreSQL server for the processes that compare engines, where one can be had."""
    from rivals import SERVER
    from servers import postgres

    with ExitStack() as opened:
        try:
            os.environ[SERVER] = opened.enter_context(postgres()).url
        except Skipped:
            os.environ[SERVER] = ""
        yield


def main() -> None:
    """Attack every target in turn until the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--target", default="", help="this one only")
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--inputs", type=int, default=0, help="at most so many of each target")
    parser.add_argument("--least", type=int, default=0, help="inputs of all targets; fewer are status 1")
    parser.add_argument("--processes", type=int, default=2)
    add_docs(parser)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.first, options.inputs, Path(options.folder))
    from targets import TARGETS

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [options.target] if options.target else list(TARGETS)
    tallies = {name: Tally() for name in names}
    following = dict.fromkeys(names, options.first)
    queue, lock = list(names), threading.Lock()
    until = time.monotonic() + 60 * options.minutes
    last = options.first + options.inputs if options.inputs else None

    def run() -> None:
        while time.monotonic() < until:
            with lock:
                if not queue:
                    return
                name = queue.pop(0)
            count = PIECE if last is None else min(PIECE, last - following[name])
            following[name] = watch(name, following[name], count, tallies[name], until)
            with lock:
                if last is None or following[name] < last:
                    queue.append(name)

    threads = [threading.Thread(target=run) for _ in range(options.processes)]
    start = time.monotonic()
    with database():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    sys.exit(report(tallies, (time.monotonic() - start) / 60, options))


def report(tallies: dict[str, Tally], minutes: float, options: argparse.Namespace) -> int:
    """Print what came of a run, and say with which status it ends."""
    lines = ["| target | inputs | refused | findings | largest growth MB | slowest s of a core |"]
    lines.append("|---|---|---|---|---|---|")
    for name, tally in sorted(tallies.items()):
        lines.append(
            f"| {name.replace('_', ' ')} | {tally.inputs:,} | {tally.refused:,} | {len(tally.findings)} "
            f"| {tally.largest / 1e6:.0f} | {tally.slowest:.1f} |"
        )
    total = sum(tally.inputs for tally in tallies.values())
    refused = sum(tally.refused for tally in tallies.values())
    findings = [finding for tally in tallies.values() for finding in tally.findings]
    lines.append(f"| **all, in {minutes:.0f} minutes** | {total:,} | {refused:,} | {len(findings)} | | |")
    print("\n".join(lines))
    for finding in findings:
        print(f"FINDING {finding}")
    few = total < options.least
    if few:
        print(f"FEWER INPUTS than {options.least:,}: {total:,}")
    if options.docs:
        put("watch", lines)
    return 1 if findings or few else 0


if __name__ == "__main__":
    main()

"""Kill a writer at random moments, many times, and see that the index kept every word it gave.

A child process adds, updates, deletes and compacts at random and says on a pipe what it is about to do and
when it is done. The parent kills it with SIGKILL at a random moment, opens the index, and compares it with
what was acknowledged: every finished operation must hold, a deleted item must not return, the operation that
was under way must be there whole or not at all, every vector must be the one last written, and ``verify``
must find no fault.

    python benchmarks/index_crash.py --kills 200
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from diptych.index.engines.embedded import segments
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import KINDS, Item, Kind, Vectors

DIMENSION = 32
GRAPHS = find_spec("usearch") is not None
IDLE = 10  # writers in a row that may be killed before they finish anything
NAMES = 400  # ids in play: few, so that updates and deletes meet items that are there
Contents = dict[str, int]  # id → version


def vector_of(id: str, version: int) -> Vectors:
    """The vector an item of this version must have."""
    rng = np.random.default_rng([int(id[1:]), version])
    vector = rng.normal(size=DIMENSION)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def kind_of(id: str) -> Kind:
    """A third of the items are texts."""
    return "text" if int(id[1:]) % 3 == 0 else "image"


def apply(contents: Contents, operation: list[object]) -> Contents:
    """What the index must hold after an operation."""
    name, argument = operation
    after = dict(contents)
    if name == "store":
        assert isinstance(argument, dict)
        after.update(argument)
    elif name == "delete":
        assert isinstance(argument, list)
        for id in argument:
            after.pop(id, None)
    return after


def work(path: Path, seed: int) -> None:
    """The child: change the index for ever, announcing and acknowledging each operation."""
    segments.SEGMENT_BYTES = DIMENSION * 4 * 150  # small segments: full ones and new ones at every turn
    rng = random.Random(seed)
    with EmbeddedIndex.open(path, writable=True) as index:
        while True:
            ids = rng.sample([f"i{n}" for n in range(NAMES)], rng.choice([1, 3, 20, 120]))
            choice = rng.random()
            if choice < 0.6:
                versions = {id: rng.randrange(10**6) for id in ids}
                _say("begin", ["store", versions])
                items = [
                    Item(id, kind_of(id), text=f"{id} v{v}", content=str(v)) for id, v in versions.items()
                ]
                index.update(items, np.stack([vector_of(id, v) for id, v in versions.items()]))
            elif choice < 0.9:
                _say("begin", ["delete", ids])
                index.delete(ids)
            elif choice < 0.96 or not GRAPHS:
                _say("begin", ["compact", None])
                index.compact()
            else:
                _say("begin", ["graph", None])
                index.build_graph(rng.choice(KINDS))
            _say("done", None)


def _say(word: str, operation: object) -> None:
    sys.stdout.write(json.dumps([word, operation]) + "\n")
    sys.stdout.flush()


def check(path: Path, possible: list[Contents], search: bool) -> Contents:
    """Which of the possible contents the index has; raises when it is none of them or anything is damaged."""
    with EmbeddedIndex.open(path) as index:
        faults = index.verify()
        assert not faults, faults
        ids = [f"i{n}" for n in range(NAMES)]
        found = {item.id: int(item.content) for item in index.get(ids) if item is not None}
        assert found in possible, (
            f"holds {len(found)} items, none of the {len(possible)} states that it may be in"
        )
        assert len(index) == len(found)
        names = list(found)
        if names:
            expected = np.stack([vector_of(id, found[id]) for id in names])
            assert np.array_equal(index.vectors(names), expected), "a vector is not the one last written"
        if names and search:
            hits = index.search_many(expected[:20], k=len(names) + 10)
            assert all(set(one.ids) == set(names) for one in hits), "a search does not see what is there"
            assert [one.ids[0] for one in hits] == names[:20]
            for kind in KINDS:  # through the approximate index, where there is one
                found_by = index.search(expected[0], len(names), kind=kind).ids
                assert set(found_by) == {id for id in names if kind_of(id) == kind}
            assert set(index.search_words("v1 " + names[0], len(names)).ids) <= set(names)
    return found


def crash(path: Path, contents: Contents, seed: int, patience: float, search: bool) -> tuple[Contents, int]:
    """One child, killed; what the index holds afterwards and how many operations it had acknowledged."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--work", str(path), "--seed", str(seed)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    first = child.stdout.readline()  # the child is at work from here on
    time.sleep(random.Random(seed).random() * patience)
    child.kill()
    rest = child.stdout.read()
    status = child.wait()
    child.stdout.close()
    assert first.endswith("\n"), f"the writer ended with status {status} before it began"
    assert status == -signal.SIGKILL, f"the writer ended by itself with status {status}, before it was killed"
    acknowledged, pending = 0, None
    for line in (first + rest).splitlines():
        try:
            word, operation = json.loads(line)
        except ValueError:
            continue  # the line it was writing when it died
        if word == "begin":
            pending = operation
        elif pending is not None:
            contents, pending, acknowledged = apply(contents, pending), None, acknowledged + 1
    possible = [contents] if pending is None else [contents, apply(contents, pending)]
    return check(path, possible, search), acknowledged


def main() -> None:
    """Run the kills and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--patience", type=float, default=0.3, help="longest wait before a kill, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-search", action="store_true", help="compare contents and vectors only")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        work(given.work, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "crash.index"
        EmbeddedIndex.create(path, DIMENSION).close()
        contents: Contents = {}
        total = idle = 0
        start = time.monotonic()
        for number in range(given.kills):
            contents, done = crash(path, contents, given.seed + number, given.patience, not given.no_search)
            total, idle = total + done, 0 if done else idle + 1
            assert idle < IDLE, f"{idle} writers in a row finished nothing: give them more --patience"
        seconds = time.monotonic() - start
    print(f"{given.kills} kills, {total} acknowledged operations, none lost, {seconds:.0f} s")


if __name__ == "__main__":
    main()

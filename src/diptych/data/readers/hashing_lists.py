"""Lists of the hashing literature (HashNet, CSQ, DeepHash): ``train.txt``, ``test.txt``, ``database.txt``.

Each line is an image and one 0 or 1 per class: ``images/0001.jpg 0 1 0 0``. ``test`` holds the queries, ``database``
what they are ranked against. An image of ``train`` and ``database`` is one image of the split ``train``; the label
``database`` says whether an image is ranked. Each image's text is the names of its classes.
"""

from __future__ import annotations

from pathlib import Path

from diptych.data.files import column_names, head, read_lines
from diptych.data.readers.draft import Draft, Reader

LISTS = ("train", "test", "database")
CLASSES = "classes.txt"
RANKED = "database"  # the label that says of an image whether it is ranked
UNLABELLED = "no class"
LINE = "an image and one 0 or 1 per class, such as 'a.jpg 0 1 0'"


def matches(path: Path) -> bool:
    """Whether ``path`` is a folder with a list of queries and of a database whose first line is of this form."""
    lists = [path / f"{name}.txt" for name in ("test", "database")]
    return all(file.is_file() and _columns(head(file, 16_384).split("\n", 1)[0]) for file in lists)


def fill(draft: Draft, path: Path) -> Path:
    """Read the lists of a folder."""
    problems = draft.problems
    files = {name: path / f"{name}.txt" for name in LISTS if (path / f"{name}.txt").is_file()}
    lines = {name: read_lines(file, problems) for name, file in files.items()}
    classes = next((_columns(line) for line in lines["test"] if line), 0)
    draft.classes = names = column_names(path / CLASSES, "class", classes, problems)
    ranked: set[int] = set()
    for name, file in files.items():
        for number, line in enumerate(lines[name], 1):
            if line is None or not line.strip():
                continue
            parts = line.strip().rsplit(maxsplit=classes)
            if len(parts) != classes + 1 or not set(parts[1:]) <= {"0", "1"}:
                problems.error("list", f"{file}:{number}", f"not {classes} columns of 0 and 1", LINE)
                continue
            own = tuple(label for label, flag in zip(names, parts[1:], strict=True) if flag == "1")
            key = parts[0].replace("\\", "/").removeprefix("./")
            known = draft.find(key)
            if known is None:
                known = draft.image(key, name, f"{file}:{number}", labels={"labels": own})
                draft.text(known, ", ".join(own) or UNLABELLED, f"{file}:{number}")
            elif (draft.splits[known], name) != ("train", "database"):
                draft.image(key, name, f"{file}:{number}")  # says so where the two lists must not meet
            if name == "database":
                ranked.add(known)
    draft.labels = [{**labels, RANKED: row in ranked} for row, labels in enumerate(draft.labels)]
    return path


def _columns(line: str) -> int:
    """How many 0 or 1 stand at the end of a line, behind at least one word."""
    words = line.split()
    count = 0
    while count < len(words) - 1 and words[-1 - count] in ("0", "1"):
        count += 1
    return count


READER = Reader(matches, fill)

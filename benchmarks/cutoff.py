"""Error rates of the "nothing matches" cut-off: held-out texts of a data set asked of all its images.

    python benchmarks/cutoff.py demo/run --data emoji --label category

Each text is asked of the collection as it is, where a match exists, and of the collection without its image, or
without every image of the same ``--label``, where none does. Of several runs (seeds), the mean and how far they
are from it at most.
"""

from __future__ import annotations

import argparse

from diptych.data.formats import open_captions
from diptych.index.cutoff import measure_cutoff_on
from diptych.retriever import Retriever


def main() -> None:
    """Print one line for each setting of the cut-off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of trained models")
    parser.add_argument("--data", default="emoji")
    parser.add_argument("--split", default="test", help="the split whose texts are asked, or 'all'")
    parser.add_argument("--label", help="leave out every image that shares this label with the answer")
    given = parser.parse_args()
    captions = open_captions(given.data)
    split = None if given.split == "all" else given.split
    rates = [
        measure_cutoff_on(Retriever.from_pretrained(run), captions, given.label, split) for run in given.runs
    ]
    asked = rates[0][0].queries
    print(
        f"{captions.name}: {len(captions.images)} images, {asked} texts of the split {given.split}, "
        f"{len(rates)} runs"
    )
    print(f"without: {'images of the same ' + given.label if given.label else 'the image of the text'}")
    print(f"{'chance':>8}{'match denied':>20}{'match claimed':>20}")
    for same in zip(*rates, strict=True):
        denied, claimed = spread([one.false_none for one in same]), spread([one.false_match for one in same])
        print(f"{same[0].chance:8.2f}{denied:>20}{claimed:>20}")


def spread(shares: list[float]) -> str:
    """The mean of some shares in percent, and how far the farthest is from it."""
    mean = sum(shares) / len(shares)
    farthest = max(abs(share - mean) for share in shares)
    return f"{100 * mean:.1f} ± {100 * farthest:.1f} %"


if __name__ == "__main__":
    main()

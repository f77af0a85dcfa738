"""Error rates of the "nothing matches" cut-off: held-out texts of a data set asked of all its images.

    python benchmarks/cutoff.py demo/run --data emoji --label category

Each text is asked of the collection as it is, where a match exists, and of the collection without its image, or
without every image of the same ``--label``, where none does.
"""

from __future__ import annotations

import argparse

from diptych.data.formats import open_captions
from diptych.index.cutoff import measure_cutoff_on
from diptych.retriever import Retriever


def main() -> None:
    """Print one line for each setting of the cut-off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", help="folder of a trained model")
    parser.add_argument("--data", default="emoji")
    parser.add_argument("--split", default="test", help="the split whose texts are asked, or 'all'")
    parser.add_argument("--label", help="leave out every image that shares this label with the answer")
    given = parser.parse_args()
    captions = open_captions(given.data)
    split = None if given.split == "all" else given.split
    rates = measure_cutoff_on(Retriever.from_pretrained(given.run), captions, given.label, split)
    print(
        f"{captions.name}: {len(captions.images)} images, {rates[0].queries} texts of the split {given.split}"
    )
    print(f"without: {'images of the same ' + given.label if given.label else 'the image of the text'}")
    print(f"{'chance':>8}{'match denied':>15}{'match claimed':>16}")
    for one in rates:
        print(f"{one.chance:8.2f}{100 * one.false_none:13.1f} %{100 * one.false_match:14.1f} %")


if __name__ == "__main__":
    main()

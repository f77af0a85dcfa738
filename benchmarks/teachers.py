"""What CUSA's teachers themselves score on the tasks that their soft labels train: a bound for uni-modal heads.

    python benchmarks/teachers.py --data flickr8k [--image_size 176]

The figures are those of ``UniModal`` (docs/evaluation.md): text → text, does a text find another text of its image;
image → image, do images order their neighbours as the text teacher orders their texts. The text teacher is compared
with itself there, so only its text → text recall says something.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diptych.data.formats import open_captions
from diptych.evaluation.uni_modal import image_agreement, text_recall
from diptych.ops import unit
from diptych.training.teachers import Teachers


def main() -> None:
    """Print the two figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="val")
    parser.add_argument("--image_teacher", default="auto")
    parser.add_argument("--text_teacher", default="minilm")
    parser.add_argument("--image_size", type=int, default=224)
    options = parser.parse_args()
    captions = open_captions(options.data).split(options.split)
    teachers = Teachers(options.image_teacher, options.text_teacher, image_size=options.image_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, texts = (
        store.rows(np.arange(len(store))).astype(np.float32)
        for store in (
            teachers.image_vectors(captions, device=device),
            teachers.text_vectors(captions, device=device),
        )
    )
    recall = text_recall(unit(torch.from_numpy(texts)), captions)
    agreement = image_agreement(images, texts, captions)
    print(f"text → text R@1, 5, 10: {', '.join(f'{value:.1f}' for value in recall.values())}")
    print(f"image → image, Spearman × 100: {agreement:.1f}")


if __name__ == "__main__":
    main()

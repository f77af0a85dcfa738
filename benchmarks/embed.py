"""What ``diptych plan`` stands on: images per second of one core, bytes of a row, pairs per second of ranks.

    python benchmarks/embed.py --tar train-000000.tar --images 1000

Rates are by processor time of one thread, so that other work on the machine disturbs them little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from diptych.data.formats import open_captions
from diptych.evaluation.shards import ShardBlock, count_pair, own_scores
from diptych.index.models import open_model
from diptych.vectors.embed import embed_shard
from diptych.vectors.files import Shard
from diptych.vectors.load import ShardData
from diptych.vectors.manifest import shard_file


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tar", required=True, help="a webdataset tar of photos with texts")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--model", default="lite0+minilm")
    parser.add_argument("--pairs", type=int, nargs=2, default=(8192, 16384), metavar=("IMAGES", "TEXTS"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = open_model(options.model)
    model.encode_text(["a first text"])
    captions = open_captions(options.tar)
    captions = captions.subset(range(min(options.images, len(captions.images))))
    with tempfile.TemporaryDirectory() as folder:
        for name, given in (("images", {"texts": False}), ("all", {"thumbnails": False})):
            start = time.process_time()
            receipt = embed_shard(model, name, ShardData(captions), Path(folder), **given)
            seconds = time.process_time() - start
            print(
                f"{name}: {receipt.images:,} images, {receipt.texts:,} texts, {receipt.images / seconds:.1f} images/s, "
                f"{receipt.rows / seconds:.1f} rows/s"
            )
            print(f"  bytes a row: {columns(Shard(receipt, shard_file(Path(folder), name), model.dim))}")
    rng = np.random.default_rng(0)
    images, texts = options.pairs
    vectors = [torch.nn.functional.normalize(torch.randn(rows, 512)) for rows in (images, texts)]
    block = ShardBlock(*vectors, np.sort(rng.integers(images, size=texts)), ("test",), ("",))
    own = own_scores(block)
    start = time.process_time()
    count_pair(block, block, own, own, (0, 0, 0, 0))
    rate = images * texts / (time.process_time() - start)
    print(f"ranks: {rate / 1e6:.1f} million pairs/s of 512 dimensions")


def columns(shard: Shard) -> dict[str, float]:
    """Bytes of each column, a row."""
    from pyarrow.parquet import ParquetFile

    found = ParquetFile(shard.path).metadata
    sizes: dict[str, int] = {}
    for group in range(found.num_row_groups):
        for number in range(found.num_columns):
            column = found.row_group(group).column(number)
            sizes[column.path_in_schema] = sizes.get(column.path_in_schema, 0) + column.total_compressed_size
    return {name: round(size / shard.receipt.rows, 1) for name, size in sizes.items()}


if __name__ == "__main__":
    main()

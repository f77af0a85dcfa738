"""A score matrix of full size on disk: bounded memory, killed once in the middle, resumed, and equal to direct scores.

    python benchmarks/score_matrix.py --device cuda              # 5,000 images × 25,000 texts with SGR
    python benchmarks/score_matrix.py --device cuda --scorer saf
    python benchmarks/score_matrix.py --images 600 --texts 600   # a CPU takes hours for the full size
    python benchmarks/score_matrix.py --tiny                     # checks that it runs

Random unit features (36 regions; 7 to 21 words, 14 on average; 1024-d; float16) are written to a file block by block.
A child process maps that file into memory and streams the scores to a matrix. It dies by SIGKILL halfway, within a
block of images; a second child goes on. The second one must not score a finished block again, a sample of the matrix
must equal scores computed one text at a time, and the child's peak memory beyond the inputs must stay under a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pair_scorers import PlainLoop

from diptych.cache.rows import RowFile
from diptych.evaluation import score_matrix
from diptych.interaction.sgraf import SAF, SGR
from diptych.interaction.similarity_scorer import SimilarityScorer
from diptych.model.scores import PairScores, Where
from diptych.types import Ragged

REGIONS, FEWEST, MOST = 36, 7, 21  # words of a text: from FEWEST to MOST
BLOCK = 16_384  # vectors made at a time
BEST, EXACT_BY, ROUGH_BY = (
    10,
    1e-4,
    1e-2,
)  # the best scores of an image are float32, the others may be rounded
IDENTITY = {"model": "random weights", "data": "random features"}


def make_side(path: Path, sizes: Tensor, dim: int, seed: int) -> None:
    """Write unit vectors (T, D) in float16 for sets of these sizes, and where each set lies."""
    bounds = np.concatenate([[0], sizes.cumsum(0).numpy()])
    values = np.lib.format.open_memmap(path, "w+", np.float16, (int(bounds[-1]), dim))
    rng = np.random.default_rng(seed)
    for start in range(0, len(values), BLOCK):
        rows = rng.standard_normal((min(BLOCK, len(values) - start), dim), np.float32)
        values[start : start + BLOCK] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    values.flush()
    np.save(path.with_suffix(".bounds.npy"), bounds)


def read_side(path: Path) -> Ragged:
    """The sets of a file, mapped into memory."""
    values = np.load(path, mmap_mode="c")  # nothing is written: the pages stay those of the file
    return Ragged(torch.from_numpy(values), torch.from_numpy(np.load(path.with_suffix(".bounds.npy"))))


def make_scorer(kind: str, dim: int, nodes: int) -> SimilarityScorer:
    """A scorer with random weights, the same ones in every process."""
    torch.manual_seed(0)
    return {"sgr": SGR, "saf": SAF}[kind](dim, nodes).eval()


def resident(name: str) -> float:
    """Resident memory of this process in GB: ``VmRSS`` now, ``VmHWM`` at its peak."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise SystemExit(f"/proc/self/status has no {name}: run this benchmark on Linux.")


def work(args: argparse.Namespace) -> None:
    """The child: stream the scores; after ``--die_after`` tiles it kills itself."""
    score_matrix.IMAGES, score_matrix.TEXTS = args.block_images, args.block_texts
    scorer = make_scorer(args.scorer, args.dim, args.nodes).to(args.device)
    device = torch.device(args.device)
    images, texts = read_side(args.folder / "images.npy"), read_side(args.folder / "texts.npy")
    scores = PairScores(scorer, images, texts, device, args.precision)
    scores.tile(slice(0, 4), slice(0, 8)).cpu()  # starts the device and its libraries
    at_start, tiles, last = resident("VmRSS"), 0, 0.0

    def tile(rows: Where, columns: Where) -> Tensor:
        nonlocal tiles, last
        if tiles == args.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = scores.tile(rows, columns).cpu()
        tiles, last = tiles + 1, time.perf_counter()
        return found

    start = time.perf_counter()
    score_matrix.stored_scores(scores, args.folder / "scores.npy", IDENTITY, tile, show_progress=True)
    seconds = {"scoring": last - start if tiles else 0.0, "refining": time.perf_counter() - (last or start)}
    memory = {"start": at_start, "peak": resident("VmHWM")}
    if device.type == "cuda":
        memory["gpu"] = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps({"tiles": tiles, "seconds": seconds, "memory": memory}), flush=True)


def child(args: argparse.Namespace, die_after: int) -> tuple[int, str]:
    """Run a child; its status and what it printed."""
    names = ("scorer", "dim", "nodes", "device", "precision", "block_images", "block_texts", "folder")
    flags = [part for name in names for part in (f"--{name}", str(getattr(args, name)))]
    command = [sys.executable, __file__, "--work", "--die_after", str(die_after), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


@torch.inference_mode()
def largest_differences(args: argparse.Namespace, sample: int) -> tuple[float, float]:
    """Of the best texts of some images, and of other texts: the matrix beside scores of one text at a time."""
    scorer = PlainLoop(make_scorer(args.scorer, args.dim, args.nodes)).eval()
    images, texts = read_side(args.folder / "images.npy"), read_side(args.folder / "texts.npy")
    matrix = np.load(args.folder / "scores.npy", mmap_mode="r")
    spread = torch.linspace(0, len(texts) - 1, min(sample, len(texts))).long()
    worst = [0.0, 0.0]
    for row in torch.linspace(0, len(images) - 1, min(8, len(images))).long().tolist():
        stored = torch.from_numpy(np.array(matrix[row]))
        image = images.take(torch.tensor([row]))
        for which, columns in enumerate((stored.topk(min(BEST, len(stored))).indices, spread)):
            direct: Tensor = scorer(image, texts.take(columns))
            worst[which] = max(worst[which], float((direct[0] - stored[columns]).abs().max()))
    return worst[0], worst[1]


def run(args: argparse.Namespace) -> bool:
    """Make the inputs, kill a child, let another finish, compare; whether all limits hold."""
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(FEWEST, MOST + 1, (args.texts,), generator=generator)
    # the global vector stands before the regions and words
    make_side(args.folder / "images.npy", torch.full((args.images,), REGIONS + 1), args.dim, 1)
    make_side(args.folder / "texts.npy", words + 1, args.dim, 2)
    inputs = sum((args.folder / f"{side}.npy").stat().st_size for side in ("images", "texts")) / 1e9
    pairs = args.images * args.texts
    print(
        f"{args.scorer}, {args.images:,} images × {args.texts:,} texts, {args.dim}-d, {args.device}, "
        f"precision {args.precision}; inputs of {inputs:.2f} GB made in {time.perf_counter() - start:.0f} s"
    )
    across = -(-args.texts // args.block_texts)
    total = across * -(-args.images // args.block_images)
    status, _ = child(args, die_after=total // 2 + (across > 1))
    path = args.folder / "scores.npy"
    with RowFile(path, RowFile(path, None).held_key(), dtype="<f4") as file:
        done = file.progress.done
    print(
        f"killed after {total // 2 + (across > 1)} of {total} tiles: status {status}, {done:,} images finished"
    )
    status, said = child(args, die_after=-1)
    if status:
        print(f"FAILED: the second child ended with status {status}")
        return False
    found = json.loads(said.splitlines()[-1])
    left, seconds, memory = args.images - done, found["seconds"], found["memory"]
    expected = across * -(-left // args.block_images)
    again = found["tiles"] - expected
    print(
        f"resumed: {found['tiles']} tiles for the {left:,} images that were left, {again} of them scored again"
    )
    rate = left * args.texts / max(seconds["scoring"], 1e-9) / 1e3
    print(
        f"scoring {seconds['scoring']:.1f} s for {left * args.texts / 1e6:,.2f} of {pairs / 1e6:,.2f} million pairs, "
        f"{rate:,.0f} thousand pairs/s to disk; refining {seconds['refining']:.1f} s"
    )
    over = memory["peak"] - memory["start"] - inputs
    print(
        f"resident memory: {memory['start']:.2f} GB at the start, {memory['peak']:.2f} GB at the peak: "
        f"{max(over, 0.0):.2f} GB beyond the inputs, limit {args.limit_gb:g} GB (matrix {pairs * 4 / 1e9:.2f} GB)"
    )
    gpu_over = memory.get("gpu", 0.0) - inputs
    if "gpu" in memory:
        print(
            f"GPU memory: {memory['gpu']:.2f} GB at the peak: {max(gpu_over, 0.0):.2f} GB beyond the inputs, "
            f"limit {args.gpu_limit_gb:g} GB"
        )
    best, others = largest_differences(args, args.sample)
    allowed = EXACT_BY if args.precision == "no" else ROUGH_BY
    print(
        f"beside one text at a time: best {BEST} of 8 images differ by {best:.1e} (limit {EXACT_BY:g}), "
        f"{args.sample} other texts by {others:.1e} (limit {allowed:g})"
    )
    verdicts = {
        "finished blocks were scored again": again != 0,
        "nothing was finished before the kill": done == 0,
        "memory is over its limit": over > args.limit_gb,
        "GPU memory is over its limit": gpu_over > args.gpu_limit_gb,
        "scores differ": best > EXACT_BY or others > allowed,
    }
    for verdict in (name for name, broken in verdicts.items() if broken):
        print(f"FAILED: {verdict}")
    return not any(verdicts.values())


def main() -> None:
    """Read the options; status 1 where a limit is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scorer", choices=["sgr", "saf"], default="sgr")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--texts", type=int, default=25_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["no", "bf16", "fp16"], help="fp16 on a GPU, float32 on a CPU")
    parser.add_argument("--block_images", type=int, default=score_matrix.IMAGES)
    parser.add_argument("--block_texts", type=int, default=score_matrix.TEXTS)
    parser.add_argument("--limit_gb", type=float, default=2.0, help="peak resident memory beyond the inputs")
    parser.add_argument("--gpu_limit_gb", type=float, default=8.0, help="peak GPU memory beyond the inputs")
    parser.add_argument("--sample", type=int, default=200, help="texts compared for each of 8 images")
    parser.add_argument(
        "--folder", type=Path, help="for the inputs and the matrix; a temporary one if left out"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--die_after", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.precision = args.precision or ("fp16" if args.device == "cuda" else "no")
    if args.work:
        work(args)
        return
    if args.tiny:
        args.images, args.texts, args.dim, args.nodes = 24, 30, 64, 16
        args.block_images, args.block_texts, args.sample = 4, 16, 30
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder) if args.folder is None else args.folder
        args.folder.mkdir(parents=True, exist_ok=True)
        raise SystemExit(0 if run(args) else 1)


if __name__ == "__main__":
    main()

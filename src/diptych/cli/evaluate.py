"""evaluate, compare, judge, audit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from diptych.cli.flags import (
    OUTPUT,
    OUTPUT_FILE,
    PATH,
    column_flags,
    columns_of,
    device_flags,
    option,
    together,
    with_columns,
)
from diptych.progress import echo
from diptych.registries import JUDGEMENTS, PROTOCOLS

RESULTS: dict[str, Any] = {"nargs": -1, "required": True, "type": PATH}
detect_flag = option(
    "--detect",
    "a gain in points: say how many queries (and seeds) it takes to see it",
    type=click.FloatRange(0, min_open=True),
)


@click.command()
@click.argument("runs", **RESULTS)
@together(
    option("--data", "data set, one for all runs or one each (default: the first run's own)", multiple=True),
    option("--split", "split to evaluate (default: val; of vectors, everything)"),
    option(
        "--protocol",
        f"what is measured, and how (may be repeated): {PROTOCOLS.choices}",
        ("plain",),
        multiple=True,
    ),
    option("--judgements", f"also compute many-to-many metrics: {JUDGEMENTS.choices}", multiple=True),
    option("--ties", "tie rule (see docs/evaluation.md)", "index"),
    option("--bootstrap", "resamples of the 95 % intervals (0: none)", 1000),
    option("--depth", "of the protocol hashing: the K of MAP@K (default: 5000)", type=click.IntRange(1)),
    option(
        "--rerank",
        "re-rank the top N of each query with the pair scorers of --reranker",
        0,
        type=click.IntRange(0),
    ),
    option(
        "--reranker", "run with a pair scorer; of several, the mean of their scores", multiple=True, type=PATH
    ),
    option(
        "--score_matrix",
        "compute all scores into this .npy file first; a killed run continues from it",
        type=OUTPUT_FILE,
    ),
    option(
        "--hubness",
        "score down items that are near to many queries of this other split (inverted softmax)",
        metavar="SPLIT",
    ),
    option("--hubness_beta", "β of --hubness", 20.0),
    option(
        "--equal_texts",
        "count every picture with the same text as right; case and punctuation do not matter",
        is_flag=True,
    ),
    option(
        "--strict_images",
        "stop at a picture that cannot be read (default: leave it out and list it)",
        is_flag=True,
    ),
    option("--output", "also save the report as JSON", type=OUTPUT_FILE),
    option("--ray", "count the ranks of vectors on a Ray cluster", metavar="ADDRESS"),
    detect_flag,
    column_flags,
    device_flags,
)
def evaluate(runs: tuple[Path, ...], detect: float | None, **options: Any) -> None:
    """Evaluate a run, a model folder or a pretrained model (hf:ID). Several form an ensemble: the mean of their scores.

    A folder that diptych embed wrote is evaluated from its vectors, a few shards in memory at a time.
    """
    from diptych.index.models import say_device
    from diptych.runs.evaluate import detection_of, evaluate_runs

    columns = columns_of(options)
    options["data"] = [with_columns(path, columns) for path in options["data"]]
    report = evaluate_runs(runs, **options, say=say_device)
    echo("\n".join([report.render(), *(detection_of(report, detect) if detect else [])]))


class _Sides(click.Command):
    """A command whose ``--with`` takes every result that follows it; each ``--with`` is a system."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """``--with B1 B2`` read as one value of two lines; a result that stands elsewhere behind it has no side."""
        with_value = {
            name for flag in self.get_params(ctx) if not getattr(flag, "is_flag", False) for name in flag.opts
        }
        words: list[str] = []
        before = ""
        for arg in args:
            if arg.startswith("-") or before == "--with" == words[-1]:
                words.append(arg)
                before = arg if arg.startswith("-") else before
            elif before == "--with":
                words[-1] += f"\n{arg}"
            elif before not in with_value and any(one.startswith("--with") for one in words):
                ctx.fail(
                    f"{arg} does not stand behind --with: write all results of a system behind it, as in --with "
                    "b1.json b2.json."
                )
            else:
                words.append(arg)
                before = arg
        if any(a == "--with" and b.startswith("-") for a, b in pairwise([*words, "-"])):
            ctx.fail("--with has no result behind it: give those of a system.")
        return super().parse_args(ctx, words)


@click.command(cls=_Sides)
@click.argument("results", **RESULTS)
@click.option("--with", "others", multiple=True, help="results of another system (may be repeated)")
@option("--data", "data set to evaluate runs on (default: each run's own)", multiple=True)
@option("--split", "split to evaluate runs on", "val")
@option("--protocol", f"protocol to evaluate runs under: {PROTOCOLS.choices}", "plain")
@option(
    "--draws", "resamples of the interval and of the paired test (0: none)", 10_000, type=click.IntRange(0)
)
@option("--metric", "metric to rank systems by (default: the primary one, for three or more)")
@detect_flag
@device_flags
def compare(results: tuple[Path, ...], others: tuple[str, ...], **options: Any) -> None:
    """Compare two results, or several seeds of each.

    As in: diptych compare A1 A2 A3 --with B1 B2 B3 --with C1. A result is a report that evaluate --output saved, or the
    folder of a run, which is evaluated first. The difference comes with its 95 % interval and a test, over queries and,
    with several seeds, over seeds. Three or more results without --with are put together where they differ only in the
    seed. Results with different protocols are refused, and the field is named.
    """
    from diptych.runs.compare import compare_runs

    sides = [[Path(one) for one in other.split("\n")] for other in others]
    echo(compare_runs(results, sides, **options).render())


@click.command()
@click.argument("scores", **RESULTS)
@option("--data", "data set that the scores are of", required=True)
@option("--split", "split that the scores are of", "test")
@option(
    "--claimed",
    "a number to find, such as 81.7 or rsum=480.3 (may be repeated: one reading must give all)",
    multiple=True,
)
@option("--fold", "images of a fold", 1000, type=click.IntRange(1))
@option("--trec", "folder to write TREC runs and qrels into", type=OUTPUT)
@column_flags
def judge(scores: tuple[Path, ...], data: str, **options: Any) -> None:
    """Check a claimed number: which protocol gives it?

    SCORES is a matrix (images, texts) in a .npy file, two .npy files with the vectors of images and of texts, or one or
    two TREC runs. All images, the first fold and the mean of folds are measured, right and with one mistake: only the
    first texts, another number of texts per image, ties broken for or against the model, images repeated, directions
    exchanged, the order of the rows lost.
    """
    from diptych.runs.judge import judge as run

    echo(run(scores, with_columns(data, columns_of(options)), **options).render())


@click.command()
@click.argument("data")
@option("--split", "split to audit (default: all, with leaks between them)")
@option("--model", "a run or model folder whose vectors are used (default: frozen encoders)")
@option("--image_size", "pixels of the square that Lite0 reads", 224)
@option("--output_dir", "folder for audit.json, the page audit.html and suggested.csv", "audit", type=OUTPUT)
@option("--device", "cuda, cuda:1, mps or cpu", "auto")
@column_flags
def audit(data: str, output_dir: Path, **options: Any) -> None:
    """List wrong pairs, missing positives, leaks and empty texts. No training; the data stay as they are.

    The page audit.html asks a person about the worst pairs and saves corrections.csv, which every command reads:
    DATA?corrections=corrections.csv. Files and formats are the business of diptych data check.
    """
    from diptych.runs.audit import audit as run

    findings = run(with_columns(data, columns_of(options)), **options)
    findings.save(output_dir)
    echo("\n".join(findings.lines()))
    echo(
        f"pictures and texts, worst first: {output_dir / 'audit.html'}; all of it: {output_dir / 'audit.json'}"
    )

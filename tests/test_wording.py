"""The wording of errors: how to meet each of them, and the sentence it says.

Other tests name the type of an error and the value it is about: a better sentence changes one line here.
FOLDER stands for the test's own folder.
"""

from __future__ import annotations

import ast
import errno
import inspect
import io
import re
import shlex
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from colour_model import ColourModel
from commands import refused
from PIL import Image

from diptych import Retriever, errors
from diptych.addresses import download
from diptych.aggregators import GPO, GeM, KMax
from diptych.aggregators.labels import LabelHead
from diptych.cache import contents
from diptych.data.arrays import ArrayStore
from diptych.data.augmentation import PictureAugmentation
from diptych.data.captions import Captions
from diptych.data.concepts import word_vectors
from diptych.data.corrections import add_noise, data_hash, read_corrections
from diptych.data.decode.opening import open_image
from diptych.data.decode.pickles import read_pickle
from diptych.data.decode.video_files import Video
from diptych.data.formats import open_captions, split_options
from diptych.data.images import PixelInput, RegionInput
from diptych.data.labels import Labels
from diptych.data.readers import emoji
from diptych.data.text_inputs import clean_caption
from diptych.data.vocabulary import build_vocabulary, read_vocabulary
from diptych.devices import pick_device, pick_precision
from diptych.encoders.dual import load_dual
from diptych.encoders.regions import Regions
from diptych.encoders.shared import TokenTransformer
from diptych.errors import (
    AddressError,
    CheckpointError,
    DataError,
    DiptychError,
    ImageError,
    IndexFault,
    MissingExtra,
    QueryError,
    RuntimeFault,
    SettingsError,
    StorageError,
)
from diptych.evaluation.cards import Facts
from diptych.evaluation.classes import class_recall, open_class_list, stored_features
from diptych.evaluation.compare import compare as compare_reports
from diptych.evaluation.judgements import judge_lists, load_judgements
from diptych.evaluation.metrics import count_ranks, retrieval_metrics
from diptych.evaluation.protocols import EvaluationProtocol, protocol_named
from diptych.evaluation.report import Group, Report
from diptych.evaluation.retrieval import evaluate_scores
from diptych.evaluation.senteval import read_senteval
from diptych.evaluation.shards import evaluate_vectors
from diptych.evaluation.trec import read_qrels, read_runs
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.engines.milvus.address import read_address
from diptych.index.engines.opening import open_index
from diptych.index.engines.postgres.database import Database
from diptych.index.ingest.collection_files import CollectionFiles
from diptych.index.ingest.target import Target, check_clash
from diptych.index.models import open_model
from diptych.index.places import refuse_model
from diptych.index.protocol import Item, Precision, halves
from diptych.index.query.filters import parse_filter
from diptych.index.query.parse import parse_query
from diptych.interaction.sgraf import SGR
from diptych.model.scores import EmbeddingScores, MatrixScores, MeanScores
from diptych.names import call
from diptych.objectives.contrast import Contrast, CoupledQueue
from diptych.objectives.contrastive import InfoNCE
from diptych.objectives.expressions import parse_objective
from diptych.objectives.labels import LabelLoss
from diptych.objectives.prototypes import PrototypeClassification
from diptych.objectives.soft_labels import CrossModalSoftLabels, UniModalSoftLabels
from diptych.objectives.triplet import Triplet
from diptych.recipes.towers import check_fixed
from diptych.registries import POOLINGS
from diptych.reports.audit import read_page
from diptych.runs.audit import audit
from diptych.runs.embeddings import import_embeddings
from diptych.runs.judge import Claim, fitted_scores, judge
from diptych.runs.plan import Demand
from diptych.runtime.folder import Probes, RuntimeFacts, compare
from diptych.runtime.model import RuntimeModel
from diptych.settings import TrainingSettings, from_json
from diptych.storage import storing, write_text
from diptych.targets.columns import Column
from diptych.training.checkpoint import read_run
from diptych.vectors.embed import parse_part
from diptych.web.limits import Limits
from diptych.web.serve import serve

ROW = np.array([1, 0, 0], np.float32)
GROUP = Group("x", {"a": 1.0}, "a", Facts({"data": "emoji"}))
PACKAGE = Path(errors.__file__).parent


def foreign_vectors(folder: Path) -> None:
    """Import a vector that the model does not make."""
    Image.new("RGB", (8, 8), "red").save(folder / "red.png")
    own = ColourModel().encode_image([Image.open(folder / "red.png")])[0]
    moved = np.zeros(len(own), np.float32)
    moved[:2] = -own[1], own[0]
    np.save(folder / "v.npy", moved[None])
    (folder / "paths.txt").write_text("red.png")
    import_embeddings(folder / "v.npy", folder / "i", ColourModel(), paths=folder / "paths.txt", root=folder)


def written_from(folder: Path) -> RuntimeFacts:
    """A runtime that was written from another config.json."""
    put(folder, "config.json", "{}")
    return RuntimeFacts("0" * 16, 2, {"part": "PixelInput"}, {}, model={"config.json": [2, ""]})


def put(folder: Path, name: str, content: Any, cut: int = 0) -> Path:
    """A file with these bytes, this text or this array, without its last ``cut`` bytes."""
    if isinstance(content, np.ndarray | np.generic):
        stream = io.BytesIO()
        np.save(stream, content)
        content = stream.getvalue()
    content = content.encode() if isinstance(content, str) else content
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content[: len(content) - cut])
    return file


def png(width: int = 2, height: int = 2) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def table(folder: Path, content: bytes, **options: str) -> Captions:
    """Captions of a table beside the pictures a.png and b.png."""
    for name in ("a.png", "b.png"):
        put(folder, name, png())
    return open_captions(put(folder, "m.csv", content).parent, **options)


def corrected_table(folder: Path) -> Path:
    """A table of two pictures with a text each."""
    table(folder, b"image,text\na.png,x\nb.png,y\n")
    return folder / "m.csv"


def corrections(folder: Path, lines: str) -> Captions:
    """The captions of that table with corrections, in which HASH is the hash of the data."""
    place = corrected_table(folder)
    content = "image_id,text_id,verdict,by,data\n" + lines.replace("HASH", data_hash(open_captions(place)))
    return open_captions(f"{place}?corrections={put(folder, 'c.csv', content)}")


def noisy(folder: Path, content: Any) -> object:
    """That table with noise of a file."""
    return add_noise(open_captions(corrected_table(folder)), str(put(folder, "n.npy", content)))


def trec(folder: Path, lines: str) -> MatrixScores:
    """The scores of a run, image to text, over that table."""
    return read_runs(open_captions(corrected_table(folder)), image_to_text=put(folder, "r.txt", lines))


def regions(folder: Path, name: str, content: bytes | None) -> Captions:
    """Captions of a precomputed folder of two images and ten texts, with one file written anew or removed."""
    place = folder / "toy_precomp"
    put(place, "train_ims.npy", np.ones((2, 3, 4), np.float32))
    put(place, "train_caps.txt", "a dog\n" * 10)
    if content is None:
        (place / name).unlink()
    else:
        put(place, name, content)
    return open_captions(place)


def vanished(folder: Path) -> CollectionFiles:
    """The files of a folder of pictures that is gone by now."""
    put(folder / "gone", "a.png", png())
    captions = open_captions(folder / "gone")
    shutil.rmtree(folder / "gone")
    return CollectionFiles(captions)


def filled(folder: Path, dimension: int, precision: Precision | None = None) -> None:
    """Open an index of three dimensions to be filled with other vectors."""
    index(folder).close()
    with Target(folder / "x.index", dimension, "f00d", precision=precision).ready():
        pass


def index(folder: Path) -> EmbeddedIndex:
    """An index of one item, 'a', with a price."""
    with EmbeddedIndex.create(folder / "x.index", 3, model="mine", fingerprint="f00d") as made:
        made.add([Item("a", metadata={"price": 3})], ROW[None])
    return EmbeddedIndex.open(folder / "x.index", writable=True)


def saving(file: Path, error: Exception) -> None:
    with storing(file):
        raise error


def saving_in_cache(file: Path, error: Exception) -> None:
    """The same for a file in the cache folder."""
    with mock.patch.dict("os.environ", {"DIPTYCH_CACHE": str(file.parent)}):
        saving(file, error)


def raising(error: Exception) -> None:
    raise error


# fmt: off
SAYS: dict[type[DiptychError], list[tuple[Callable[[Path], object], str]]] = {
    SettingsError: [
        (lambda p: filled(p, 3, "float16"),
         "FOLDER/x.index stores float32 vectors, not float16: leave the precision out, or use another place."),
        (lambda _: GPO(temperature=0.0), "the temperature of GPO is 0.0: it must be greater than 0."),
        (lambda _: LabelHead(8, 0), "a label head needs at least one label: the training data have none."),
        (lambda _: KMax(0), "the k of KMax is 0: give 1 or more."),
        (lambda _: contents.select([], older_than="-3d"),
         "'-3d' is not an age: write hours, days or weeks, such as 12h, 30d or 8w."),
        (lambda _: contents.select([], keep="much"), "'much' is not a size: write it such as 500MB or 10GB."),
        (lambda _: PictureAugmentation(crop=(0.0, 1.0)),
         "crop=(0.0, 1.0) must be two numbers with 0 < low ≤ high ≤ 1."),
        (lambda _: PictureAugmentation(hue=0.7),
         "hue=0.7 is no share of the colour circle: give 0 to 0.5."),
        (lambda _: PixelInput(size=0), "size=0 is not a picture side: give 1 to 4,096 pixels."),
        (lambda _: RegionInput(0), "dim=0 is not a feature length: give a positive number."),
        (lambda _: emoji.read(size=4),
         "emoji pictures of size 4 cannot be drawn well: choose 16 to 2048 pixels."),
        (lambda _: build_vocabulary([], min_count=0), "min_count=0 is out of range: give at least 1."),
        (lambda _: pick_device("gpu"), "there is no device 'gpu': choose auto, cuda, cuda:1, mps or cpu."),
        (lambda _: Regions(4, 4, drop=1.0),
         "drop=1.0 is not a dropping rate: give a number in [0, 1), such as 0.2."),
        (lambda _: load_dual("lite0+minilm", lora=4),
         "lite0+minilm has no adapters for LoRA: use a CLIP model, as in hf:ID."),
        (lambda _: TokenTransformer(8, depth=-1),
         "depth is -1: give 0 or more."),
        (lambda _: TokenTransformer(8, heads=3),
         "dim=8 does not divide over 3 heads: choose a multiple of them."),
        (lambda _: load_judgements("mine"),
         "there is no set of judgements 'mine': use eccv, cxc, coco, a file of corrections (.csv) or module:Class."),
        (lambda _: retrieval_metrics(torch.zeros(1, 1), [0], ties="random"),
         "ties='random' is unknown: choose one of index, strict, expected, pessimistic."),
        (lambda _: protocol_named("coco"),
         "there is no protocol 'coco': did you mean coco-5k?"),
        (lambda _: Report(()), "a report needs at least one group of metrics: give an evaluator."),
        (lambda _: Report((Group("x", {"a": 1.0}, "a", Facts({})), Group("y", {"a": 2.0}, "a", Facts({})))),
         "two evaluators return a metric called 'a': give each of them names of its own."),
        (lambda _: Group("sts", {"spearman": 1.0}, "kendall", Facts({})),
         "the evaluator 'sts' names the metric 'kendall': its metrics are spearman."),
        (lambda _: evaluate_scores(np.eye(2), [0, 1], judgements=["eccv"]),
         "judgements need the ids of captions: pass these in place of image_of."),
        (lambda _: evaluate_scores(np.eye(2), [0, 1], protocol=["plain", "plain"]),
         "the protocol plain is named twice: name it once."),
        (lambda _: evaluate_scores(np.eye(2), [0, 1], protocol=[]),
         "the list of protocols is empty: name one, such as plain."),
        (lambda p: evaluate_vectors(p / "out", protocol=["plain", "coco-5k"]),
         "vectors are ranked under one protocol at a time: give one."),
        (lambda p: evaluate_vectors(p / "out", protocol="coco-1k"),
         "the protocol coco-1k ranks 5 folds by themselves, these ranks are of the whole gallery: use plain."),
        (lambda p: EmbeddedIndex.create(p / "new", 0),
         "an index cannot hold vectors of 0 dimensions: the engine embedded takes 1 to 16777216."),
        (lambda p: EmbeddedIndex.create(p / "new", 24, precision="int3"),
         "an index of the engine embedded stores float32 or float16 or binary, not the precision 'int3': choose one of "
         "these, or another engine."),
        (lambda _: halves(np.full((1, 2), 1e5, np.float32)),
         "a vector has the value 100000, beyond float16: store this index as float32."),
        (lambda _: read_address("milvus://db/x?colour=red"),
         "a Milvus URL has no option 'colour': the options are consistency, index, replicas, partitions, "
         "partition_by."),
        (lambda _: read_address("milvus://db/x?index=ivf"),
         "index='ivf' in the Milvus URL is unknown: choose flat, hnsw, diskann."),
        (lambda _: read_address("milvus://db/x?replicas=0"),
         "replicas='0' in the Milvus URL is out of range: give a number from 1 to 1000."),
        (lambda _: read_address("milvus:///x"),
         "the Milvus URL cannot be read: write milvus://user:password@host:port/name, and what is special in"
         " a password as its code (/ as %2F, @ as %40, % as %25)."),
        (lambda _: read_address("milvus://db/1a"),
         "'1a' in the Milvus URL is not a name for an index: use letters, digits and _, at most 100, and no "
         "digit at its beginning."),
        (lambda _: read_address("milvus://db/x?partitions=8"),
         "partitions= and partition_by= go together in a Milvus URL: write, for instance, "
         "partitions=64&partition_by=shop."),
        (lambda _: read_address("milvus://db/x?partitions=8&partition_by=path"),
         "partition_by='path' in the Milvus URL is not a metadata column: name one that filters read."),
        (lambda _: open_index("redis://localhost/x"),
         "there is no engine for URLs of the scheme 'redis': use postgresql, postgres, milvus or the path of a "
         "folder."),
        (lambda _: Database("postgresql://me:1/ss@host/db"),
         "the database URL cannot be read: write postgresql://user:password@host:port/database?index=name, "
         "and what is special in a password as its code (/ as %2F, @ as %40, % as %25)."),
        (lambda _: SGR(12, 6, steps=0), "the number of SGR's steps is 0: give 1 or more."),
        (lambda _: Contrast(diversity="variance"),
         "diversity is 'variance': choose std, std_reversed, std_supplement, entropy, none."),
        (lambda _: InfoNCE(temperature=0.0), "the temperature is 0.0: it must be greater than 0."),
        (lambda _: InfoNCE(same_image="maybe"),
         "same_image is 'maybe': choose positive, ignored, negative."),
        (lambda _: InfoNCE(reduction="sum"), "reduction is 'sum': choose per_row, per_entry."),
        (lambda _: LabelLoss("mse"), "the label loss is 'mse': choose logistic, bce."),
        (lambda _: PrototypeClassification(0, 8, 12), "the number of prototypes is 0: give 1 or more."),
        (lambda _: PrototypeClassification(20, 8, 12),
         "20 prototypes are more than the 12 training pairs: give --clusters 12 or fewer."),
        (lambda _: CoupledQueue(0, 2),
         "a queue of 0 rows of 2 numbers cannot hold anything: both must be at least 1."),
        (lambda _: UniModalSoftLabels(divergence="js"), "the divergence is 'js': choose kl, ce."),
        (lambda _: CrossModalSoftLabels(mode="both"),
         "the mode of the soft labels is 'both': choose each, add, dot."),
        (lambda _: check_fixed("gem", GeM(), "trains the scores of pairs, not pooled vectors"),
         "pooling 'gem' has weights, this recipe trains the scores of pairs, not pooled vectors: use mean, "
         "max, kmax or first."),
        (lambda _: Triplet(margin=-0.1), "the triplet margin is -0.1: give 0 or more."),
        (lambda _: Triplet(negatives="semi-hard"), "negatives is 'semi-hard': choose hardest, all."),
        (lambda _: Demand(items=1000, dim=0), "--dim 0 is no amount: give 1 or more."),
        (lambda _: TrainingSettings(batch_size=1), "--batch_size is 1: it must be at least 2."),
        (lambda _: TrainingSettings(precision="half"),
         "--precision is 'half': choose no, bf16, fp16."),
        (lambda _: from_json(TrainingSettings, {"learning_rat": 1}),
         "there is no setting called learning_rat: did you mean learning_rate?"),
        (lambda _: from_json(TrainingSettings, {"qqq": 1}),
         "there is no setting called qqq: docs/recipes.md lists those of each recipe."),
        (lambda _: parse_part("4"), "--shard 4 names no part: parts of 4 are called 1/4, 2/4, 3/4 and 4/4."),
        (lambda _: Limits(k=0), "the limit k=0 lets nothing pass: give at least 1."),
        (lambda p: table(p, b"image,text\na.png,x\n", empty="keep"),
         "empty='keep' is unknown: say 'error' to refuse or 'drop' to skip them."),
        (lambda p: table(p, b"image,text\na.png,x\n", colour="red"),
         "the format 'manifest' has no option 'colour': it has images, empty, image, text, "
         "instances, unlabelled, corrections."),
        (lambda p: add_noise(open_captions(corrected_table(p)), "0.4"),
         "--noise is '0.4': give a ratio and its unit, such as 0.4:text or 0.4:image, or a file .npy."),
        (lambda p: add_noise(open_captions(corrected_table(p)), "4:text"),
         "--noise is '4:text': the ratio is a share of the texts, from 0 to 1."),
        (lambda _: Claim.read("most"),
         "--claimed most is no number: give 81.7, or image_to_text_recall@1=81.7."),
        (lambda _: audit("photos?corrections=c.csv"),
         "an audit looks at the data as they are: leave out ?corrections."),
        (lambda p: index(p).search(ROW, 0),
         "k, the number of hits, is out of range: it must be at least 1, not 0."),
        (lambda _: parse_objective("own + info_nec", Triplet(), None),
         "--objective 'own + info_nec', character 7: there is no objective 'info_nec': did you mean info_nce?"),
        (lambda _: parse_objective("own - dcl", Triplet(), None),
         "--objective 'own - dcl', character 5: '-' cannot be read: write a sum such as own + 0.5*dcl(epsilon=0.2)."),
        (lambda _: parse_objective("own dcl", Triplet(), None),
         "--objective 'own dcl', character 5: 'dcl' cannot stand here: write + between terms."),
        (lambda _: parse_objective("own + ", Triplet(), None),
         "--objective 'own + ', character 7: a term is missing: write a name, such as dcl."),
        (lambda _: parse_objective("dcl + 2*dcl", Triplet(), None),
         "--objective 'dcl + 2*dcl', character 9: 'dcl' stands here a second time: add up its weights."),
        (lambda _: parse_objective("own(margin=1)", Triplet(), None),
         "--objective 'own(margin=1)', character 1: own is the recipe's loss and takes no argument: change the "
         "recipe's settings."),
        (lambda _: parse_objective("dcl(epsilom=1)", Triplet(), None),
         "--objective 'dcl(epsilom=1)', character 5: dcl has no argument 'epsilom': did you mean epsilon?"),
        (lambda _: parse_objective("dcl(epsilon=std)", Triplet(), None),
         "--objective 'dcl(epsilon=std)', character 5: epsilon of dcl is 'std': give a number."),
        (lambda _: parse_objective("dcl(positive=3)", Triplet(), None),
         "--objective 'dcl(positive=3)', character 5: positive of dcl is 3: give clamp, relu, raw."),
        (lambda _: parse_objective("dcl(epsilon=0)", Triplet(), None),
         "--objective 'dcl(epsilon=0)', character 1: epsilon is 0: it must be greater than 0."),
        (lambda _: parse_objective("dcl(epsilon=1", Triplet(), None),
         "--objective 'dcl(epsilon=1', character 14: the bracket at character 4 is never closed: add ')'."),
        (lambda _: parse_objective("dcl)", Triplet(), None),
         "--objective 'dcl)', character 4: this bracket closes none: leave it out."),
        (lambda _: parse_objective("2 dcl", Triplet(), None),
         "--objective '2 dcl', character 3: 'dcl' follows the weight 2: write 2*NAME."),
        (lambda _: parse_objective("-1*dcl", Triplet(), None),
         "--objective '-1*dcl', character 1: the weight -1 is negative: give 0 or more."),
        (lambda _: parse_objective("", Triplet(), None),
         "--objective '', character 1: there is no term: write own, or a sum such as own + 0.5*dcl."),
        (lambda _: pick_precision("fp8", torch.device("cpu")),
         "the precision 'fp8' is unknown: choose no, half, bf16, fp16."),
        (lambda _: pick_precision("fp16", torch.device("cpu")),
         "--precision fp16 needs a GPU: use 'no' or 'bf16' on a CPU."),
        (lambda _: parse_part("5/4"),
         "--shard 5/4 names no part: parts of 4 are called 1/4, 2/4, 3/4 and 4/4."),
        (lambda _: TrainingSettings(learning_rate=-1.0), "--learning_rate is -1.0: it must be at least 0."),
        (lambda _: TrainingSettings(learning_rate=float("nan")), "--learning_rate is nan: give a number."),
        (lambda _: POOLINGS.find("acmee:Pool"),
         "there is no module 'acmee' for the pooling 'acmee:Pool': install its package or put its folder on "
         "PYTHONPATH."),
        (lambda _: POOLINGS.find("os:getcwdd"),
         "the module 'os' has no 'getcwdd' for the pooling 'os:getcwdd': name a class that it defines."),
        (lambda _: POOLINGS.find("os:Abort"),
         "the module 'os' has no 'Abort' for the pooling 'os:Abort': did you mean abort?"),
        (lambda _: POOLINGS.find("os:abort"),
         "os:abort is no pooling: name a class derived from diptych.aggregators.Aggregator."),
        (lambda _: POOLINGS.check_saved("acmee:Pool"),
         "the saved settings name the pooling 'acmee:Pool', and a file does not make its module run: give the flag "
         "again, or set DIPTYCH_PLUGINS=acmee."),
        (lambda _: POOLINGS.__setitem__("mean", "os:abort"),
         "there is a pooling 'mean' already: give the one that a plugin adds another name."),
        (lambda _: call(lambda margin: None, "the objective mine"),
         "the objective mine needs the argument 'margin', which is no setting here: give it a default value."),
        (lambda _: compare_reports([], Report((GROUP,))),
         "a comparison has two sides: give at least one result for each."),
        (lambda _: compare_reports(Report((GROUP,)), Report((Group("y", {"b": 1.0}, "b", Facts({})),))),
         "these results have no group in common (x and y): evaluate both alike."),
        (lambda _: compare_reports(Report((GROUP,)), Report((GROUP,)), ["colour"]),
         "allow names 'colour', which is not a protocol field: these are data."),
        (lambda _: compare_reports(
            Report((GROUP,)), Report((Group("x", {"a": 1.0}, "a", Facts({"data": "photos"})),))),
         "these results are not comparable: their data differs (emoji and photos); evaluate both alike."),
        (lambda p: open_model(p, backend="tpu"), "there is no backend 'tpu': choose torch or onnx."),
        (lambda p: open_model(p, "cuda", backend="onnx"),
         "the backend onnx computes in float32 on the CPU: leave out --device and --compute_precision, or use "
         "--backend torch."),
        (lambda p: serve(p, p, port=70000),
         "port 70000 does not exist: choose one from 1 to 65535, or 0 for a free one."),
        (lambda p: serve(p, p, host="0.0.0.0"),
         "other machines can reach 0.0.0.0: give a token (--token), or bind to 127.0.0.1."),
        (lambda p: serve(p, p, private=True), "a private service needs a token: give one (--token)."),
        (lambda p: serve(p, p, private=True, token="a" * 32, audit=(b"", "")),
         "a browser opens the page of an audit without a token: open its file, or serve on loopback."),
        (lambda p: judge([p / "a.npy"] * 3, corrected_table(p), split="train"),
         "3 files: give a score matrix (.npy), the vectors of images and of texts (two .npy), or one or two TREC "
         "runs."),
    ],
    DataError: [
        (lambda p: trec(p, "a.png Q0 a.png#0 1 high me\n"),
         "FOLDER/r.txt, line 1 is not 6 words with a finite number at place 5: correct the line."),
        (lambda p: trec(p, "a.png Q0 z.png#0 1 0.5 me\n"),
         "FOLDER/r.txt, line 1: FOLDER/m.csv has no 'z.png#0' among its texts: give its own ids."),
        (lambda p: trec(p, "a.png Q0 a.png#0 1 0.5 me\n" * 2),
         "FOLDER/r.txt, line 2: the pair is listed twice: keep one line for each pair."),
        (lambda p: trec(p, "a.png Q0 a.png#0 1 0.5 me\n"),
         "FOLDER/r.txt lists 1 items for 'a.png': list 2 for each."),
        (lambda p: read_qrels(put(p, "q.txt", "a.png 0 a.png#0 0\n"), open_captions(corrected_table(p)), "images"),
         "FOLDER/q.txt has no relevant pair: give lines 'query 0 item 1'."),
        (lambda p: read_qrels(p / "q.txt", open_captions(corrected_table(p)), "images"),
         "FOLDER/q.txt cannot be read ([Errno 2] No such file or directory: 'FOLDER/q.txt'): give a text file."),
        (lambda p: read_page(put(p, "audit.html", b"<html>")),
         "FOLDER/audit.html is no page of an audit, or that of another version: run diptych audit again."),
        (lambda p: read_page(p / "audit.html"),
         "cannot read FOLDER/audit.html (No such file or directory): give the page of diptych audit."),
        (lambda p: read_corrections(put(p, "c.csv", "image,text\n")),
         "FOLDER/c.csv has the columns image,text: corrections have image_id,text_id,verdict,by,data."),
        (lambda p: corrections(p, "a.png,a.png#0,matches,me,HASH\n"),
         "FOLDER/c.csv says 'matches' of image 'a.png' and text 'a.png#0', which are a pair of FOLDER/m.csv: 'keep' "
         "and 'wrong' are for pairs, 'matches' is for other images."),
        (lambda p: foreign_vectors(p),
         "the vectors are not those of this model: 1 picture encoded again, worst cosine 0.0000 with them "
         "(at least 0.999 is needed), nothing was imported; name the model that made them, or "
         "give --unchecked if it prepared its pictures in another way."),
        (lambda p: fitted_scores(
            MatrixScores(np.eye(3)), table(p, b"image,text\na.png,x\nb.png,y\n"), 1000),
         "the scores are 3 × 3, but FOLDER has 2 images and 2 texts: give the scores (images, texts) of this "
         "split."),
        (lambda p: vanished(p).check_there(),
         "FOLDER/gone disappeared while it was read; nothing was removed: bring it back and run the same "
         "command again, it continues."),
        (lambda p: filled(p, 4),
         "these vectors have 4 dimensions, FOLDER/x.index holds vectors of 3: they are not those of its "
         "model; embed again, or use another place."),
        (lambda _: check_clash(["b", "a"]),
         "the index already has another item with the id 'a': index it into another place."),
        (lambda p: noisy(p, np.arange(3)),
         "FOLDER/n.npy has 3 rows for the 2 texts and 2 images of the training split of FOLDER/m.csv: give the noise "
         "file of this data."),
        (lambda p: noisy(p, np.array([0, 2])),
         "FOLDER/n.npy names image row 2, and the training split of FOLDER/m.csv has rows 0 to 1: give the noise file "
         "of this data."),
        (lambda p: noisy(p, np.zeros(2)),
         "FOLDER/n.npy holds float64 of shape (2,): noise is a list of image rows."),
        (lambda p: corrections(p, "a.png,a.png#0,wrong,me,f00d\n"),
         "FOLDER/c.csv corrects other data (f00d) than FOLDER/m.csv: give the corrections of this data."),
        (lambda p: corrections(p, "z.png,a.png#0,wrong,me,HASH\n"),
         "FOLDER/c.csv names the image 'z.png', which FOLDER/m.csv does not have: give the corrections of this data."),
        (lambda p: corrections(p, "a.png,a.png#0,wrong,me,HASH\na.png,a.png#0,keep,me,HASH\n"),
         "FOLDER/c.csv says both 'wrong' and 'keep' of image 'a.png' and text 'a.png#0': keep one of them."),
        (lambda p: corrections(p, "a.png,a.png#0,bad,me,HASH\n"),
         "FOLDER/c.csv has the verdict 'bad': use keep, wrong, unsure, matches."),
        (lambda _: split_options("photos?text=a&text=b"),
         "photos?text=a&text=b gives text twice: give it once."),
        (lambda p: audit(str(corrected_table(p))),
         "FOLDER/m.csv has 2 pairs of 2 images: an audit needs at least 200 pairs of 25 images, for what is usual is "
         "learned from the rest."),
        (lambda p: ArrayStore(p / "o.npy"), "FOLDER/o.npy does not exist: check the path."),
        (lambda p: ArrayStore(p),
         "FOLDER is not a numpy array file ([Errno 21] Is a directory: 'FOLDER'): write it with numpy.save."),
        (lambda _: clean_caption("?!"),
         "the text '?!' has no words: correct it, or train with --no_clean_captions."),
        (lambda p: read_pickle(p / "no.pkl"), "FOLDER/no.pkl does not exist: check the path."),
        (lambda p: open_captions(p / "coco_precomp", format="karpathy"),
         "FOLDER/coco_precomp is not in the format 'karpathy': expected dataset_coco.json or "
         "dataset_flickr30k.json and images."),
        (lambda p: open_captions(p / "hf"),
         "FOLDER/hf does not exist: give the path of a data set, or 'emoji', the built-in one."),
        (lambda p: open_captions(p),
         "FOLDER holds no picture and no data set that is known: give a folder of pictures, a table of "
         "images and texts, or what 'diptych data formats' lists."),
        (lambda _: RegionInput(8)([np.ones((3, 4))]),
         "region features have 4 dimensions, this model reads 8: give features of that size, or build the "
         "model with dim=4."),
        (lambda _: Labels(["sky", "sky"]), "a label vocabulary names a label twice: give each label once."),
        (lambda _: Labels(["sky"]).matrix([["fog"]], ["a.png"]),
         "the label 'fog' of 'a.png' was not seen in training: the model knows 'sky'; remove the label, or "
         "train on data that have it."),
        (lambda p: read_vocabulary(p / "none.json"),
         "the vocabulary FOLDER/none.json does not exist: check the path."),
        (lambda p: open_class_list(p / "no"),
         "FOLDER/no is not a folder: give the folder of CUB, SOP, In-Shop or iNaturalist."),
        (lambda p: open_class_list(p),
         "FOLDER is not a known list of classes (none of Ebay_test.txt, Eval/list_eval_partition.txt, "
         "Inat_dataset_splits/Inaturalist_test_set1.txt, images/001.Black_footed_Albatross): give its own "
         "folder."),
        (lambda _: class_recall(torch.ones(1, 2), np.array([0])),
         "1 items are too few to look for neighbours: give at least 2."),
        (lambda _: judge_lists({0: [1, 2]}, {4: {1}}),
         "query 4 is judged but was not ranked: rank every judged query."),
        (lambda _: judge_lists({0: [1, 2]}, {0: set()}),
         "query 0 has no relevant item: leave it out of the judgements."),
        (lambda _: judge_lists({0: [1, 2]}, {0: {1, 2, 3}}),
         "the list of query 0 has 2 items, but 3 are relevant: rank at least 3, a shorter list would flatter"
         " the model."),
        (lambda p: load_judgements("eccv", p),
         "FOLDER/original_image_to_caption.json is missing: give a folder with the files of eccv-caption."),
        (lambda _: count_ranks(torch.zeros(2, 3), [0, 1]),
         "image_of is int64 of shape (2,) for 3 texts: give the image row of each."),
        (lambda _: count_ranks(torch.zeros(2, 3), [0, 1, 2]),
         "image_of reaches from 0 to 2, but there are 2 images: count from 0."),
        (lambda _: EvaluationProtocol("odd", folds=3).check(np.arange(4), 4),
         "4 images do not divide into 3 folds: use the protocol plain."),
        (lambda p: Report.load(p / "r.json"),
         "FOLDER/r.json cannot be read (No such file or directory): give a saved report."),
        (lambda p: read_senteval(p / "no"),
         "FOLDER/no is no folder: give the one that holds downstream/STS and downstream/SICK."),
        (lambda p: read_senteval(p),
         "FOLDER holds no downstream/STS and no downstream/SICK: give the folder that SentEval calls data."),
        (lambda _: count_ranks(torch.zeros(6), [0]), "scores have shape (6,): they must be (images, texts)."),
        (lambda _: MeanScores([]), "an ensemble needs at least one member."),
        (lambda _: EmbeddingScores(torch.zeros(2, 3), torch.zeros(2, 4)),
         "image vectors (2, 3) and text vectors (2, 4) do not go together: encode both with one model, as "
         "(N, D) and (M, D)."),
        (lambda p: evaluate_vectors(p / "out"),
         "FOLDER/out holds no vectors (no manifest.json): give the folder that diptych embed wrote."),
        (lambda p: table(p, b"image,text\na.png,x\nb.png,caf\xe9\n"),
         "FOLDER/m.csv:3: not UTF-8 (byte 10): save the file as UTF-8."),
        (lambda p: table(p, b"image,text\na.png,x,y\n"),
         "FOLDER/m.csv:2: the row has 3 fields: the header names 2; quote a field that holds the delimiter."),
        (lambda p: table(p, b"image,text\n,x\n"),
         "FOLDER/m.csv:2: column 'image' is '': name a file, relative to the image folder."),
        (lambda p: table(p, b"image,text\nhttps://e.org/a.png,x\n"),
         "FOLDER/m.csv:2: 'https://e.org/a.png' is an address: download the images first."),
        (lambda p: table(p, b"image,text,split\na.png,x,train\na.png,y,test\n"),
         "FOLDER/m.csv:3: image 'a.png' is in two splits, train and test: leave it in one of them."),
        (lambda p: table(p, b"image,text,image_id\na.png,x,1\nb.png,y,1\n"),
         "FOLDER/m.csv:3: image id '1' names two images, a.png and b.png: give each image its own id."),
        (lambda p: table(p, b"image,text\nmissing.png,x\n"),
         "FOLDER: 1 of 1 images are missing (FOLDER/missing.png): put the images under FOLDER, or name their"
         " folder with PATH?images=FOLDER."),
        (lambda p: table(p, b"image,text\n"),
         "FOLDER: it has a header but no rows: write one row per image or text."),
        (lambda p: table(p, b"image,text\na.png,\n", empty="error"),
         "FOLDER/m.csv:2: a text of 'a.png' is empty: write a text or remove the line, or leave such"
         " texts out with PATH?empty=drop."),
        (lambda p: table(p, b"image,text\na.png,x\n").split("test"),
         "FOLDER has no split 'test': its splits are train."),
        (lambda p: regions(p, "train_ims.npy", None),
         "FOLDER/toy_precomp/train_ims.npy: it does not exist: a float array (images, 36, 2048) or "
         "(images, D) for 2 images."),
        (lambda p: regions(p, "train_caps.txt", None),
         "FOLDER/toy_precomp/train_caps.txt: the file does not exist: one text per line, 5 per image."),
        (lambda p: regions(p, "train_ims.npy", b"junk"),
         "FOLDER/toy_precomp/train_ims.npy is not a numpy array file (EOF: reading magic string, expected 8 "
         "bytes got 4): write it with numpy.save."),
        (lambda p: regions(p, "train_caps.txt", b"one\ntwo\nthree\n"),
         "FOLDER/toy_precomp/train_ims.npy: 2 rows but 3 texts in train_caps.txt: 5 texts per image need one"
         " row per image (texts = 5 × rows) or every image 5 times (texts = rows, a multiple of 5); for "
         "other numbers write train_image_of.txt, the row of each text's image."),
        (lambda p: regions(p, "train_caps.txt", b"one\nt\xffwo\n" * 5),
         "FOLDER/toy_precomp/train_caps.txt:2: not UTF-8 (byte 2): save the file as UTF-8."),
        (lambda p: regions(p, "train_caps.txt", b"one\n\n" * 5),
         "FOLDER/toy_precomp/train_caps.txt:2: a text of 'train/0' is empty: write a text or remove "
         "the line, or leave such texts out with PATH?empty=drop."),
        (lambda p: regions(p, "train_ids.txt", b"1\n"),
         "FOLDER/toy_precomp/train_ids.txt: 1 ids for 2 images: one per image or one per text (10)."),
        (lambda p: open_captions(put(p, "corpora.json", '{"corpora": []}')),
         'FOLDER/corpora.json: "corpora" must be a list with at least one corpus.'),
        (lambda p: open_captions(put(p, "corpora.json", '{"corpora": [{"name": "x"}]}')),
         'FOLDER/corpora.json, corpus 1: it needs a "path": a folder, a tar or a pattern of tars.'),
        (lambda p: open_captions(put(p, "corpora.json", '{"corpora": [{"path": "a.tar", "wieght": 2}]}')),
         'FOLDER/corpora.json, corpus 1: there is no field "wieght": its fields are path, name, weight, '
         "texts, split, images."),
        (lambda p: open_captions(put(p, "corpora.json", '{"corpora": [{"path": "a.tar", "weight": 0}]}')),
         'FOLDER/corpora.json, corpus 1: "weight" is 0: give the passes over it in an epoch, more than 0.'),
        (lambda p: open_captions(put(p, "corpora.json", '{"corpora": [{"path": "nowhere"}]}')),
         "FOLDER/corpora.json, corpus 1: FOLDER/nowhere holds no tar: give tars, or another data set."),
        (lambda p: open_captions(put(p, "Train_GCC.tsv", "a dog\thttp://x/a.jpg\n")),
         "FOLDER/Train_GCC.tsv: none of the 1 pictures is on disk: download them, and name their folder with "
         "PATH?images=FOLDER."),
        (lambda p: stored_features(p, [p / "a.jpg"]),
         "FOLDER holds no features, and this model reads no pictures: put *_ims.npy and *_ids.txt there."),
        (lambda p: stored_features(put(p, "x_ims.npy", np.ones((2, 1, 4), np.float32)).parent, [p / "a.jpg"]),
         "FOLDER/x_ids.txt has 0 names for the 2 rows of x_ims.npy: write one per row."),
        (lambda p: open_captions(put(p, "train-0.tar", b"junk")),
         "FOLDER/train-0.tar: the tar is truncated or damaged (truncated header): it has 4 bytes; copy it "
         "again."),
        (lambda p: open_captions(put(p, "x.parquet", b"junk")),
         "FOLDER/x.parquet is not a whole Parquet file (Parquet file size is 4 bytes, smaller than the "
         "minimum file footer (8 bytes)): copy it again."),
        (lambda _: Captions("made", ArrayStore(np.zeros((2, 3))), ["a", "b"], ["one"], np.array([0, 1])),
         "data: 4 images, 1 ids, 2 splits: give one each."),
        (lambda _: Captions("made", ArrayStore(np.zeros((2, 3))), ["a"], ["one"], np.array([0])),
         "data: 2 texts, image_of has 1: give one each."),
        (lambda _: Captions("made", ArrayStore(np.zeros((2, 3))), ["a", "a"], ["one"], np.array([0])),
         "data: 4 images, 1 ids, 1 splits: give one each."),
        (lambda p: ArrayStore(put(p, "a.npy", np.ones(50, np.float32), cut=8)),
         "FOLDER/a.npy is truncated: shape (50,) of float32 needs 328 bytes, it has 320: copy or extract it "
         "again."),
        (lambda p: ArrayStore(put(p, "a.npy", np.array([None, {}]))),
         "FOLDER/a.npy holds pickled objects, not numbers: save it as a plain float array."),
        (lambda p: ArrayStore(put(p, "a.npy", np.float32(1))),
         "FOLDER/a.npy holds a single number: give a row per image."),
        (lambda p: ArrayStore(put(p, "a.npy", np.asfortranarray(np.ones((2, 2))))),
         "FOLDER/a.npy is in Fortran order: save it again after numpy.ascontiguousarray."),
        (lambda p: read_pickle(put(p, "a.pkl", b"cos\nsystem\n.")),
         "FOLDER/a.pkl is not a pickle of plain arrays (it refers to os.system, which is not an array): it "
         "was not read."),
        (lambda p: read_pickle(put(p, "a.pkl", b"")),
         "FOLDER/a.pkl is not a pickle of plain arrays (it ends early): it was not read."),
        (lambda p: read_vocabulary(put(p, "v.json", "{")),
         "FOLDER/v.json is no vocabulary in JSON (Expecting property name enclosed in double quotes: line"
         " 1 column 2 (char 1)): convert a .pkl first."),
        (lambda p: read_vocabulary(put(p, "v.json", '{"idx": 3}')),
         "FOLDER/v.json: this vocabulary has no 'word2idx' table: give the published JSON or a list."),
        (lambda p: word_vectors(["dog"], put(p, "g.txt", "the 1 2 3\ndog 1 2\n")),
         "FOLDER/g.txt:2 has 2 numbers, not 3: copy it again."),
        (lambda p: word_vectors(["dog"], put(p, "g.txt", "the 1 2 3\ndog 1 2 x\n")),
         "FOLDER/g.txt:2 holds what is not a number (could not convert string to float: 'x'): copy it again."),
        (lambda p: word_vectors(["dog"], put(p, "g.txt", "the 1 2 3\n")),
         "none of 1 words is in FOLDER/g.txt: give vectors of their language."),
        (lambda p: Report.load(put(p, "r.json", "{}")),
         "FOLDER/r.json is not a saved report ('format'): evaluate again."),
        (lambda p: Report.load(put(p, "r.json", '{"format": 99}')),
         "FOLDER/r.json has format 99, this version reads 2: update diptych."),
        (lambda p: index(p).search(ROW * np.nan),
         "row 0 of the query holds NaN or infinity: check the model and its input."),
        (lambda p: index(p).add([Item("b"), Item("b")], np.stack([ROW, ROW])),
         "the id 'b' is empty or comes more than once: ids must be unique names."),
        (lambda p: index(p).add([Item("b")], np.stack([ROW, ROW])),
         "1 items came with 2 vectors: give one vector per item."),
        (lambda p: index(p).add([Item("b", metadata={"x": {"y": 1}})], ROW[None]),
         "item 'b' has a dict in column 'x': metadata values are numbers, texts, true, false, null, or lists"
         " of these."),
        (lambda p: index(p).add([Item("b", metadata={"x": float("nan")})], ROW[None]),
         "item 'b' has nan in column 'x': use null for a missing number."),
        (lambda p: index(p).add([Item("b")], np.full((1, 3), np.inf)),
         "row 0 of the vectors to add holds NaN or infinity: check the model and its input."),
        (lambda _: Column(np.array([0.0, np.nan, 1.0]), "image").check("kind", "toy", 3, 5),
         "target 'kind' is missing for 1 images of toy, the first is number 1: give it for all of them, or "
         "leave these images out."),
        (lambda _: evaluate_scores(torch.full((2, 2), torch.nan), [0, 1]),
         "the score of image 0 and text 0 is NaN: the model has diverged."),
        (lambda _: open_captions("emoji", format="karpathy"),
         "emoji is not in the format 'karpathy': expected dataset_coco.json or dataset_flickr30k.json and "
         "images."),
    ],
    AddressError: [
        (lambda _: download("ftp://example.org/a.jpg", 100, inf),
         "ftp://example.org/a.jpg is not a web address: write it as https://host/path."),
        (lambda _: download("http://127.0.0.1/a.jpg", 100, inf),
         "127.0.0.1 is not on the public internet: give the image itself instead."),
        (lambda _: download("http://[::1/a.jpg", 100, inf),
         "http://[::1/a.jpg is not a web address (Invalid IPv6 URL): check how it is written."),
    ],
    ImageError: [
        (lambda _: open_image(b"<svg>" + b" " * 20_000_000, name="a.svg"),
         "a.svg is an SVG of more than 20 MB: simplify it."),
        (lambda _: open_image(b'<svg><image href="b.png"/></svg>', name="a.svg"),
         "a.svg is an SVG that refers to other files, which are not opened: embed them."),
        (lambda p: open_image(p / "a.svg"), "FOLDER/a.svg does not exist: check the path."),
        (lambda p: open_image(p), "FOLDER is a folder: give the path of one image."),
        (lambda _: open_image(b'junk', name="train.tar/7.jpg"),
         "train.tar/7.jpg is not an image that can be read: convert it to one of JPEG, PNG, WEBP, GIF, BMP, "
         "TIFF, PPM, AVIF, or remove it."),
        (lambda p: Video(p / "gone.mp4"), "FOLDER/gone.mp4 does not exist: check the path."),
        (lambda p: open_image(put(p, "empty.png", b"")),
         "FOLDER/empty.png is empty (0 bytes): copy it again, or remove it."),
        (lambda p: open_image(put(p, "a.jpg", b"\xff\xd8\xff junk")),
         "FOLDER/a.jpg is not an image that can be read: convert it to one of JPEG, PNG, WEBP, GIF, BMP, "
         "TIFF, PPM, AVIF, or remove it."),
        (lambda _: open_image(png(40, 30), name="mine", max_pixels=100),
         "mine claims 40×30 = 1,200 pixels, more than the limit of 100: shrink it."),
    ],
    CheckpointError: [
        (lambda p: read_run(p),
         "FOLDER is no run (no run.json): give the --output_dir of a training."),
        (lambda p: Retriever.from_pretrained(p / "nowhere"),
         "FOLDER/nowhere does not exist: give the folder of a trained run."),
        (lambda p: Retriever.from_pretrained(p),
         "FOLDER is not a model folder (no config.json): give the folder of a trained run."),
        (lambda p: Retriever.from_pretrained(put(p, "run.json", "{}").parent),
         "the run FOLDER has no model yet: resume its training with --resume_from_checkpoint FOLDER."),
        (lambda p: Retriever.from_pretrained(put(p, "config.json", "{").parent),
         "FOLDER/config.json is damaged (Expecting property name enclosed in double quotes: line 1 column 2 "
         "(char 1)): copy the model again."),
        (lambda p: Retriever.from_pretrained(put(p, "config.json", '{"format": 99}').parent),
         "FOLDER/config.json is damaged ('retriever'): copy the model again."),
        (lambda p: read_run(put(p, "run.json", "{").parent),
         "FOLDER/run.json is damaged (Expecting property name enclosed in double quotes: line 1 column 2 "
         "(char 1)): copy the run again."),
    ],
    IndexFault: [
        (lambda p: refuse_model(str(put(p, "config.json", "{}").parent)),
         "FOLDER is a model, not an index: index pictures with it first, as in diptych index FOLDER ./photos."),
        (lambda p: EmbeddedIndex.open(p, writable=True),
         "FOLDER is not an index (no index.db): give the folder that 'diptych index' wrote, or index a "
         "collection there."),
        (lambda p: EmbeddedIndex.create(index(p).path, 3),
         "FOLDER/x.index is already an index: open it, or choose another folder."),
        (lambda p: EmbeddedIndex.create(put(p, "full/x", "").parent, 3),
         "FOLDER/full exists and is not empty: open it, or choose another folder."),
        (lambda p: EmbeddedIndex.open(put(p, "index.db", b"junk" * 999).parent),
         "FOLDER/index.db is damaged or half copied (it has only 3996 bytes): copy the whole index again, or"
         " index the collection again."),
        (lambda p: index(p).search(ROW[:2]),
         "the shape of the query is 1×2, but FOLDER/x.index holds vectors of 3 dimensions: encode with the "
         "model it was made with, 'mine'."),
        (lambda p: index(p).add([Item("a")], ROW[None]),
         "'a' is already in FOLDER/x.index: update it, or delete it first."),
    ],
    QueryError: [
        (lambda _: parse_filter("(" * 60 + "a = 1" + ")" * 60),
         "the filter nests deeper than 50 levels: simplify it."),
        (lambda _: parse_filter("price <"),
         "the filter has a mistake at character 8: it ends there, expected a value: a number, a text in "
         "quotes, true, false or null."),
        (lambda _: parse_filter('color = "red'),
         "the filter opens a quote at character 9 that never closes: close it."),
        (lambda _: parse_filter("a = 1 or " * 10000),
         "the filter has 90000 characters, the limit is 10000: shorten it."),
        (lambda _: parse_filter("   "),
         'the filter is empty: leave it out or write one such as price < 50 and color = "red".'),
        (lambda _: parse_query('"0:red" + "blue"'),
         "the weight 0 at character 1 of the query has no effect: use a number above 0, or leave the term "
         "out."),
        (lambda _: parse_query('"" + "blue"'),
         "the query has an empty term at character 1: put a text or an image there."),
        (lambda _: parse_query("nothing.jpg"),
         "there is no file nothing.jpg (character 1 of the query): check the path, or search for these "
         'letters in double quotes, as in \'"nothing.jpg"\'.'),
        (lambda _: parse_query("a" * 10001),
         "the query has 10001 characters, the limit is 10000: shorten it."),
        (lambda _: parse_query(""), "the query is empty: give a text or the path of an image."),
        (lambda _: parse_query('"red" + - "blue"'),
         "the query has '-' after '+' at character 9: put a text or an image between them."),
        (lambda _: parse_query('"red" blue'),
         "the query has two terms without + or - between them at character 7: join them with one."),
        (lambda _: parse_query('"red" +'),
         "the query ends after '+' at character 7: put a text or an image behind it."),
        (lambda _: parse_query(" + ".join(["a"] * 40)),
         "the query has 40 terms, the limit is 32: shorten it."),
        (lambda _: parse_query('"red'),
         "the query opens a quote at character 1 that never closes: close it."),
        (lambda p: index(p).search(ROW, filter="prise < 3"),
         "unknown column 'prise' at character 1 of the filter: did you mean 'price'? the columns are price "
         "(and id, path, text, image_id)."),
        (lambda p: index(p).search(ROW, filter='price < "3"'),
         "column 'price' at character 1 of the filter holds number values, not text: take the value out of "
         "its quotes."),
        (lambda p: index(p).vectors(["nobody"]),
         "'nobody' is not in the index FOLDER/x.index: check the id."),
        (lambda p: index(p).search(ROW, filter="zzz = 1"),
         "unknown column 'zzz' at character 1 of the filter: check its spelling: the columns are price (and "
         "id, path, text, image_id)."),
        (lambda _: parse_filter("tags = 'red'", {"tags": ["list"]}),
         'column \'tags\' at character 1 of the filter holds list values, not text: write tags contains "red".'),
        (lambda _: parse_filter('sale = "yes"', {"sale": ["boolean"]}),
         "column 'sale' at character 1 of the filter holds boolean values, not text: compare it with a value"
         " of that kind."),
        (lambda _: parse_filter("color = 5", {"color": ["text"]}),
         "column 'color' at character 1 of the filter holds text values, not number: put the value in "
         "quotes."),
    ],
    RuntimeFault: [
        (lambda p: RuntimeModel.open(p),
         "FOLDER has no runtime: write it with diptych export runtime FOLDER, where torch is installed."),
        (lambda p: RuntimeModel.open(put(p / "runtime", "runtime.json", '{"format": 9}').parent.parent),
         "FOLDER/runtime has runtime format 9, this version runs 1: write it again with diptych export "
         "runtime FOLDER, where torch is installed."),
        (lambda p: RuntimeModel.open(put(p / "runtime", "runtime.json", "{").parent.parent),
         "FOLDER/runtime/runtime.json is damaged (Expecting property name enclosed in double quotes: line 1 "
         "column 2 (char 1)): write it again with diptych export runtime FOLDER, where torch is installed."),
        (lambda p: RuntimeModel(p / "runtime", written_from(p)).check_files(),
         "FOLDER/runtime was not written from this config.json: write it again with diptych export runtime "
         "FOLDER, where torch is installed."),
        (lambda p: Probes.read(p / "probes.safetensors"),
         "FOLDER/probes.safetensors is missing: copy the whole model folder."),
        (lambda _: compare(np.eye(2), np.eye(2)[::-1], "the vectors of text.onnx", "copy it again"),
         "the vectors of text.onnx are not those of this model (worst cosine 0.0000 on its probes, at least "
         "0.999 is needed): copy it again."),
    ],
    StorageError: [
        (lambda p: write_text(p, "x"),
         "FOLDER cannot be written, a file or folder of that name is in the way: choose another name."),
        (lambda p: EmbeddedIndex.create(put(p, "file", "x") / "i.index", 4),
         "FOLDER/file/i.index cannot be written, a file or folder of that name is in the way: choose another name."),
        (lambda p: saving(p / "file", OSError(errno.ENOSPC, "full")),
         "the disk is full while saving FOLDER/file: free some space and run again; what was saved is "
         "intact."),
        (lambda p: saving(p / "file", OSError(errno.EROFS, "read only")),
         "FOLDER/file cannot be written (Read-only file system): choose a folder you may write."),
        (lambda p: saving_in_cache(p / "file", OSError(errno.EROFS, "read only")),
         "FOLDER/file cannot be written (Read-only file system): set DIPTYCH_CACHE or XDG_CACHE_HOME to "
         "a folder you may write."),
    ],
    MissingExtra: [
        (lambda _: raising(MissingExtra("timm", "timm", "a timm: backbone")),
         "a timm: backbone needs the package 'timm': install it with pip install 'diptych[timm]'."),
    ],
}

COMMANDS = {
    "ablate vse-infinity":
        "--table is missing: choose one of 1, 2, 3, 4, 5, 6, 7, 8, sides, baselines.",
    "ablate coder --table 2 --vary seed=1,2":
        "--vary seed: every row takes the seeds 0, 1, …: give --seeds N instead.",
    "ablate coder --table 2 --vary epochs=1 --vary epochs=2":
        "two --vary are of epochs: give all its values in one.",
    "ablate vse-infinity --table 4 --data f30k=emoji --row 'VSE∞, BUTD region + grid + BERT'":
        "the table 4 has nothing to measure: give --data coco=PATH and --data coco-grid=PATH, or "
        "--data f30k-grid=PATH.",
    "ablate cusa --table 10 --row SAF":
        "the table 10 has nothing to measure: give --data coco=PATH and --data cub=PATH.",
    "ablate codr": "there is no paper or recipe 'codr': did you mean coder?",
    "export runtim FOLDER": "there is no exporter 'runtim': did you mean runtime?",
    "model verify FOLDER":
        "FOLDER is not a model folder (no config.json): give the folder of a trained run.",
    "search x.index": 'there is nothing to search for: give "two parrots", ./picture.jpg or --like ID.',
    "search x.index dog --reranker FOLDER": "--reranker re-ranks the top N hits: give --rerank N too.",
    "train vse-infinity --data emoji --output_dir FOLDER/run --image_pool meen":
        "there is no pooling 'meen': did you mean mean?",
    "train photos ./pictures": "./pictures needs an option before it: did you mean --data ./pictures?",
    "train rigde --data emoji": "there is no recipe 'rigde': did you mean ridge?",
    "compare FOLDER/plain.json FOLDER/equal.json":
        "FOLDER/plain.json cannot be read (No such file or directory): give a saved report.",
    "evaluate hf:tiny/clip":
        "hf:tiny/clip was not trained here: give --data, the data set to evaluate it on.",
    "index runs/nowhere emoji":
        "runs/nowhere does not exist: give the folder of a trained run, or hf:runs/nowhere for "
        "a model of the hub.",
    "evaluate somebody/clip":
        "somebody/clip does not exist: give the folder of a run, or hf:somebody/clip for a model of the hub.",
    "evaluate FOLDER/nowhere": "FOLDER/nowhere does not exist: give the folder of a run.",
    "evaluate FOLDER": "FOLDER does not say what it was trained on: give --data.",
    "extract FOLDER/stills --frames --output_dir FOLDER/no":
        "FOLDER/stills does not exist: give the path of a data set, or 'emoji', the built-in one.",
    "audit emoji --output_dir /dev/null/x":
        "Invalid value for '--output_dir': /dev/null/x cannot be written: choose another folder.",
    "judge FOLDER/scores.npy --data FOLDER --trec /dev/null/x":
        "Invalid value for '--trec': /dev/null/x cannot be written: choose another folder.",
    "evaluate FOLDER --output /dev/null/x.json":
        "Invalid value for '--output': /dev/null/x.json cannot be written: choose another file.",
    "label FOLDER FOLDER --output FOLDER":
        "Invalid value for '--output': FOLDER cannot be written: choose another file.",
    "show pooling FOLDER --output /dev/null/x.svg":
        "Invalid value for '--output': /dev/null/x.svg cannot be written: choose another file.",
    "search FOLDER dog --html /dev/null/x.html":
        "Invalid value for '--html': /dev/null/x.html cannot be written: choose another file.",
    "search x.index dog --html FOLDER": "Invalid value for '--html': FOLDER cannot be written: choose another file.",
    "export faiss x.index /dev/null/x":
        "Invalid value for 'FILE': /dev/null/x cannot be written: choose another file.",
    "embed lite0+minilm FOLDER /dev/null/x":
        "Invalid value for 'OUT': /dev/null/x cannot be written: choose another folder.",
    "extract FOLDER --outptu_dir FOLDER": "there is no option --outptu_dir: did you mean --output_dir?",
    "serach x y": "there is no command 'serach': did you mean search?",
    "index a b c": "one collection is indexed at a time: leave out c.",
    "index lite0+minilm":
        "lite0+minilm is a model: give the pictures to search too, as in lite0+minilm ./photos.",
    "index inffo x.index": "there is no folder of a trained run 'inffo': did you mean info?",
    "index remove FOLDER/x.index":
        "say what to remove in one way: by ids, --collection, --filter or --missing.",
    "plan --items many --dim 512":
        "Invalid value for '--items': 'many' is not a whole number: write 1000000 or 1e6.",
    "plan --items 0 --dim 512": "--items 0 is no amount: give 1 or more.",
    'search empty "a dog"':
        "empty is no folder: give one of pictures, or an index that 'diptych index' wrote.",
    "show ./photos":
        "No such command './photos': choose one of attention, augmentation, confusions, grids, knowledge, "
        "pooling, space, speed.",
    "search FOLDER dog":
        "FOLDER holds no picture and no data set that is known: give a folder of pictures, a table of images and "
        "texts, or what 'diptych data formats' lists.",
    "search FOLDER dog --preview":
        "--preview shows pictures in a terminal, and the output goes elsewhere: leave it out, or use --html FILE.",
    "search FOLDER dog --preview --json":
        "--json, --paths and --preview cannot be combined: choose one.",
    "search x.index dog --index y.index":
        "x.index holds no pictures to index: leave --index out, or give their folder.",
    "search hf:tiny/clip":
        "hf:tiny/clip is a model: give the pictures to search too, as in hf:tiny/clip ./photos.",
    "search x.index dog --k 5": "there is no option --k: did you mean -k?",
    "search x.index dog --wwwww": "there is no option --wwwww here: choose among those of the help page.",
    "import vse-infinity FOLDER/none.pt FOLDER/out": "FOLDER/none.pt does not exist: check the path.",
    "embed lite0+minilm FOLDER/nowhere FOLDER/out":
        "FOLDER/nowhere does not exist: give the path of a data set, or 'emoji', the built-in one.",
    "evaluate FOLDER --rerank 3": "--rerank N and --reranker RUN go together: give both, or neither.",
    "evaluate FOLDER --protocol sts": "the protocol sts needs --data: give SentEval's data folder.",
    "evaluate FOLDER --protocol sts --data emoji":
        "the protocol sts does not read emoji: give SentEval's data folder.",
    "evaluate FOLDER --protocol hashing --ties strict":
        "the protocol hashing has no rule for ties: leave out --ties.",
    "evaluate FOLDER --hubness val":
        "--hubness val is the split that is evaluated: give another one, such as train.",
    "evaluate FOLDER --hubness_beta 5": "--hubness_beta is the β of --hubness SPLIT: give both, or neither.",
    "evaluate FOLDER --hubness train --rerank 3 --reranker FOLDER":
        "--hubness needs the vectors: leave out --rerank and --score_matrix.",
    "evaluate FOLDER --ray auto":
        "--ray evaluates a folder of vectors: give that of diptych embed.",
    "compare a.json": "one result and no --with: give two, or those of one side, then --with and the others.",
    "compare a.json --with=b.json c.json":
        "c.json does not stand behind --with: write all results of a system behind it, as in --with b1.json "
        "b2.json.",
    "compare a.json --with b.json --split test c.json":
        "c.json does not stand behind --with: write all results of a system behind it, as in --with b1.json "
        "b2.json.",
    "compare a.json --with a.json": "a.json is given twice: give different runs.",
    "serve photos.index photos": "one index is served at a time: leave out photos.",
    "train coder --output_dir FOLDER/run":
        "a new run needs data: give --data, the path of a data set or 'emoji'.",
    "train coder --data emoji":
        "a run needs one folder: give --output_dir for a new run, or --resume_from_checkpoint for an old "
        "one.",
    "train vse-infinity --data emoji --output_dir FOLDER/run --objective 'own + itm'":
        "--objective 'own + itm', character 7: itm reads what a fusion encoder compared, and this model has none: use "
        "the recipe fusion or cusa-fusion.",
    "train vse-infinity --data emoji --output_dir FOLDER/run --objective 'own + dcl(view=nowhere)'":
        "--objective 'own + dcl(view=nowhere)', character 7: dcl reads the view 'nowhere', and this recipe's views "
        "are: none. Besides them there are concepts, uni, augmented and twin.",
    "train --data photos": "main train needs a name before --data: as in main train ridge --data …",
    "train vse-infinity --lr 1": "there is no option --lr: did you mean --learning_rate?",
    "train vse-infinity --freeze-text": "there is no option --freeze_text: did you mean --no_train_text?",
    "train vse-infinity --data emoji --output_dir FOLDER/run --batch_size x":
        "Invalid value for '--batch_size': 'x' is not a valid integer.",
    "train vse-infinity --data emoji --output_dir FOLDER/run --precision half":
        "Invalid value for '--precision': 'half' is not one of 'no', 'bf16', 'fp16'.",
    "ablate --table 3": "main ablate needs a name before --table: as in main ablate coder --table …",
    "ablate vse-infinity --table 9":
        "Invalid value for '--table': '9' is not one of '1', '2', '3', '4', '5', '6', '7', '8', 'sides', 'baselines'.",
    "ablate coder --table 2": "the table 2 has nothing to measure: give --data f30k=PATH.",
    "ablate coder --table 2 --data FOLDER --data emoji":
        "two --data are without a name (FOLDER, emoji): give each its own name.",
    "ablate coder --table 2 --data f30k=FOLDER --data f30k=emoji":
        "two --data are named f30k (FOLDER, emoji): give each its own name.",
    "ablate coder --table 2 --data coco=FOLDER": "the table 2 has no data named 'coco': it takes f30k.",
    "ablate vse-infinity --table 6 --data FOLDER": "the table 6 reads no data: leave out --data FOLDER.",
    "ablate coder --table 2 --data emoji --row nothing":
        "the table has no row 'nothing': its rows are triplet; DCL; + M-DCL; + concept; + prototypes.",
    "ablate coder --table 2 --data emoji --vary epsilon": "--vary epsilon: give a setting and its values, as in "
        "epsilon=0.05,0.1,0.2.",
    "ablate coder --table 2 --data emoji --vary epsilon=high": "epsilon = high: it must be of type float.",
    "ablate coder --table 2 --data emoji --vary epsilom=1": "there is no setting 'epsilom': did you mean epsilon?",
    "ablate coder --table 2 --data emoji --vary colour=a":
        "there is no setting 'colour': use one of the table's flags, as in epochs=10,20.",
    "ablate coder --table 2 --data emoji --direction text":
        "no row of table 2 has the setting direction: leave out --direction.",
    "ablate scan --data emoji": "--vary is missing: give a setting and its values.",
    "ablate coder --table 2 --data emoji --preset nothing":
        "the recipe 'coder' has no preset 'nothing': choose one of paper, f30k-bert, coco-bert, f30k-bigru, "
        "coco-bigru.",
    "train ridge --data emoji --output_dir FOLDER/run --preset paper":
        "the recipe 'ridge' has no preset 'paper': leave out --preset.",
    "train coder --resume_from_checkpoint FOLDER/run --preset paper":
        "a resumed run has its settings: leave out --preset.",
    "watch FOLDER/new.index FOLDER/nowhere": "there is no folder FOLDER/nowhere to watch: check the path.",
    "cache clear --older_than soon":
        "'soon' is not an age: write hours, days or weeks, such as 12h, 30d or 8w.",
}
# fmt: on


CORRECTION = re.compile(r": |\bmust\b|\bneeds?\b|did you mean")
"""What tells how to go on: what stands after the colon, or what must be."""


def check(said: str, sentence: str) -> None:
    assert said == sentence
    assert "\n" not in said
    assert said.endswith((".", "?", "…"))
    assert CORRECTION.search(said)


@pytest.mark.parametrize(
    ("error", "act", "sentence"), [(error, *row) for error, rows in SAYS.items() for row in rows]
)
def test_an_error_says(
    error: type[DiptychError], act: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        act(tmp_path)
    assert type(caught.value) is error
    check(str(caught.value).replace(str(tmp_path), "FOLDER"), sentence)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(*shlex.split(command.replace("FOLDER", str(tmp_path)))).removeprefix("error: ")
    said = re.sub(r" \(see '.*'\)$", "", said)
    check(said.replace(str(tmp_path), "FOLDER"), COMMANDS[command])


PARTIAL = {
    "RefusedError": "what is wrong with a pickle, inside a sentence",
    "ReadError": "what is wrong with a tar, inside a sentence",
    "MissingExtra": "the name of a package, of which it makes the sentence",
}
"""Errors whose text is no sentence."""
OPEN = (
    "{} holds no {}",
    "{} reads {}.",
    "'{}' is not {}.",
    "there is no setting called {}: {}",
    "the {} of block {} could not be counted, {}",
)
"""Sentences whose correction stands in a placeholder."""
INNER = (
    "model/export_texts.py",
    "model/runtime_export.py",
)  # reasons, inside the sentence on a runtime that is missing
KINDS = {
    name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, DiptychError)
}
KINDS |= {"UsageError", "RefusedError", "ReadError"}


def sentences() -> list[tuple[str, str, str]]:
    """Every text that the package makes an error of: file, kind, and the text with {} for each value."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            kind, text = ast.unparse(node.func).rpartition(".")[2], node.args[0]
            if isinstance(text, ast.Constant):
                text = ast.JoinedStr([text])
            if kind in KINDS and isinstance(text, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in text.values]
                found.append((str(file.relative_to(PACKAGE)), kind, "".join(parts)))
    return found


def is_whole(sentence: str) -> bool:
    ends = sentence.endswith((".", "?", "…", "{}"))
    return ends and "\n" not in sentence and bool(CORRECTION.search(sentence) or sentence.startswith("give "))


def test_every_error_of_the_package_is_a_sentence_with_its_correction() -> None:
    every = sentences()
    assert len(every) > 900
    wrong = [
        (file, sentence)
        for file, kind, sentence in every
        if kind not in PARTIAL and file not in INNER and sentence not in OPEN and not is_whole(sentence)
    ]
    assert not wrong


@pytest.mark.parametrize(
    "sentence", ["the file is broken.", "the file is broken: copy it", "broken:\ncopy it again."]
)
def test_a_sentence_without_correction_or_end_would_be_noticed(sentence: str) -> None:
    assert not is_whole(sentence)


PROSE = re.compile(
    r"""match=r?f?"([^"]*)"|assert f?"([^"]*)" in (?:refus|stderr|said\.stderr|\w+\.json\(\)\["error"\])"""
)
"""What other tests expect of an error: a type, a name, a number; never a sentence."""


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.rglob("test_*.py")), ids=lambda file: file.name)
def test_sentences_are_pinned_here_alone(file: Path) -> None:
    if file == Path(__file__):
        return
    expected = [one or other for one, other in PROSE.findall(file.read_text("utf-8"))]
    names = re.compile(r"\S*[/\\_.:\[\]*'{}-]\S*")  # paths, flags, patterns, quoted values
    prose = [text for text in expected if len(re.findall(r"\b[a-z]{2,}\b", names.sub(" ", text))) > 3]
    assert not prose

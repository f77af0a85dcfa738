"""Evaluate one model in one modality, or in all four directions on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from diptych.data.captions import Captions
from diptych.data.readable import LeftOut
from diptych.devices import pick_device
from diptych.encoders.dual import is_dual_encoder
from diptych.encoders.known_names import CLASS_WORDS, is_open_clip
from diptych.encoders.pretrained import load_config
from diptych.errors import SettingsError
from diptych.evaluation.class_lists import is_class_list
from diptych.evaluation.evaluator import Evaluator, Retrieval, measure
from diptych.evaluation.report import Group, Report
from diptych.evaluation.senteval import is_senteval, read_senteval
from diptych.evaluation.sts import Sts, sts_group
from diptych.evaluation.uni_modal import ImageClasses, UniModal
from diptych.model import named
from diptych.model.retriever import Retriever
from diptych.runs.reading import readable_views
from diptych.training.prepare import prepare

STS, CLASSES, FOUR = "sts", "image-classes", "four-directions"
PROTOCOLS = (STS, CLASSES, FOUR)


def evaluate_uni_modal(
    runs: Sequence[Path],
    data: Sequence[str],
    protocol: str,
    captions: Callable[[Sequence[str]], Captions],
    *,
    bootstrap: int = 1000,
    device: str = "auto",
    compute_precision: str = "no",
    strict_images: bool = False,
    show_progress: bool = True,
) -> Report:
    """The report of one model under a protocol of this module.

    ``sts`` reads a SentEval folder, ``image-classes`` the folders of CUB, SOP, In-Shop or iNaturalist.
    ``four-directions`` reads image-text data (by default the run's own) and, where they are given beside it, those
    folders: image ↔ text, text ↔ text and image ↔ image on one page. ``captions`` opens image-text data.
    """
    if len(runs) != 1:
        raise SettingsError(
            f"the protocol {protocol} takes one model, not {len(runs)}: evaluate them one by one."
        )
    run = runs[0]
    if protocol in (STS, CLASSES) and not data:
        what = (
            "SentEval's data folder" if protocol == STS else "the folder of CUB, SOP, In-Shop or iNaturalist"
        )
        raise SettingsError(f"the protocol {protocol} needs --data: give {what}.")
    if protocol == STS:
        if len(data) != 1:
            raise SettingsError(
                f"the protocol sts takes one --data, SentEval's data folder, not {len(data)}."
            )
        return Report((_sts(run, data[0], device, compute_precision, show_progress),))
    model = Retriever.from_pretrained(run, device, compute_precision)
    if protocol == CLASSES:
        return Report((ImageClasses(data, strict_images)(model, show_progress=show_progress),))
    return _four(model, data, captions, bootstrap, strict_images, show_progress)


def _sts(run: Path, folder: str, device: str, compute_precision: str, show_progress: bool) -> Group:
    found = read_senteval(folder)  # before a model is loaded
    if _is_model(run):
        model = Retriever.from_pretrained(run, device, compute_precision)
        return Sts(folder)(model, show_progress=show_progress)
    teacher = named.text_teacher(str(run))
    teacher.encoder.to(pick_device(device))
    facts = {"vectors": "mean of the token states", "model": f"{run} {teacher.identity()}"}
    return sts_group(lambda texts: torch.from_numpy(teacher(texts)), found, facts)


def _is_model(run: Path) -> bool:
    """Whether it is a model of two towers: a run, a model folder, or a pretrained dual encoder."""
    if (run / "run.json").is_file():
        return True
    config = run / "config.json"
    if config.is_file() and b'"retriever"' in config.read_bytes():
        return True
    if str(run) == CLASS_WORDS:
        return True
    return is_dual_encoder(run) and (is_open_clip(run) or hasattr(load_config(str(run)), "vision_config"))


def _four(
    model: Retriever,
    data: Sequence[str],
    captions: Callable[[Sequence[str]], Captions],
    bootstrap: int,
    strict_images: bool,
    show_progress: bool,
) -> Report:
    sentences = [path for path in data if is_senteval(path)]
    classes = [path for path in data if is_class_list(path)]
    pairs = [path for path in data if path not in sentences and path not in classes]
    if len(pairs) > 1 or len(sentences) > 1:
        raise SettingsError("four directions need one image-text data set and at most one SentEval folder.")
    view = captions(pairs)
    if not strict_images:
        view = readable_views([model], [view], LeftOut(), show_progress=show_progress)[0]
    prepared = prepare(model, view, device=str(model.device), show_progress=show_progress)
    evaluators: list[Evaluator] = [Retrieval(bootstrap=bootstrap), UniModal()]
    evaluators += [Sts(path) for path in sentences]
    if classes:
        evaluators.append(ImageClasses(classes, strict_images))
    return measure(evaluators, model, prepared, show_progress=show_progress)

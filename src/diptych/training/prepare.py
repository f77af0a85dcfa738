"""Make data ready for training: texts tokenised once, the outputs of frozen backbones cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.cache.features import cache_image_features, cache_text_states
from diptych.data.captions import Captions, ImageStore, holds_pictures
from diptych.data.problems import undecodable
from diptych.encoders.transformer import TransformerText
from diptych.evaluation.prepared import Prepared
from diptych.model.retriever import Retriever
from diptych.training.method import Method
from diptych.training.views import Augmented


def prepare(
    retriever: Retriever,
    captions: Captions,
    *,
    device: str = "cpu",
    pad_to_multiple: int = 1,
    show_progress: bool = True,
) -> Prepared:
    """Captions as the towers read them: a frozen part's outputs are computed once and kept on disk.

    ``pad_to_multiple`` rounds text lengths up, which leaves few shapes to compile or to record.
    """
    skip = captions.unreadable == "skip"
    store = _features(retriever, captions.images, skip, device, show_progress)
    if store is not None:
        captions = replace(captions, images=store)
    texts = retriever.text_input.prepare(captions.texts, show_progress=show_progress)
    texts.pad_to_multiple = pad_to_multiple
    states = retriever.text.encoder.frozen_part()
    if isinstance(states, TransformerText):
        texts = cache_text_states(states.to(device), texts, show_progress=show_progress)
    return Prepared(captions, texts)


def unreadable_images(
    retriever: Retriever,
    captions: Captions,
    *,
    device: str = "cpu",
    show_progress: bool = True,
) -> dict[int, str]:
    """The images of ``captions`` whose picture cannot be read, with the reason.

    A frozen backbone computes its features on the way, into the cache where ``prepare`` finds them; otherwise every
    picture is opened once. None are looked for among stored features, and in data that says itself what to do with
    such pictures (corpora).
    """
    if captions.unreadable == "skip" or not len(captions.images) or not holds_pictures(captions.images):
        return {}
    found = _features(retriever, captions.images, True, device, show_progress)
    return undecodable(captions.images, show_progress=show_progress) if found is None else found.unreadable


def ready_views(
    method: Method,
    captions: Captions,
    *,
    device: str = "cpu",
    show_progress: bool = True,
) -> Mapping[str, Augmented]:
    """The view makers of a method, where a frozen backbone reads pictures: with copies that it has read once."""
    retriever, skip = method.retriever, captions.unreadable == "skip"
    found = dict(method.views)
    if retriever.image.encoder.frozen_backbone() is None or not holds_pictures(captions.images):
        return found
    for name, maker in method.views.items():
        copies = (
            _features(retriever, copy, skip, device, show_progress)
            for copy in maker.copies_of(captions.images)
        )
        found[name] = maker.with_copies([copy for copy in copies if copy is not None], captions.image_of)
    return found


def _features(retriever: Retriever, images: ImageStore, skip: bool, device: str, show: bool) -> Any:
    """What a frozen backbone makes of pictures, from the cache or computed now; None where there is none to read."""
    frozen = retriever.image.encoder.frozen_backbone()
    if frozen is None or not holds_pictures(images):
        return None
    return cache_image_features(
        frozen.to(device), retriever.image_input, images, skip=skip, show_progress=show
    )

"""A whole retriever with a fusion encoder: batches, saving, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dual_folders import vit_folder
from small import bert_folder, pictures, texts

from diptych.aggregators.pooling import Head
from diptych.data.images import PixelInput, open_image
from diptych.data.text import WordPieceInput
from diptych.encoders.backbones import HubBackbone
from diptych.encoders.cnn import Tokens
from diptych.encoders.transformer import TransformerText
from diptych.errors import DataError
from diptych.interaction.fusion import Fusion
from diptych.model.reranking import OUTSIDE, RerankedScores
from diptych.model.retriever import Retriever, Tower
from diptych.objectives.contrastive import ITC, ITM
from diptych.types import Batch, Features, as_inputs


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    folder = tmp_path_factory.mktemp("models")
    vision = HubBackbone(vit_folder(folder / "vit"), class_token=True)
    bert = bert_folder(folder / "bert")
    image, text = Tokens(vision), TransformerText(bert, projection=False)
    torch.manual_seed(1)
    scorer = Fusion(16, 16, layers=2, heads=2, candidates=2)
    made = Retriever(
        Tower(image, Head(16, 8, norm=False)),
        Tower(text, Head(16, 8, norm=False)),
        PixelInput(**vision.pixel_format),
        WordPieceInput(bert, augment=0.0),
        scorer=scorer,
    )
    for parameter in made.parameters():  # large enough that float16 does not decide who is a candidate
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def batch_of(retriever: Retriever, files: list[Path], lines: list[str]) -> Batch:
    count = len(files)
    images = as_inputs(retriever.image_input([open_image(path) for path in files]))
    return Batch(images, as_inputs(retriever.text_input(lines)), torch.arange(count), torch.arange(count))


def test_a_step_trains_every_part(retriever: Retriever, tmp_path: Path) -> None:
    batch = batch_of(retriever, pictures(tmp_path, 4), texts(4))
    seen = retriever(batch)
    assert seen.scores is None  # not every pair is compared
    assert seen.matches is not None
    loss = ITC()(seen, batch)["itc"] + ITM()(seen, batch)["itm"]
    loss.backward()
    still = [name for name, p in retriever.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    retriever.zero_grad()
    # the last text layer's keys have no bias gradient, and of BERT's types one is never used
    assert not [name for name in still if "token_type" not in name and not name.endswith("key.bias")]


def test_evaluation_reranks_the_candidates_of_both_directions(retriever: Retriever, tmp_path: Path) -> None:
    files, lines = pictures(tmp_path, 5), texts(9)
    scores = retriever.scores(files, lines)
    assert isinstance(scores, RerankedScores)
    found = scores.tile(slice(None), slice(None))
    cosines = retriever.similarity(retriever.encode_image(files), retriever.encode_text(lines))
    chosen = torch.zeros(5, 9, dtype=torch.bool)
    chosen.scatter_(1, cosines.topk(2, dim=1).indices, True)
    chosen.scatter_(0, cosines.topk(2, dim=0).indices, True)
    assert torch.equal(found > OUTSIDE, chosen)
    with torch.no_grad():
        images = retriever.image.encoder(
            as_inputs(retriever.image_input([open_image(path) for path in files]))
        )
        words = retriever.text.encoder(as_inputs(retriever.text_input(lines)))
        assert retriever.scorer is not None
        every = retriever.scorer(images, words)
    assert torch.allclose(found[chosen], every[chosen], atol=1e-2)  # features are kept in float16


def test_saving_and_loading_change_nothing(retriever: Retriever, tmp_path: Path) -> None:
    files, lines = pictures(tmp_path / "p", 3), texts(4)
    retriever.save_pretrained(tmp_path / "saved")
    again = Retriever.from_pretrained(tmp_path / "saved")
    assert again.fingerprint() == retriever.fingerprint()
    whole = slice(None)
    assert torch.equal(
        again.scores(files, lines).tile(whole, whole), retriever.scores(files, lines).tile(whole, whole)
    )


def test_stored_tokens_pass_and_those_of_another_backbone_do_not(retriever: Retriever) -> None:
    tokens = retriever.image.encoder
    stored = Features.whole(torch.randn(2, 17, 16))
    assert tokens(stored) is stored
    with pytest.raises(DataError, match=r"\b16\b"):
        tokens(Features.whole(torch.randn(2, 17, 5)))
    frozen = Tokens(tokens.backbone, trainable=False)
    assert frozen.frozen_part() is tokens.backbone
    assert not frozen.train().backbone.training
    tokens.backbone.requires_grad_(True)
    assert tokens.frozen_part() is None
    assert tokens.pretrained() == ("backbone",)

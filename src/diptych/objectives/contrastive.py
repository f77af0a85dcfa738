"""InfoNCE: cross-entropy over the scores of a batch, with several positives per row where images repeat.

The objectives of a fusion encoder: ITC aligns the two encoders, ITM judges pairs and their hardest negatives.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from diptych import ops
from diptych.errors import SettingsError, between, one_of, positive
from diptych.objectives.combine import On
from diptych.objectives.objective import Objective, given_or_set
from diptych.objectives.soft_labels import IMAGE_TEACHER, TEXT_TEACHER, row_cosines, teacher_rows
from diptych.types import Batch, Embeddings, Matches, Terms

SameImage = Literal["positive", "ignored", "negative"]
Reduction = Literal["per_row", "per_entry"]
LEARNED_WITHIN = (0.01, 1.0)  # CLIP's lower bound (a scale of at most 100), and plain cosines


class InfoNCE(Objective):
    """Softmax over the batch in both directions, against targets shared by the pairs of one image.

    ::

        L = ½ · (1/B) Σ_i Σ_j −H_ij · [ log softmax(S_i / τ)_j + log softmax((Sᵀ)_i / τ)_j ]
        H_ij = 1[g_i = g_j] / Σ_k 1[g_i = g_k]

    ===============  ====================================================================================
    paper            argument
    ===============  ====================================================================================
    τ                ``temperature``; ``learned`` makes it a parameter (τ itself, not its logarithm), put
                     back into ``clamp`` before each forward pass
    g_i              ``batch.image_ids``
    H                ``same_image``: "positive" is the H above; "ignored" keeps the pair itself as the only
                     positive and leaves other pairs of its image out of the softmax; "negative" is plain
                     InfoNCE, H = identity
    ÷B (CUSA)        ``reduction``: "per_row" is L; "per_entry" is L / B, the mean over all B × B entries
                     against which CUSA quotes the weights of its soft terms
    ===============  ====================================================================================

    Shapes: S = image · textᵀ (B, B). A batch of one pair has the value 0.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learned: bool = False,
        clamp: tuple[float, float] | None = None,
        same_image: SameImage = "positive",
        reduction: Reduction = "per_row",
    ) -> None:
        super().__init__()
        positive(temperature, "the temperature")
        if clamp is not None and not learned:
            raise SettingsError("clamp bounds a learned temperature: set learned=True, or leave clamp out.")
        self.same_image = one_of(same_image, "same_image", SameImage)
        self.reduction = one_of(reduction, "reduction", Reduction)
        self.clamp = clamp or LEARNED_WITHIN
        low, high = self.clamp
        if learned and not 0 < low <= temperature <= high:
            raise SettingsError(f"temperature {temperature} lies outside clamp ({low}, {high}): widen clamp.")
        self.temperature = nn.Parameter(torch.tensor(float(temperature))) if learned else temperature

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        if isinstance(self.temperature, nn.Parameter):
            # in place and unseen by autograd: at a bound the gradient must still reach the parameter
            self.temperature.data.clamp_(*self.clamp)
        logits = embeddings.all_scores() / self.temperature  # (B, B)
        loss = info_nce(logits, batch.image_ids, self.same_image)
        return {"info_nce": loss / len(logits) if self.reduction == "per_entry" else loss}


def info_nce(logits: Tensor, image_ids: Tensor, same_image: SameImage = "positive") -> Tensor:
    """The loss of logits (B, B), both directions averaged; see ``InfoNCE``."""
    same = ops.same_image(image_ids, image_ids)
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    if same_image == "ignored":
        logits = logits.masked_fill(same & ~own, -torch.inf)
    right = same if same_image == "positive" else own
    return (_cross_entropy(logits, right) + _cross_entropy(logits.T, right)) / 2


def _cross_entropy(logits: Tensor, positive: Tensor) -> Tensor:
    """Mean over rows of −Σ_j H_ij log softmax(logits_i)_j with H uniform over the positives of a row."""
    log_shares = torch.log_softmax(logits, dim=1).masked_fill(~positive, 0)  # −inf × 0 would be NaN
    return -(log_shares.sum(dim=1) / positive.sum(dim=1)).mean()


def learned_info_nce(
    settings: Any,
    temperature: float | None = None,
    learned: bool = True,
    same_image: SameImage | None = None,
    reduction: Reduction = "per_row",
) -> Objective:
    """InfoNCE with a learned temperature; texts of one image are positives together, unless the recipe says not."""
    masked = getattr(settings, "mask_same_image", True)
    return InfoNCE(
        given_or_set(temperature, settings, "info_nce_temperature", 0.07),
        learned,
        same_image=same_image or ("positive" if masked else "negative"),
        reduction=reduction,
    )


def visual(temperature: float = 0.07, same_image: SameImage = "ignored") -> Objective:
    """COOKIE's L_vis: images against augmented images."""
    return On(InfoNCE(temperature, same_image=same_image), "image", "augmented.image")


def textual(temperature: float = 0.07, same_image: SameImage = "ignored") -> Objective:
    """COOKIE's L_txt: texts against augmented texts."""
    return On(InfoNCE(temperature, same_image=same_image), "text", "augmented.text")


class ITC(Objective):
    """Image-text contrast: ``InfoNCE`` with texts of one image as positives, at the fusion encoder's own τ.

    The same τ draws the hard negatives that ``ITM`` judges, so it lives in the model.
    """

    needs = ("matches",)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        temperature = _matches(embeddings).temperature
        return {"itc": info_nce(embeddings.image @ embeddings.text.T / temperature, batch.image_ids)}


class ITM(Objective):
    """Image-text matching: cross-entropy of "they match" over B pairs and 2B hard negatives, soft with a teacher.

    ::

        L = 1/3B Σ −[ (1 − y) log p₀ + y log p₁ ],   y = 1 for a pair,
        y = α · max(0, X_ij) for image i and the text of pair j,   y = α · max(0, Y_ij) for text i and the image of j

    ===============  =================================================================================
    paper            argument
    ===============  =================================================================================
    p                softmax of ``embeddings.matches.logits`` (3, B, 2): the pairs, each image beside a
                     wrong text, each text beside a wrong image
    X, Y             cosines of the teachers' vectors ``batch.targets["teacher_image"]``, ``["teacher_text"]``
    α (CUSA)         ``alpha``; 0 is the hard target of X2-VLM
    ===============  =================================================================================

    A row without a negative (every pair of the batch shows its image) is left out of the mean.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """What the fusion encoder compared and, with soft targets, the teachers."""
        return ("matches", "teachers") if self.alpha else ("matches",)

    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        self.alpha = between(alpha, "alpha, the share of a match,")

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        matches = _matches(embeddings)
        logits = matches.logits.float()
        target = torch.zeros(logits.shape[:2], device=logits.device)  # (3, B)
        target[0] = 1.0
        if self.alpha:
            teachers = zip((IMAGE_TEACHER, TEXT_TEACHER), matches.negatives, strict=True)
            target[1:] = torch.stack([self._soft(name, batch, drawn) for name, drawn in teachers])
        logp = torch.log_softmax(logits, dim=-1)
        losses = -((1 - target) * logp[..., 0] + target * logp[..., 1])
        counted = torch.cat([torch.ones_like(matches.possible[:1]), matches.possible])
        return {"itm": losses.masked_fill(~counted, 0.0).sum() / counted.sum()}

    def _soft(self, name: str, batch: Batch, drawn: Tensor) -> Tensor:
        """α · max(0, teacher's cosine) of each row of this process and the one drawn for it, (B,)."""
        cosines = row_cosines(teacher_rows(batch, name)[batch.own])
        soft: Tensor = self.alpha * cosines.gather(1, drawn[:, None])[:, 0].clamp(min=0.0)
        return soft


def _matches(embeddings: Embeddings) -> Matches:
    if embeddings.matches is None:
        raise SettingsError("ITC and ITM read what a fusion encoder compared: give the model a Fusion.")
    return embeddings.matches

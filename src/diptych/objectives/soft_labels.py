"""CUSA's soft labels: distributions over the batch follow those of frozen uni-modal teachers (Huang et al., 2024).

CVSE's agreement of both sides about the concepts of a pair is a divergence too.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from diptych import kernels, ops
from diptych.errors import SettingsError, one_of, positive
from diptych.objectives.objective import Objective
from diptych.types import Batch, Embeddings, Terms


class Temperature(nn.Module):
    """τ itself, not its logarithm or inverse; a learned one is put back into ``clamp`` before each forward pass."""

    def __init__(self, start: float, clamp: tuple[float, float], learned: bool = True) -> None:
        super().__init__()
        low, high = clamp
        if not 0 < low <= start <= high:
            raise SettingsError(
                f"the temperature {start} lies outside ({low}, {high}): start inside, with bounds above 0."
            )
        self.clamp, self.learned = clamp, learned
        self.value = nn.Parameter(torch.tensor(float(start)), requires_grad=learned)

    def forward(self) -> Tensor:
        """τ, a scalar inside its interval."""
        if self.learned:
            # in place and unseen by autograd: at a bound the gradient must still reach the parameter
            self.value.data.clamp_(*self.clamp)
        return self.value


Mode = Literal["each", "add", "dot"]
Divergence = Literal["kl", "ce"]
IMAGE_TEACHER, TEXT_TEACHER = "teacher_image", "teacher_text"  # the columns of ``Batch.targets``
UNI = "uni"  # the view that uni-modal heads make


class CrossModalSoftLabels(Objective):
    """CSA: the scores of a batch follow the teacher of the query's modality, in both directions.

    ::

        Q^I_i = softmax(X_i / τ_t)      P^{i→t}_i = softmax(S_i / τ_c)         X = cosines of image teacher vectors
        Q^T_i = softmax(Y_i / τ_t)      P^{t→i}_i = softmax((Sᵀ)_i / τ_c)      Y = cosines of text teacher vectors
        L_CSA = ½ · (1/B) Σ_i [ KL(Q^I_i ‖ P^{i→t}_i) + KL(Q^T_i ‖ P^{t→i}_i) ]

    ===================  =================================================================================
    paper, public code   argument
    ===================  =================================================================================
    S (B, B)             ``embeddings.all_scores()``: cosines, or the scores of a pair scorer
    X, Y (B, B)          from ``batch.targets["teacher_image"]`` and ``["teacher_text"]``, (B, ·) each
    τ_c                  ``temperature``, shared by both directions; learned, inside ``clamp``
    τ_t                  ``teacher_temperature``, fixed
    mode                 ``mode``: "each" is the equation; "add" supervises both directions with (X + Y) / 2,
                         "dot" with √(max(X, 0) · max(Y, 0))
    KL or CE             ``divergence``: "ce" adds the teacher's entropy, a constant without gradient
    ===================  =================================================================================

    The diagonal stays in every softmax. The soft target is never mixed with the hard one: add this objective to
    the recipe's own with the weight α (``Sum``). A batch of one pair has the value 0.
    """

    needs = ("teachers",)

    def __init__(
        self,
        temperature: float = 0.45,
        learned: bool = True,
        clamp: tuple[float, float] = (0.10, 0.99),
        teacher_temperature: float = 1.0,
        mode: Mode = "each",
        divergence: Divergence = "kl",
    ) -> None:
        super().__init__()
        self.temperature = Temperature(temperature, clamp, learned)
        self.teacher_temperature = positive(teacher_temperature, "the teacher's temperature")
        self.mode = one_of(mode, "the mode of the soft labels", Mode)
        self.divergence = one_of(divergence, "the divergence", Divergence)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        x, y = self._labels(batch)
        scores = ops.at_least_float32(embeddings.all_scores())
        given = (self.temperature(), self.teacher_temperature, self.divergence)
        return {"csa": (divergence(x, scores, *given) + divergence(y, scores.T, *given)) / 2}

    def _labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, y = teacher_cosines(batch, IMAGE_TEACHER), teacher_cosines(batch, TEXT_TEACHER)
        if self.mode == "add":
            x = y = (x + y) / 2
        elif self.mode == "dot":
            x = y = (x.clamp_min(0) * y.clamp_min(0)).sqrt()
        return x, y


class UniModalSoftLabels(Objective):
    """USA: in each modality, the similarities of the uni-modal heads follow the teacher's.

    ::

        P^{i→i}_i = softmax((a aᵀ)_i / τ_a)      P^{t→t}_i = softmax((b bᵀ)_i / τ_b)
        L_USA = ½ · (1/B) Σ_i [ KL(Q^I_i ‖ P^{i→i}_i) + KL(Q^T_i ‖ P^{t→t}_i) ]        Q as in CSA

    ===================  =================================================================================
    paper                argument
    ===================  =================================================================================
    a, b (B, D')         ``embeddings.views["uni"]``: unit rows of the uni-modal heads (``branches/branch.py``)
    τ_a, τ_b             ``temperature`` starts both; one per modality, learned inside ``clamp``
    τ_t                  ``teacher_temperature``, fixed
    KL or CE             ``divergence``
    ===================  =================================================================================

    Add it to the recipe's own objective with the weight β (``Sum``). A batch of one pair has the value 0.
    """

    needs = ("teachers", UNI)

    def __init__(
        self,
        temperature: float = 0.45,
        learned: bool = True,
        clamp: tuple[float, float] = (0.10, 1.00),
        teacher_temperature: float = 1.0,
        divergence: Divergence = "kl",
    ) -> None:
        super().__init__()
        self.image_temperature = Temperature(temperature, clamp, learned)
        self.text_temperature = Temperature(temperature, clamp, learned)
        self.teacher_temperature = positive(teacher_temperature, "the teacher's temperature")
        self.divergence = one_of(divergence, "the divergence", Divergence)

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        if UNI not in embeddings.views:
            raise SettingsError(
                "USA trains the view 'uni', which this model lacks: give it the branch uni=UniModalHeads(…)."
            )
        uni = embeddings.views[UNI]
        image = self._side(uni.image, self.image_temperature, batch, IMAGE_TEACHER)
        text = self._side(uni.text, self.text_temperature, batch, TEXT_TEACHER)
        return {"usa": (image + text) / 2}

    def _side(self, rows: Tensor, temperature: Temperature, batch: Batch, column: str) -> Tensor:
        rows = ops.at_least_float32(rows)
        given = (temperature(), self.teacher_temperature, self.divergence)
        return divergence(teacher_cosines(batch, column), rows @ rows.T, *given)


class Agreement(Objective):
    """Σ_b KL(p^T_b ‖ p^I_b) of two distributions over concepts, (B, g) each, summed over the batch.

    ``view`` names the rows p^I and p^T; rows are probabilities already.
    """

    def __init__(self, view: str) -> None:
        super().__init__()
        self.view = view

    def forward(self, embeddings: Embeddings, batch: Batch) -> Terms:
        rows = embeddings.view(self.view)
        image, text = rows.image, rows.text
        least = torch.finfo(image.dtype).tiny
        return {"agreement": torch.xlogy(text, text).sum() - (text * image.clamp_min(least).log()).sum()}


def teacher_cosines(batch: Batch, column: str) -> Tensor:
    """Cosines (B, B) of the teacher's vectors in ``batch.targets[column]``, whatever their length; no gradient."""
    return row_cosines(teacher_rows(batch, column))


def teacher_rows(batch: Batch, column: str) -> Tensor:
    """The teacher's vectors, a row for each pair."""
    if column not in batch.targets:
        raise SettingsError(
            f"the soft labels need the teacher vectors '{column}', which this run does not have: name a teacher "
            "for images and one for texts, or switch CSA and USA off (weights 0)."
        )
    return batch.targets[column]


def row_cosines(rows: Tensor) -> Tensor:
    """Cosines (B, B) of rows of any shape, without gradient."""
    rows = ops.unit(ops.at_least_float32(rows.detach()).flatten(1))  # (B, ·)
    return rows @ rows.T


def divergence(
    cosines: Tensor, scores: Tensor, temperature: Tensor, teacher_temperature: float, kind: Divergence = "kl"
) -> Tensor:
    """Mean over rows of KL(softmax(cosines / τ_t) ‖ softmax(scores / τ)), or of the cross-entropy; (B, B) each."""
    if kernels.takes_rows(scores):
        from diptych.kernels.rows import Divergence as Fused

        found: Tensor = Fused.apply(cosines, scores, temperature, teacher_temperature, kind == "kl")  # type: ignore[no-untyped-call]
        return found
    log_q = torch.log_softmax(cosines / teacher_temperature, -1)
    log_p = torch.log_softmax(scores / temperature, -1)
    gap = log_q - log_p if kind == "kl" else -log_p
    return (log_q.exp() * gap).sum() / len(scores)

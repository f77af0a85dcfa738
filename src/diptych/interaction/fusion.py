"""A fusion encoder in the manner of X2-VLM: words attend to each other and to the image, then a match is judged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diptych.encoders.encoder import check_rate, fit
from diptych.errors import DataError, SettingsError, between
from diptych.interaction.similarity import PairScorer
from diptych.parts import part
from diptych.types import Batch, Embeddings, Features, Matches

STD = 0.02  # standard deviation of new weights, as in BERT
PAIRS = 512  # image-text pairs computed at a time without gradient


class FusionLayer(nn.Module):
    """One post-norm layer: a = LN(x + attention(x, x)), c = LN(a + attention(a, image)), y = LN(c + W₂ GELU(W₁ c)).

    The keys and values of the image depend on nothing else, so ``look`` computes them once per image. Every word
    attends to the image on its own, so the texts of one image stand side by side in the rows of one product.
    """

    def __init__(self, dim: int, image_dim: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.joint, self.own = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.query, self.cross = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key_value = nn.Linear(image_dim, 2 * dim)
        self.first, self.second = nn.Linear(dim, feedforward), nn.Linear(feedforward, dim)
        self.attended, self.looked, self.fed = (nn.LayerNorm(dim, eps=1e-12) for _ in range(3))

    def look(self, image: Tensor) -> Tensor:
        """Keys and values (2, N, heads, R, D/heads) of image tokens (N, R, image_dim)."""
        both: Tensor = self.key_value(image).unflatten(-1, (2, self.heads, -1))
        return both.permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor, mask: Tensor, seen: Tensor, seen_mask: Tensor) -> Tensor:
        """Words (N, T, W, D) of T texts per image, beside what ``look`` gave for N images, → the same shape."""
        n, t, w, d = x.shape
        rate = self.dropout if self.training else 0.0
        q, k, v = self.joint(x.reshape(n * t, w, d)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.reshape(n * t, 1, 1, w), dropout_p=rate
        )
        x = self.attended(x + self._drop(self.own(mixed.transpose(1, 2).reshape(n, t, w, d))))
        q = self.query(x).view(n, t * w, self.heads, -1).transpose(1, 2)  # (N, heads, T·W, D/heads)
        mixed = F.scaled_dot_product_attention(
            q, seen[0], seen[1], attn_mask=seen_mask[:, None, None, :], dropout_p=rate
        )
        x = self.looked(x + self._drop(self.cross(mixed.transpose(1, 2).reshape(n, t, w, d))))
        y: Tensor = self.fed(x + self._drop(self.second(F.gelu(self.first(x)))))
        return y

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


@part
class Fusion(PairScorer):
    """Fusion layers over the states of both encoders, and a match head on the first word.

    ::

        head(h) = W₂ GELU(LN(W₁ h)),  W₁: D → 2D,  W₂: 2D → 2;   the score is the raw logit of "they match"

    ===============================  ==================================================================
    X2-VLM                           argument
    ===============================  ==================================================================
    image tokens (577 × 768)         ``image_dim``: the class token and patches of the image encoder
    text layers 1–12                 ``dim``: the states of the text encoder
    layers 13–18                     ``layers`` with ``heads``; feed-forward 4 · dim
    k_test (256 COCO, 128 Flickr)    ``candidates``: a pair outside both sides' best k is not compared
    τ of the contrastive loss        ``temperature``: starts at 0.07, learned, kept within [0.001, 0.5]
    ===============================  ==================================================================

    Shapes: images (N, R, image_dim), texts (M, W, dim) → logits (N, T, 2) for T texts of each image.
    """

    kind = "fusion"
    clamp = (0.001, 0.5)

    def __init__(
        self,
        image_dim: int = 768,
        dim: int = 768,
        layers: int = 6,
        heads: int = 12,
        dropout: float = 0.1,
        candidates: int = 128,
        temperature: float = 0.07,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise SettingsError(f"dim={dim} does not divide over {heads} heads: choose a multiple of them.")
        if layers < 1 or candidates < 1:
            raise SettingsError(f"layers={layers}, candidates={candidates}: give at least one of each.")
        check_rate(dropout, "dropout")
        self.image_dim, self.dim, self.candidates = image_dim, dim, candidates
        self.layers = nn.ModuleList(
            FusionLayer(dim, image_dim, heads, 4 * dim, dropout) for _ in range(layers)
        )
        self.head = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.GELU(), nn.Linear(2 * dim, 2)
        )
        self.temperature = nn.Parameter(torch.tensor(between(float(temperature), "temperature", *self.clamp)))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=STD)
                nn.init.zeros_(module.bias)

    def look(self, images: Features) -> list[Tensor]:
        """What each layer keeps of images (N, R, image_dim): computed once, whatever they are compared with."""
        if images.values.dim() != 3 or images.values.shape[-1] != self.image_dim:
            raise DataError(
                f"the image features have shape {tuple(images.values.shape)}, the fusion encoder reads "
                f"(images, tokens, {self.image_dim}): they come from another encoder, compute them again."
            )
        values = fit(images, self._layer(0).key_value.weight)
        return [self._layer(number).look(values) for number in range(len(self.layers))]

    def logits(self, seen: list[Tensor], seen_mask: Tensor, texts: Features) -> Tensor:
        """Match logits (N, T, 2): ``texts`` (N, T, W, dim) beside the image of each row."""
        x = fit(texts, self._layer(0).joint.weight)
        for number, keys_values in enumerate(seen):
            x = self._layer(number)(x, texts.mask, keys_values, seen_mask)
        out: Tensor = self.head(x[:, :, 0]).float()
        return out

    def compare(self, seen: Embeddings, batch: Batch) -> Matches:
        """Match logits of the pairs of a batch and of one hard negative for each image and each text."""
        # in place and unseen by autograd: at a bound the gradient must still reach the parameter
        self.temperature.data.clamp_(*self.clamp)
        with torch.no_grad():
            drawn, possible = hard_negatives(seen.image @ seen.text.T, batch.image_ids, self.temperature)
        images, texts = seen.local_features()
        looks = self.look(images)
        # its text and a wrong one, (B, 2, W, D)
        own = texts.map(lambda t: torch.stack([t, t[drawn[0]]], dim=1))
        right = self.logits(looks, images.mask, own)
        others = [look[:, drawn[1]] for look in looks]
        wrong = self.logits(others, images.mask[drawn[1]], texts.map(lambda t: t[:, None]))
        logits = torch.cat([right, wrong], dim=1).transpose(0, 1)  # (3, B, 2)
        return Matches(logits, drawn, possible, self.temperature)

    def forward(self, images: Features, texts: Features) -> Tensor:
        """Scores (N, M) of every image against every text: the logit of a match."""
        n, m = len(images.mask), len(texts.mask)
        out = torch.empty(n, m, device=texts.values.device)
        order = texts.sizes.argsort(stable=True)  # texts of like length together: little padding
        height = max(1, PAIRS // max(1, m))
        for top in range(0, n, height):
            rows = slice(top, top + height)
            block = Features(images.values[rows], images.mask[rows])
            looks, count = self.look(block), len(block.mask)  # once, whatever the number of texts
            for numbers in torch.split(order, max(1, PAIRS // count)) if m else ():
                some = trimmed(Features(texts.values[numbers], texts.mask[numbers]))
                beside = Features(
                    some.values.expand(count, *some.values.shape), some.mask.expand(count, *some.mask.shape)
                )
                out[rows, numbers] = self.logits(looks, block.mask, beside)[..., 1]
        return out

    def _layer(self, number: int) -> FusionLayer:
        layer = self.layers[number]
        assert isinstance(layer, FusionLayer)
        return layer


def hard_negatives(
    scores: Tensor, image_ids: Tensor, temperature: Tensor | float, floor: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """For every image a text and for every text an image that do not belong to it, drawn by how well they score.

    One batched draw: P(j | i) ∝ softmax(S_i / τ)_j + ``floor``, and 0 where both belong to one image. Returns
    indices (2, B), images' texts first, and whether there was anything to draw (2, B): a row whose whole batch
    shows its own image has no negative.
    """
    both = torch.stack([scores, scores.T]) / temperature  # (2, B, B)
    same = image_ids[:, None] == image_ids[None, :]
    weights = (torch.softmax(both.float(), dim=-1) + floor).masked_fill(same, 0.0)
    possible = ~same.all(dim=1)
    weights = torch.where(possible[:, None], weights, 1.0)  # a draw must be possible; it is not used
    # the largest of weight / Exp(1) is a multinomial draw; torch.multinomial would make the host wait for the device
    noise = torch.empty_like(weights).exponential_().clamp_(min=torch.finfo(weights.dtype).tiny)
    return (weights / noise).argmax(dim=-1), possible.expand(2, -1)


def trimmed(texts: Features) -> Features:
    """Texts (M, W, D) without the columns that none of them uses."""
    longest = max(1, int(texts.mask.sum(dim=1).max())) if len(texts.mask) else 1
    if bool(texts.mask[:, longest:].any()):  # padding in front or in between
        return texts
    return texts.map(lambda t: t[:, :longest])

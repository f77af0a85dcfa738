"""A backbone's tokens as they are: what a fusion encoder looks at."""

from __future__ import annotations

from diptych.encoders.backbone import Backbone
from diptych.encoders.encoder import Encoder
from diptych.errors import DataError
from diptych.parts import part
from diptych.types import Features, Inputs


@part
class Tokens(Encoder):
    """Pixels (B, 3, H, W) → backbone → tokens (B, R, channels), class token first where the backbone keeps it.

    Tokens that were computed before (``Features`` of ``channels`` numbers) pass as they are. A frozen backbone
    (``trainable=False``) stays in evaluation mode.
    """

    def __init__(self, backbone: Backbone, trainable: bool = True) -> None:
        super().__init__()
        self.backbone, self.dim, self.trainable = backbone, backbone.channels, trainable
        self.backbone.requires_grad_(trainable)
        self.train(self.training)

    def forward(self, inputs: Inputs) -> Features:
        """Pixels, or tokens computed before, → Features (B, R, channels)."""
        if not isinstance(inputs, Features):
            return Features.whole(self.backbone(inputs))
        if inputs.values.shape[-1] != self.dim:
            raise DataError(
                f"the stored tokens have {inputs.values.shape[-1]} numbers, this backbone makes {self.dim}: they "
                "come from another backbone, compute them again."
            )
        return inputs

    def train(self, mode: bool = True) -> Tokens:
        """Training mode for what is trained."""
        super().train(mode)
        self.backbone.train(mode and self.trainable)
        return self

    def frozen_part(self) -> Backbone | None:
        """The backbone, unless it is trained."""
        return None if self.trainable else self.backbone

    def pretrained(self) -> tuple[str, ...]:
        """The backbone, where it is trained."""
        return ("backbone",) if self.trainable else ()

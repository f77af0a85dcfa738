"""What the GPOs of a trained model have learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.aggregators import GPO, Generator
from diptych.model.retriever import Retriever
from diptych.reports.charts import LearnedPooling


def learned_poolings(name: str, retriever: Retriever, sizes: Sequence[int]) -> list[LearnedPooling]:
    """The coefficients of every GPO of a model whose weights depend on the size of a set alone.

    Coefficients per dimension are averaged over the dimensions.
    """
    found = []
    for path, module in retriever.named_modules():
        if isinstance(module, GPO) and isinstance(module.generator, Generator):
            theta = {}
            with torch.no_grad():
                for size in sizes:
                    row = module.coefficients(torch.tensor([size], device=retriever.device), size)[
                        0
                    ]  # (size, K)
                    theta[size] = row.mean(dim=1).double().cpu().numpy()
            where = {"image.aggregator": "images", "text.aggregator": "texts"}.get(path)
            found.append(
                LearnedPooling(f"{name}, {where or path.replace('.', ' ').replace('_', ' ')}", theta)
            )
    return found

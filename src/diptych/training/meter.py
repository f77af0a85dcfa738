"""Running means of a run's terms, and its speed."""

from __future__ import annotations

import time

from torch import Tensor


class Meter:
    """Running means of the terms and the speed, kept on the device until they are read."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.total, self.steps = 0.0, 0  # of what was read before
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.sums: dict[str, Tensor] = {}
        self.count, self.began = 0, time.perf_counter()

    def add(self, terms: dict[str, Tensor]) -> None:
        """Take in one step."""
        for name, value in terms.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
        self.count += 1

    def read(self) -> dict[str, float]:
        """Means since the last read: loss, terms, pairs per second."""
        terms = {name: float(value) / self.count for name, value in self.sums.items()}
        self.total, self.steps = self.total + sum(terms.values()) * self.count, self.steps + self.count
        speed = self.count * self.batch_size / (time.perf_counter() - self.began)
        self.reset()
        return {"loss": sum(terms.values()), **terms, "pairs_per_second": round(speed, 1)}

    def mean_loss(self) -> float:
        """The mean loss of all steps so far; reads the device."""
        left = sum(float(value) for value in self.sums.values())
        return (self.total + left) / max(1, self.steps + self.count)

"""How many of the observed numbers are wrong ones, when wrong ones can be planted and right ones cannot be seen.

::

    observed(x) = planted(x) · (π + (1 − π) exp(β·d)),   d = (1, x, c, c x)

The density of the right ones is the planted one, tilted: the log of their ratio is linear in the number x, with a
slope that may depend on conditions c. The lower x, the closer the bracket comes to π. Whether a number is observed or
planted is then a logistic regression with the floor π. Its likelihood gives π; the interval of π is where the
log-likelihood, maximised over β, is at most 1.92 below its maximum (profile likelihood).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ENDS = 0.003, 0.975  # square roots of the shares of wrong ones that are considered
DROP = 1.92  # half the quantile of χ² that leaves 5 %
STEP = 0.002  # precision of such a root, whose interval is about equally wide everywhere
PRIOR = 1.0  # precision of the normal prior of β, in units of the spread of the numbers
GAIN = 1e-4  # of the log-likelihood, at which the search for β ends


class Mixture:
    """Observed numbers (n, 1 + C) as a mixture with planted ones (m, 1 + C); the C further columns are conditions."""

    def __init__(self, observed: NDArray[Any], planted: NDArray[Any]) -> None:
        rows = np.concatenate([observed, planted]).astype(np.float64)
        rows = (rows - observed.mean(axis=0)) / np.maximum(observed.std(axis=0), 1e-9)
        self.design = np.column_stack([np.ones(len(rows)), rows, rows[:, 1:] * rows[:, :1]])
        self.observed = np.arange(len(rows)) < len(observed)
        self.weights = np.where(self.observed, 1.0, len(observed) / len(planted))
        self.beta = np.zeros(self.design.shape[1])
        self.beta[1] = 1.0  # right ones have higher numbers

    def share(self) -> tuple[float, float, float]:
        """The share of wrong ones, with the ends of its 95 % interval."""
        root = _highest(lambda root: self.fit(root**2), *ENDS)
        best = self.fit(root**2)

        def end(outside: float) -> float:
            inside = root
            while abs(outside - inside) > STEP / 4:
                middle = (inside + outside) / 2
                near = best - self.fit(middle**2) < DROP
                inside, outside = (middle, outside) if near else (inside, middle)
            return outside

        low, high = (end(one) for one in ENDS)
        share, low, high = (one**2 if one > ENDS[0] + STEP else 0.0 for one in (root, low, high))
        return share, low, high

    def probability(self, share: float) -> Array:
        """For each observed number, the probability that it is a wrong one's where these have a share."""
        self.fit(share)
        found: Array = share / self._ratio(self.beta, share)[1][self.observed]
        return found

    def fit(self, share: float) -> float:
        """Find the β of a share, by Fisher scoring from the β found last; the log-likelihood."""
        value, step = self._value(self.beta, share), np.full_like(self.beta, np.inf)
        while np.isfinite(value):
            right, both = self._ratio(self.beta, share)
            chance, slope = both / (1 + both), right / both
            pull = PRIOR * np.r_[0.0, self.beta[1:]]
            gradient = self.design.T @ (self.weights * (self.observed - chance) * slope) - pull
            curved = (self.weights * chance * (1 - chance) * slope**2)[:, None] * self.design
            information = self.design.T @ curved + np.diag([1e-9, *[PRIOR] * (len(pull) - 1)])
            step = np.linalg.solve(information, gradient)
            while (new := self._value(self.beta + step, share)) < value and np.abs(step).max() > 1e-6:
                step /= 2
            if new - value < GAIN:
                break
            self.beta, value = self.beta + step, new
        return value

    def _ratio(self, beta: Array, share: float) -> tuple[Array, Array]:
        """The density of right ones and that of both, in units of the planted one."""
        right = (1 - share) * np.exp(np.clip(self.design @ beta, -30, 30))
        return right, share + right

    def _value(self, beta: Array, share: float) -> float:
        _, both = self._ratio(beta, share)
        likelihood = np.log(both[self.observed]).sum() - self.weights @ np.log1p(both)
        return float(likelihood - PRIOR * (beta[1:] ** 2).sum() / 2)


def _highest(value: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one peak is highest, by golden section."""
    golden = (np.sqrt(5) - 1) / 2
    one, two = high - golden * (high - low), low + golden * (high - low)
    at_one, at_two = value(one), value(two)
    while high - low > STEP:
        if at_one > at_two:
            high, two, at_two = two, one, at_one
            at_one = value(one := high - golden * (high - low))
        else:
            low, one, at_one = one, two, at_two
            at_two = value(two := low + golden * (high - low))
    return float(low + high) / 2

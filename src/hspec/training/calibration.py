"""Whether the confidence head means what it says: reliability bins, expected calibration error and Brier score.

A draft whose confidence is c should be accepted with probability c. What is compared with is the acceptance probability
a = sum min(p, q) itself, not single draws of it: the same on average, with less noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BINS = 10


def _no_sums() -> Tensor:
    return torch.zeros(4, BINS, dtype=torch.float64)


@dataclass
class Calibration:
    """Sums over slots by bin of confidence, so that batches and processes pool."""

    sums: Tensor = field(default_factory=_no_sums)
    """``[4, BINS]``: how many, their confidences, their acceptances, their expected squared errors. Bin b has the confidences from
    b / BINS to (b + 1) / BINS."""

    def add(self, confidence: Tensor, acceptance: Tensor) -> None:
        """``[R]`` each, in [0, 1].

        The squared error is that of c against "accepted or not", which is accepted with probability a:
        a (1 - c)^2 + (1 - a) c^2 = c^2 - 2 c a + a.
        """
        c, a = confidence.double().cpu(), acceptance.double().cpu()
        bins = (c * BINS).long().clamp(0, BINS - 1)
        self.sums.index_add_(1, bins, torch.stack((torch.ones_like(c), c, a, c * c - 2 * c * a + a)))

    def merge(self, other: Calibration) -> None:
        self.sums += other.sums

    @property
    def count(self) -> int:
        return int(self.sums[0].sum())

    @property
    def error(self) -> float:
        """Expected calibration error: |mean confidence - mean acceptance| of the bins, weighted by how many they hold (Guo et al.,
        arXiv 1706.04599, eq. 5); 0 if nothing was added."""
        return float((self.sums[1] - self.sums[2]).abs().sum()) / max(self.count, 1)

    @property
    def brier(self) -> float:
        """Mean squared error against accepted or not; a head that knew every acceptance would still have mean a (1 - a)."""
        return float(self.sums[3].sum()) / max(self.count, 1)

    def report(self) -> dict[str, Any]:
        """Both, and of each bin how many, mean confidence and mean acceptance; None where it is empty."""
        count, confidence, acceptance = (row.tolist() for row in self.sums[:3])

        def means(total: list[float]) -> list[float | None]:
            return [round(t / n, 4) if n else None for t, n in zip(total, count, strict=True)]

        return {
            "ece": round(self.error, 4),
            "brier": round(self.brier, 4),
            "count": [int(n) for n in count],
            "confidence": means(confidence),
            "acceptance": means(acceptance),
        }

"""Sharing a whole number out: prompts over sources, anchors over documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def apportion(total: int, weights: Sequence[float] | np.ndarray, room: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """Whole numbers in proportion to ``weights``, none above its ``room``; what a full one cannot take goes to the others, in
    proportion again. The largest remainders are rounded up, of equal ones the first.

    Args:
        weights: ``[n]``, not negative. room: ``[n]``, not negative; None: each may have all.

    Returns:
        ``[n]`` int64. They sum to ``total``, or to the room of those that weigh anything if that is less.
    """
    shares = np.asarray(weights, dtype=np.float64)
    most = np.full(len(shares), total, dtype=np.int64) if room is None else np.asarray(room, dtype=np.int64)
    most = np.where(shares > 0, most, 0)
    total = min(total, int(most.sum()))
    exact = _filled(total, shares, most)
    # A share that should be whole may lie a rounding error below.
    counts = np.minimum(np.floor(exact + 1e-9).astype(np.int64), most)
    rest = np.where(counts < most, exact - counts, -1.0)
    up = np.argsort(-rest, kind="stable")[: total - int(counts.sum())]
    counts[up] += 1
    return counts


def _filled(total: int, weights: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The shares before rounding."""
    exact, open_ = np.zeros(len(weights)), most > 0
    while open_.any():
        level = (total - exact[~open_].sum()) / weights[open_].sum()
        full = open_ & (level * weights >= most)
        if not full.any():
            exact[open_] = level * weights[open_]
            break
        exact[full] = most[full]
        open_ &= ~full
    return exact

"""Whole numbers in proportion: exact in sum, never above the room, and nobody is passed over."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.training.apportion import apportion

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


@settings(deadline=None)
@given(total=st.integers(0, 10_000), weights=WEIGHTS)
def test_without_limits_each_is_within_one_of_its_share(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert counts.sum() == total
    shares = total * np.array(weights) / sum(weights)
    assert (np.abs(counts - shares) < 1 + 1e-6).all()


@settings(deadline=None)
@given(total=st.integers(0, 300), pairs=st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 40)), min_size=1, max_size=12))
def test_with_limits_those_that_are_not_full_share_alike(total: int, pairs: list[tuple[float, int]]) -> None:
    weights, room = np.array([w for w, _ in pairs]), np.array([r for _, r in pairs])
    counts = apportion(total, weights, room)
    assert counts.sum() == min(total, room.sum())
    assert (counts >= 0).all() and (counts <= room).all()
    # By any one's weight, none that still has room got less than another one, but for rounding.
    for i in np.flatnonzero(counts < room):
        assert (counts / weights <= (counts[i] + 1) / weights[i] + 1 / weights + 1e-6).all()


def test_known_shares() -> None:
    assert apportion(100_000, [60, 40]).tolist() == [60_000, 40_000]
    assert apportion(10, [1, 1, 1]).tolist() == [4, 3, 3]
    assert apportion(10, [60, 40], [2, 100]).tolist() == [2, 8]
    assert apportion(10, [1, 0], [3, 100]).tolist() == [3, 0]
    assert apportion(5, [0.1, 0.2, 0.2]).tolist() == [1, 2, 2]

"""Reliability of the confidence head against slow sums."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.training.calibration import BINS, Calibration

PAIRS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60)


def added(pairs: list[tuple[float, float]]) -> Calibration:
    calibration = Calibration()
    c, a = torch.tensor(pairs, dtype=torch.float64).T
    calibration.add(c, a)
    return calibration


@settings(max_examples=50, deadline=None)
@given(PAIRS)
def test_both_scores_by_hand(pairs: list[tuple[float, float]]) -> None:
    calibration = added(pairs)
    bins: dict[int, list[tuple[float, float]]] = {}
    for c, a in pairs:
        bins.setdefault(min(BINS - 1, int(c * BINS)), []).append((c, a))
    gaps = [abs(sum(c for c, _ in of) - sum(a for _, a in of)) for of in bins.values()]
    assert calibration.error == pytest.approx(sum(gaps) / len(pairs), abs=1e-9)
    squares = [a * (1 - c) ** 2 + (1 - a) * c**2 for c, a in pairs]
    assert calibration.brier == pytest.approx(sum(squares) / len(pairs), abs=1e-9)
    assert calibration.count == len(pairs)
    assert calibration.error <= 1 and calibration.brier >= sum(a * (1 - a) for _, a in pairs) / len(pairs) - 1e-9


@settings(max_examples=30, deadline=None)
@given(PAIRS, PAIRS)
def test_parts_pool(one: list[tuple[float, float]], two: list[tuple[float, float]]) -> None:
    merged = added(one)
    merged.merge(added(two))
    assert torch.allclose(merged.sums, added(one + two).sums)


def test_the_right_confidence_is_calibrated_and_its_error_is_the_noise_that_is_left() -> None:
    a = torch.linspace(0, 1, 101, dtype=torch.float64)
    right, sure = Calibration(), Calibration()
    right.add(a, a)
    sure.add(torch.ones_like(a), a)
    assert right.error == 0.0 and right.brier == pytest.approx(float((a * (1 - a)).mean()))
    assert sure.error == pytest.approx(0.5) and sure.brier == pytest.approx(0.5)


def test_the_brier_score_is_what_draws_would_give() -> None:
    g = torch.Generator().manual_seed(0)
    c, a = torch.rand(200_000, generator=g), torch.rand(200_000, generator=g)
    drawn = ((torch.rand(200_000, generator=g) < a).float() - c).square().mean()
    calibration = Calibration()
    calibration.add(c, a)
    assert calibration.brier == pytest.approx(float(drawn), abs=3e-3)


def test_the_report_is_json_with_none_for_empty_bins() -> None:
    report = json.loads(json.dumps(added([(0.05, 0.1), (0.07, 0.3), (1.0, 1.0)]).report()))
    assert report["count"] == [2, *[0] * (BINS - 2), 1]
    assert report["confidence"] == [0.06, *[None] * (BINS - 2), 1.0]
    assert report["acceptance"] == [0.2, *[None] * (BINS - 2), 1.0]
    assert report["ece"] == pytest.approx(0.28 / 3, abs=1e-4)
    assert Calibration().report()["ece"] == 0.0

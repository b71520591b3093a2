"""Random numbers are a pure function of what they are for, uniform, and independent of each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hspec.decoding.randomness import Purpose, sample, uniform

LARGEST = 1 - 2.0**-53
PINNED = [0.05008197282971483, 0.3996800800527174, 0.13132798597178819]


def numbers(purpose: Purpose, seeds: range = range(200), positions: range = range(100)) -> np.ndarray:
    return np.array([[uniform(s, p, purpose) for p in positions] for s in seeds])


def test_a_pure_function() -> None:
    cases = list(itertools.product([0, 1, 2**63, 2**64 - 1], [0, 1, 77], Purpose))
    once = [uniform(*c) for c in cases]
    assert once == [uniform(*c) for c in reversed(cases)][::-1]
    assert len(set(once)) == len(cases)
    assert all(0 <= u < 1 and u * 2**53 == int(u * 2**53) for u in once)


def test_values_stay_as_they_are() -> None:
    """A saved seed must give the same text in later versions."""
    assert [uniform(0, 0, Purpose.TARGET), uniform(1, 5, Purpose.DRAFT), uniform(-1, 5, Purpose.ACCEPT)] == PINNED


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform(purpose: Purpose) -> None:
    u = numbers(purpose).ravel()
    assert stats.chisquare(np.histogram(u, 64, (0, 1))[0]).pvalue > 1e-3
    assert stats.chisquare(np.bincount((u * 2**53).astype(np.int64) & 63, minlength=64)).pvalue > 1e-3  # the low bits too


def test_independent_across_purposes_positions_and_seeds() -> None:
    by_purpose = {purpose: numbers(purpose) for purpose in Purpose}
    pairs = [(by_purpose[a], by_purpose[b]) for a, b in itertools.combinations(Purpose, 2)]
    for u in by_purpose.values():
        pairs += [(u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (u[:, :-7], u[:, 7:])]
    pairs += [(by_purpose[a][:, :-1], by_purpose[b][:, 1:]) for a, b in itertools.permutations(Purpose, 2)]
    for a, b in pairs:
        table = np.histogram2d(a.ravel(), b.ravel(), 8, [(0, 1), (0, 1)])[0]
        assert stats.chisquare(table.ravel()).pvalue > 1e-4


def test_sample_inverts_the_distribution_function() -> None:
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    for u, token in [(0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (LARGEST, 3)]:
        assert sample(p, torch.tensor([u], dtype=torch.float64)).item() == token
        assert sample(3 * p, torch.tensor([u], dtype=torch.float64)).item() == token, "weights need not sum to one"


def test_sample_takes_rows_by_themselves() -> None:
    p = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert sample(p, torch.tensor([0.5, 0.0, LARGEST], dtype=torch.float64)).tolist() == [1, 1, 0]


def test_sample_keeps_small_entries() -> None:
    """In float32 sums the last entry would vanish behind the first."""
    p = torch.tensor([[1.0, 1e-9]])
    assert sample(p, torch.tensor([LARGEST], dtype=torch.float64)).item() == 1


WEIGHT = st.one_of(st.just(0.0), st.floats(2.0**-100, 1024.0, width=32))
EDGES = st.one_of(st.sampled_from([0.0, 2.0**-53, LARGEST]), st.floats(0, 1, exclude_max=True))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(WEIGHT, min_size=1, max_size=12).filter(lambda w: sum(w) > 0), EDGES)
def test_sample_never_returns_an_impossible_entry(weights: list[float], u: float) -> None:
    p = torch.tensor([weights])
    token = int(sample(p, torch.tensor([u], dtype=torch.float64)))
    assert p[0, token] > 0

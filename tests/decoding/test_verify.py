"""The acceptance rules are exact: what is emitted is distributed as the target's own text."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.decoding.verify import Verdict, verify_greedy, verify_sampled

Table = Callable[[tuple[int, ...]], list[int]]
"""Prefix -> weights of the next token in quarters."""
UNIT = 4


def cyclic(*rows: list[int]) -> Table:
    """A distribution that depends on all of the prefix."""
    return lambda prefix: rows[(len(prefix) + 2 * sum(prefix)) % len(rows)]


def grid(size: int) -> list[float]:
    """Midpoints of ``size`` equal parts of [0, 1): sums over them are integrals of steps at multiples of 1 / size."""
    return [(i + 0.5) / size for i in range(size)]


def emitted_distribution(
    p: Table, q: Table | None, draft_ids: list[int] | None, k: int, size: int, guess: Table | None = None
) -> dict[tuple[int, ...], Fraction]:
    """Joint distribution of the first k + 1 tokens, through :func:`verify_sampled`, over all drafts and uniforms.

    Where a step emits fewer tokens, the rest is the target's own. ``q`` None: drafts are the largest of ``guess``, one-hot.
    """
    ids = draft_ids if draft_ids is not None else list(range(len(p(()))))
    joint: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    length = k + 1

    def finish(tokens: tuple[int, ...], weight: Fraction) -> None:
        if len(tokens) == length:
            joint[tokens] += weight
            return
        for token, share in enumerate(p(tokens)):
            if share:
                finish((*tokens, token), weight * Fraction(share, UNIT))

    for drafts in itertools.product(ids, repeat=k):
        prefixes = [drafts[:i] for i in range(k + 1)]
        if q is None:
            assert guess is not None
            shares = [int(drafts[i] == max(ids, key=guess(prefixes[i]).__getitem__)) * UNIT for i in range(k)]
        else:
            shares = [q(prefixes[i])[ids.index(drafts[i])] for i in range(k)]
        if not all(shares):
            continue
        drawn = Fraction(1)
        for share in shares:
            drawn *= Fraction(share, UNIT)
        rows = torch.tensor([p(prefix) for prefix in prefixes], dtype=torch.float32) / UNIT
        q_rows = None if q is None else torch.tensor([q(prefix) for prefix in prefixes[:k]], dtype=torch.float32) / UNIT
        verdicts: dict[Verdict, int] = defaultdict(int)
        for accept in itertools.product(grid(size), repeat=k):
            for draw in grid(size):
                verdicts[verify_sampled(rows, list(drafts), q_rows, torch.tensor(ids), list(accept), [draw] * length)] += 1
        for verdict, count in verdicts.items():
            finish((*drafts[: verdict.accepted], verdict.token), drawn * Fraction(count, size ** (k + 1)))
    return joint


def target_distribution(p: Table, k: int) -> dict[tuple[int, ...], Fraction]:
    joint = {}
    for tokens in itertools.product(range(len(p(()))), repeat=k + 1):
        weight = Fraction(1)
        for i, token in enumerate(tokens):
            weight *= Fraction(p(tokens[:i])[token], UNIT)
        if weight:
            joint[tokens] = weight
    return joint


# Weights in quarters give steps at multiples of 1/4, 1/3 and 1/2 only: a grid of 12 is exact. For k = 3 the tables are such
# that no thirds occur (weights of q, and the totals of max(p - q, 0), are 1, 2 or 4), and a grid of 4 is.
P = cyclic([1, 1, 2], [0, 3, 1], [4, 0, 0], [2, 2, 0])
Q = cyclic([1, 3, 0], [1, 1, 2], [2, 2, 0])
P_EVEN = cyclic([2, 1, 1], [0, 3, 1], [2, 2, 0], [1, 3, 0])
Q_EVEN = cyclic([2, 1, 1], [1, 1, 2], [0, 2, 2], [4, 0, 0])
P_WIDE = cyclic([1, 1, 1, 1], [2, 0, 2, 0], [0, 0, 1, 3], [1, 2, 0, 1])
Q_WIDE = cyclic([1, 3], [2, 2], [4, 0])
Q_WIDE_EVEN = cyclic([2, 2], [4, 0], [0, 4])
GUESS = cyclic([3, 1, 0], [0, 4, 0], [0, 3, 1])


@pytest.mark.parametrize("p, q, k, size", [(P, Q, 1, 12), (P, Q, 2, 12), (P, P, 2, 12), (P_EVEN, Q_EVEN, 3, 4)])
def test_sampled_drafts_leave_the_distribution(p: Table, q: Table, k: int, size: int) -> None:
    assert emitted_distribution(p, q, None, k, size) == target_distribution(p, k)


@pytest.mark.parametrize("p, guess, k, size", [(P, Q, 1, 12), (P, P, 2, 12), (P_EVEN, GUESS, 2, 12), (P, GUESS, 3, 12)])
def test_one_hot_drafts_leave_the_distribution(p: Table, guess: Table, k: int, size: int) -> None:
    assert emitted_distribution(p, None, None, k, size, guess) == target_distribution(p, k)


@pytest.mark.parametrize("q, k, size", [(Q_WIDE, 1, 12), (Q_WIDE, 2, 12), (Q_WIDE_EVEN, 3, 4)])
def test_draft_vocabulary_smaller_than_the_targets(q: Table, k: int, size: int) -> None:
    assert emitted_distribution(P_WIDE, q, [1, 3], k, size) == target_distribution(P_WIDE, k)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_equal_distributions_always_accept(u: float) -> None:
    for seed in range(50):
        p = torch.randn(2, 50, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(-1)
        draft = seed % 50
        assert verify_sampled(p, [draft], p[:1], torch.arange(50), [u], [0.3, 0.3]).accepted == 1


def test_a_rejection_that_rounding_made_still_draws_from_p() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    q = p[:1].clone()
    q[0, 0] = torch.nextafter(q[0, 0], torch.tensor(1.0))
    verdict = verify_sampled(p, [0], q, torch.arange(3), [1 - 2.0**-53], [0.75, 0.0])
    assert verdict == Verdict(0, 1)


def test_what_follows_the_first_rejection_does_not_matter() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    verdicts = {
        verify_sampled(p, [0, later], None, None, [0.9, u], [0.1, w, w])
        for later in (0, 1)
        for u in (0.0, 0.99)
        for w in (0.0, 0.99)
    }
    assert verdicts == {Verdict(0, 1)}


UNIFORM = st.one_of(st.sampled_from([0.0, 2.0**-53, 1 - 2.0**-53]), st.floats(0, 1, exclude_max=True))
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=6, max_size=6).filter(lambda w: sum(w) > 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_nothing_of_probability_zero_is_emitted(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 3))
    p = torch.tensor(data.draw(st.lists(WEIGHTS, min_size=k + 1, max_size=k + 1)))
    p = p / p.sum(-1, keepdim=True)
    one_hot = data.draw(st.booleans())
    draft_ids = torch.tensor([0, 2, 3, 5])
    q, drafts = None, data.draw(st.lists(st.sampled_from(draft_ids.tolist()), min_size=k, max_size=k))
    if not one_hot:
        q = torch.tensor([[data.draw(st.floats(1e-6, 1.0)) for _ in range(4)] for _ in range(k)])
        q = q / q.sum(-1, keepdim=True)
    accept = data.draw(st.lists(UNIFORM, min_size=k, max_size=k))
    draw = data.draw(st.lists(UNIFORM, min_size=k + 1, max_size=k + 1))
    verdict = verify_sampled(p, drafts, q, draft_ids, accept, draw)
    assert all(p[i, drafts[i]] > 0 for i in range(verdict.accepted))
    assert p[verdict.accepted, verdict.token] > 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_greedy_accepts_the_longest_prefix(target: list[int], drafts: list[int]) -> None:
    drafts = drafts[: len(target) - 1]
    verdict = verify_greedy(target, drafts)
    assert target[: verdict.accepted] == drafts[: verdict.accepted]
    assert verdict.accepted == len(drafts) or target[verdict.accepted] != drafts[verdict.accepted]
    assert verdict.token == target[verdict.accepted]

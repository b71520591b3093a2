"""The objective's closed-form gradients against slow definitions in fp64, the laws of its terms, and how much memory it takes."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hspec.training.objective import (
    NOTHING_ELSE,
    Extras,
    LossWeights,
    SlotStatistics,
    block_objective,
    candidate_objective,
    chunk_bytes,
    dpace_weights,
    slot_decay,
)
from hspec.training.target_rows import TargetRows

HIDDEN, RANK, VOCABULARY, POSITIONS = 12, 5, 31, 9
DRAFT_IDS = torch.tensor([0, 2, 3, 5, 8, 11, 12, 17, 18, 23, 29])
TERMS = {
    "ce": LossWeights(1.0, 0.0, 0.0),
    "kl": LossWeights(0.0, 1.0, 0.0),
    "tv": LossWeights(0.0, 0.0, 1.0),
    "lk": LossWeights(0.0, 0.0, 0.0, 1.0),
    "lk, soon TV": LossWeights(0.0, 0.0, 0.0, 1.0, 12.0),
    "recipe": LossWeights(0.1, 0.0, 0.9),
    "all": LossWeights(0.1, 0.3, 0.4, 0.2),
}


def naive(p: Tensor, z: Tensor, label: Tensor, weights: LossWeights, share: Tensor | None = None) -> Tensor:
    """A slot's loss by the definitions, one slot after the other: p and z ``[draft vocabulary]`` fp64, label a draft id or -1.

    ``share``: LK-hybrid's of KL, where it is to be held fixed.
    """
    q = torch.exp(z) / torch.exp(z).sum()
    ce = -torch.log(q[label]) if label >= 0 else z.sum() * 0
    inside = p / p.sum()
    kl = p.sum() * (inside * torch.log(inside / q)).sum()
    tv = 1 - torch.minimum(p, q).sum()
    if share is None:
        share = torch.exp(-weights.lk_eta * (1 - tv)).detach()
    return weights.ce * ce + weights.kl * kl + weights.tv * tv + weights.lk * (share * kl + (1 - share) * tv)


class Case:
    """Random inputs; the definition is evaluated in fp64, so that its own rounding hides nothing."""

    def __init__(self, slots: int = 40, markov: bool = True, seed: int = 0, hidden: int = HIDDEN):
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        self.head_full = normal(VOCABULARY, hidden)
        self.hidden = normal(slots, hidden).requires_grad_()
        self.markov = normal(slots, RANK).requires_grad_() if markov else None
        self.w2 = normal(len(DRAFT_IDS), RANK).requires_grad_() if markov else None
        self.head = normal(len(DRAFT_IDS), hidden)
        self.rows = torch.randint(POSITIONS, (slots,), generator=g)
        self.weight = torch.rand(slots, generator=g)
        self.weight[::7] = 0.0
        self.tokens = torch.randint(VOCABULARY, (slots,), generator=g)
        self.target = TargetRows(normal(POSITIONS, hidden), lambda h: h @ self.head_full.to(h.dtype).T, DRAFT_IDS)

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.markov, self.w2) if t is not None]

    def run(self, weights: LossWeights, chunk: int = 16, extras: Extras = NOTHING_ELSE) -> tuple[Tensor, SlotStatistics]:
        return block_objective(
            self.hidden, self.markov, self.w2, self.head, self.rows, self.weight, self.target, weights, chunk, extras
        )

    def full(self) -> Tensor:
        return self.target.logits(self.target.hidden[self.rows].double())

    def naive(
        self,
        weights: LossWeights,
        labels: Tensor | None = None,
        leaves: list[Tensor] | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        """By the definitions, differentiated by autograd."""
        hidden, *low_rank = leaves or [t.double() for t in self.leaves]
        full = self.full()
        labels = full.argmax(-1) if labels is None else labels
        z = hidden @ self.head.double().T
        if low_rank:
            z = z + low_rank[0] @ low_rank[1].T
        total = torch.zeros((), dtype=torch.float64)
        for i, p in enumerate(full.softmax(-1)[:, DRAFT_IDS]):
            at = (labels[i] == DRAFT_IDS).nonzero()
            label = at[0, 0] if len(at) else torch.tensor(-1)
            share = None if shares is None else shares[i]
            total = total + float(self.weight[i]) * naive(p, z[i], label, weights, share)
        return total


@pytest.mark.parametrize("label", ["argmax", "data"])
@pytest.mark.parametrize("markov", [True, False], ids=["markov", "no markov"])
@pytest.mark.parametrize("weights", TERMS.values(), ids=TERMS.keys())
def test_value_and_gradients_are_those_of_the_definition(weights: LossWeights, markov: bool, label: str) -> None:
    case = Case(markov=markov)
    labels = case.tokens if label == "data" else None
    expected = case.naive(weights, labels)
    expected_gradients = torch.autograd.grad(expected, case.leaves)
    total, _ = case.run(weights, extras=Extras(labels=labels))
    gradients = torch.autograd.grad(3.0 * total, case.leaves)
    assert torch.allclose(total.double(), expected, rtol=1e-5)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert float(theirs.abs().max()) > 1e-3
        assert torch.allclose(mine, 3.0 * theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("weights", TERMS.values(), ids=TERMS.keys())
def test_gradients_are_differences_of_values(weights: LossWeights) -> None:
    """Without autograd on either side: along random directions, of the definition with LK-hybrid's shares held where they are."""
    case, step = Case(), 1e-6
    total, stats = case.run(weights)
    gradients = torch.autograd.grad(total, case.leaves)
    shares = torch.exp(-weights.lk_eta * stats.acceptance.double())
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        directions = [torch.randn(leaf.shape, generator=g, dtype=torch.float64) for leaf in case.leaves]
        ends = [
            float(case.naive(weights, None, [t.detach().double() + s * d for t, d in zip(case.leaves, directions)], shares))
            for s in (step, -step)
        ]
        along = sum(float((grad.double() * d).sum()) for grad, d in zip(gradients, directions))
        assert along == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16, 40, 1000])
def test_the_chunk_size_changes_nothing(chunk: int) -> None:
    case, extras = Case(), Extras(4, Case().tokens)
    total, stats = case.run(TERMS["all"], 7, extras)
    gradients = torch.autograd.grad(total, case.leaves)
    again, other = case.run(TERMS["all"], chunk, extras)
    assert torch.allclose(total, again, rtol=1e-6)
    for name in ("loss", "ce", "kl", "acceptance", "token_ratio"):
        assert torch.allclose(getattr(stats, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    assert torch.equal(stats.agreement, other.agreement)
    assert stats.candidates is not None and other.candidates is not None
    for name in ("ids", "label", "argmax", "token"):
        assert torch.equal(getattr(stats.candidates, name), getattr(other.candidates, name))
    for one, two in zip(gradients, torch.autograd.grad(again, case.leaves), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def test_the_targets_full_distribution_is_not_renormalised() -> None:
    """A target sure of a token outside the draft vocabulary accepts nothing, however well the drafter does inside of it."""
    case = Case(markov=False)
    outside = next(t for t in range(VOCABULARY) if t not in DRAFT_IDS)
    sure = torch.zeros(VOCABULARY)
    sure[outside] = 50.0
    rows = TargetRows(case.target.hidden, lambda h: sure.expand(h.shape[0], -1), DRAFT_IDS)
    total, stats = block_objective(case.hidden, None, None, case.head, case.rows, case.weight, rows, LossWeights(0.1, 0.0, 0.9))
    assert float(stats.acceptance.max()) < 1e-12 and not bool(stats.agreement.any())
    assert float(stats.kl.max()) < 1e-12  # what is outside is nothing that a drafter could win
    assert float(total.detach()) == pytest.approx(0.9 * float(case.weight.sum()), rel=1e-5)  # and the label gives no CE


@pytest.mark.parametrize("given_labels", [False, True])
def test_a_label_outside_the_draft_vocabulary_gives_no_ce(given_labels: bool) -> None:
    case = Case()
    labels = case.tokens if given_labels else case.full().argmax(-1)
    inside = torch.isin(labels, DRAFT_IDS)
    assert 0 < int(inside.sum()) < len(labels)
    case.weight.fill_(1.0)
    total, stats = case.run(TERMS["ce"], extras=Extras(labels=case.tokens if given_labels else None))
    (gradient,) = torch.autograd.grad(total, [case.hidden])
    assert (stats.ce > 0).tolist() == inside.tolist() == (gradient.abs().sum(-1) > 1e-6).tolist()


def test_statistics() -> None:
    case = Case()
    _, stats = case.run(TERMS["recipe"], extras=Extras(tokens=case.tokens))
    assert case.markov is not None and case.w2 is not None
    p = case.full().softmax(-1)
    q = torch.zeros_like(p)
    q[:, DRAFT_IDS] = (case.hidden @ case.head.T + case.markov @ case.w2.T).detach().double().softmax(-1)
    assert torch.allclose(stats.acceptance.double(), torch.minimum(p, q).sum(-1), rtol=1e-5)
    assert stats.agreement.tolist() == (q.argmax(-1) == p.argmax(-1)).tolist() and 0 < int(stats.agreement.sum()) < 40
    own = case.tokens[:, None]
    ratio = (q.gather(1, own) / p.gather(1, own)).clamp_max(1.0).squeeze(1)
    assert torch.allclose(stats.token_ratio.double(), ratio, rtol=1e-5) and 0 < int((ratio == 0).sum()) < 40
    assert torch.allclose(stats.loss, 0.1 * stats.ce + 0.9 * (1 - stats.acceptance), rtol=1e-5)
    assert not any(getattr(stats, name).requires_grad for name in ("loss", "ce", "kl", "acceptance", "token_ratio"))


def test_candidates_hold_the_best_and_the_label() -> None:
    case = Case()
    _, stats = case.run(TERMS["all"], extras=Extras(3, case.tokens, case.tokens))
    found = stats.candidates
    assert found is not None and case.markov is not None and case.w2 is not None
    z = (case.hidden @ case.head.T + case.markov @ case.w2.T).detach()
    p, best = case.full().softmax(-1), case.full().argmax(-1)
    for i, row in enumerate(z):
        ids, top, label = DRAFT_IDS[found.ids[i]], row.topk(3).indices, int(case.tokens[i])
        assert torch.equal(found.ids[i, :2], top[:2]) and torch.equal(found.drafted(found.ids)[i], top)
        assert torch.allclose(found.p[i].double(), p[i, ids], rtol=1e-4)
        missing = label in DRAFT_IDS and label not in DRAFT_IDS[top]
        assert int(ids[2]) == (label if missing else int(DRAFT_IDS[top[2]]))
        assert int(found.label[i]) == (ids[:3].tolist().index(label) if label in ids[:3] else -1)
        for id, wanted in ((found.token[i], label), (found.argmax[i], int(best[i]))):
            assert int(id) == (DRAFT_IDS.tolist().index(wanted) if wanted in DRAFT_IDS else -1)


@pytest.mark.parametrize("weights", TERMS.values(), ids=TERMS.keys())
def test_the_candidates_terms_are_those_of_the_definition(weights: LossWeights) -> None:
    case = Case()
    _, stats = case.run(TERMS["all"], extras=Extras(4, case.tokens))
    found, scores = stats.candidates, torch.randn(40, 5, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert found is not None
    total, _ = candidate_objective(scores, found, case.weight, weights)
    terms = [naive(found.p[i, :4].double(), scores[i, :4].double(), found.label[i], weights) for i in range(40)]
    expected = torch.stack(terms) @ case.weight.double()
    assert torch.allclose(total.double(), expected, rtol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(total, scores), torch.autograd.grad(expected, scores)):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=2e-6)


def test_a_label_among_the_candidates_does_not_count_as_drafted() -> None:
    """Statistics are of the q that would be drafted from, over the best alone; the label, where it had to be added, is not in it."""
    case = Case()
    _, stats = case.run(TERMS["all"], extras=Extras(4, case.tokens))
    found, scores = stats.candidates, torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
    assert found is not None
    scores[:, 3] += 5  # the label's place, if it was added
    own = candidate_objective(scores, found, case.weight, LossWeights())[1]
    full = case.full().softmax(-1)
    added = 0
    for i in range(40):
        ids = found.ids[i, [0, 1, 2, 4]]
        added += int(found.ids[i, 3] != found.ids[i, 4])
        q = torch.zeros(len(DRAFT_IDS)).index_copy(0, ids, scores[i, [0, 1, 2, 4]].softmax(-1))
        p = full[i, DRAFT_IDS].float()
        assert float(own.acceptance[i]) == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-4)
        assert bool(own.agreement[i]) == (int(DRAFT_IDS[q.argmax()]) == int(full[i].argmax()))
        token = int(found.token[i])
        assert float(own.token_ratio[i]) == pytest.approx(min(1, float(q[token] / p[token])) if token >= 0 else 0, rel=1e-4)
    assert 3 < added < 40 and int(own.agreement.sum()) > 0


def test_no_gradients_are_computed_where_none_are_asked_for() -> None:
    case = Case()
    with torch.no_grad():
        total, _ = case.run(TERMS["all"])
    assert not total.requires_grad
    assert torch.allclose(total, case.run(TERMS["all"])[0])


def test_no_slots_are_no_loss() -> None:
    case = Case(slots=0)
    total, stats = case.run(TERMS["all"], extras=Extras(3, case.tokens))
    total.backward()
    assert float(total.detach()) == 0.0 and stats.acceptance.shape == (0,)


# -- laws --------------------------------------------------------------------------------------------------------


def terms(full: Tensor, z: Tensor, draft_ids: Tensor) -> SlotStatistics:
    """Of target logits ``[R, vocabulary]`` and draft logits ``[R, draft vocabulary]`` as they are."""
    rows, one = torch.arange(len(full)), torch.eye(z.shape[1])
    return block_objective(
        z, None, None, one, rows, torch.ones(len(full)), TargetRows(full, lambda h: h, draft_ids), LossWeights()
    )[1]


def random_logits(seed: int, vocabulary: int, inside: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    draft_ids = torch.randperm(vocabulary, generator=g)[:inside].sort().values
    return torch.randn(8, vocabulary, generator=g) * scale, torch.randn(8, inside, generator=g) * scale, draft_ids


logits = st.builds(
    random_logits, st.integers(0, 2**31), st.integers(8, 24), st.integers(2, 8), st.floats(0.1, 8.0)
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(logits)
def test_laws_of_the_terms(case: tuple[Tensor, Tensor, Tensor]) -> None:
    full, z, draft_ids = case
    stats = terms(full, z, draft_ids)
    p, q = full.double().softmax(-1)[:, draft_ids], z.double().softmax(-1)
    tv, mass = 1 - stats.acceptance.double(), p.sum(-1)
    assert bool(((tv >= -1e-6) & (tv <= 1 + 1e-6)).all())
    assert torch.allclose(tv, (1 - mass + (p - q).abs().sum(-1)) / 2, atol=1e-5)  # half the L1 distance, the outside included
    assert bool((tv >= 1 - mass - 1e-6).all())  # what is outside is lost
    assert bool((stats.kl >= 0).all())
    inside = p / mass[:, None]
    distance, divergence = (inside - q).abs().sum(-1) / 2, stats.kl.double() / mass
    assert bool((distance <= (divergence / 2).sqrt() + 1e-3).all())  # Pinsker
    assert bool((distance <= (1 - torch.exp(-divergence)).clamp_min(0).sqrt() + 1e-3).all())  # Bretagnolle and Huber


@settings(max_examples=60, deadline=None)
@given(logits, st.floats(0.0, 20.0))
def test_lk_hybrid_lies_between_kl_and_tv(case: tuple[Tensor, Tensor, Tensor], eta: float) -> None:
    stats = terms(*case)
    kl, tv = LossWeights(0.0, 0.0, 0.0, 1.0, eta).of_divergences(stats.acceptance)
    mixed = kl * stats.kl + tv * (1 - stats.acceptance)
    ends = torch.stack((stats.kl, 1 - stats.acceptance))
    assert torch.allclose(kl + tv, torch.ones_like(kl))
    assert bool(((mixed >= ends.min(0).values - 1e-6) & (mixed <= ends.max(0).values + 1e-6)).all())
    more = LossWeights(0.0, 0.0, 0.0, 1.0, eta).of_divergences(stats.acceptance + 0.1)[0]
    assert bool((more <= kl).all())  # the better the drafter, the more TV


@settings(max_examples=30, deadline=None)
@given(logits, st.floats(-50, 50))
def test_a_perfect_drafter_loses_only_what_is_outside(case: tuple[Tensor, Tensor, Tensor], shift: float) -> None:
    full, _, draft_ids = case
    stats = terms(full, full[:, draft_ids] + shift, draft_ids)
    mass = full.softmax(-1)[:, draft_ids].sum(-1)
    assert torch.allclose(stats.acceptance, mass, atol=1e-5)
    assert float(stats.kl.max()) < 1e-4


def test_lk_hybrid_is_kl_at_eta_0_and_tv_far_from_it() -> None:
    case = Case()
    for eta, same in ((0.0, "kl"), (1e6, "tv")):
        hybrid = torch.autograd.grad(case.run(LossWeights(0.0, 0.0, 0.0, 1.0, eta))[0], case.leaves)
        for one, two in zip(hybrid, torch.autograd.grad(case.run(TERMS[same])[0], case.leaves), strict=True):
            assert torch.allclose(one, two, atol=1e-6)


# -- weights by slot ---------------------------------------------------------------------------------------------


def test_later_slots_weigh_less() -> None:
    assert torch.allclose(slot_decay(3, 2.0), torch.tensor([1.0, 2.718281828**-0.5, 2.718281828**-1.0]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), st.floats(0.05, 1.0), st.integers(0, 3))
def test_dpace_weights_are_what_a_slot_adds_to_the_expected_length(rates: list[float], alpha: float, missing: int) -> None:
    counted = torch.tensor(rates, dtype=torch.float64)
    log_s = ((1 - alpha) * counted + alpha).log().requires_grad_()
    (expected,) = torch.autograd.grad(log_s.cumsum(0).exp().sum(), log_s)
    weights = dpace_weights(torch.cat((counted, torch.full((missing,), -1.0)))[None].float(), alpha)[0]
    assert torch.allclose(weights[: len(rates)].double(), expected, rtol=1e-4)
    assert bool((weights[len(rates) :] == 0).all()) and bool((weights.diff() <= 1e-6).all())


def test_dpace_of_certain_slots_counts_those_that_follow() -> None:
    assert dpace_weights(torch.tensor([[0.3, 0.0, 0.9]]), 1.0).tolist() == [[3.0, 2.0, 1.0]]
    by_hand = [0.5 + 0.5 * 0.2 + 0.5 * 0.2 * 1.0, 0.5 * 0.2 + 0.5 * 0.2, 0.5 * 0.2 * 1.0]
    assert dpace_weights(torch.tensor([[0.5, 0.2, 1.0]]), 1e-9)[0].tolist() == pytest.approx(by_hand)


# -- memory ------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_logits_of_all_slots_never_exist_at_once() -> None:
    slots, chunk = 2000, 16
    case = Case(slots, hidden=3)
    with Largest() as largest:
        total, _ = case.run(TERMS["all"], chunk)
        total.backward()
    assert largest.numel == slots * RANK  # the gradient of the Markov embeddings, which is as large as the input
    assert chunk * VOCABULARY < slots * RANK < slots * len(DRAFT_IDS)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made while it is on hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in [*args, *(kwargs or {}).values()] if isinstance(t, Tensor)}
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given | self._seen:
                self._count(t)
        return out

    def _count(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
        self._seen.add(where)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, where, size)

    def _gone(self, where: int, size: int) -> None:
        self._seen.discard(where)
        self.now -= size


def peak(slots: int, draft: int, vocabulary: int, chunk: int, hidden: int = 4) -> tuple[int, int]:
    """Bytes that the objective holds at most, forward and backward, beside its inputs; and what of it must grow with the slots:
    the gradients of hidden states and Markov embeddings (kept, and once more multiplied), and the statistics."""
    g = torch.Generator().manual_seed(0)
    leaf = torch.randn(slots, hidden, generator=g).requires_grad_()
    markov = torch.randn(slots, 3, generator=g).requires_grad_()
    w2, full = torch.randn(draft, 3, generator=g).requires_grad_(), torch.randn(vocabulary, hidden, generator=g)
    target = TargetRows(
        torch.randn(slots, hidden, generator=g), lambda h: h @ full.T, torch.arange(draft) * (vocabulary // draft)
    )
    rows, weight = torch.arange(slots), torch.ones(slots)
    gc.collect()
    with Peak() as most:
        total, _ = block_objective(
            leaf, markov, w2, full[:draft], rows, weight, target, TERMS["all"], chunk, Extras(tokens=rows % draft)
        )
        total.backward()
    return most.most, slots * (4 * (hidden + 3) * 2 + 5 * 4 + 1 + 8)


@pytest.mark.parametrize(("draft", "vocabulary"), [(8000, 16000), (5000, 40000), (8000, 8000)])
def test_memory_is_bounded_by_the_chunk_and_not_by_the_slots(draft: int, vocabulary: int) -> None:
    chunk = 16
    few, of_few = peak(64, draft, vocabulary, chunk)
    many, of_many = peak(512, draft, vocabulary, chunk)
    bound = chunk_bytes(chunk, vocabulary, draft) + 4 * draft * 3 * 3  # and the gradient of W_2
    assert few - of_few < bound and many - of_many < bound
    assert many - few < 2 * (of_many - of_few)
    assert 0.9 * bound < many - of_many  # no looser than it must be
    assert peak(64, draft, vocabulary, 2 * chunk)[0] > 1.7 * few
    logits_at_once = 512 * draft * 4
    assert many < 0.6 * logits_at_once or vocabulary > 3 * draft


def test_the_papers_sizes() -> None:
    """3,072 anchors of 8 slots, 32,000 draft tokens, Qwen3's 151,936: what docs/objective.md says of them."""
    once = chunk_bytes(128, 151_936, 32_000)
    at_once = 3072 * 8 * 32_000 * 4
    assert round(once / 1e6) == 156 and round(at_once / 1e9, 1) == 3.1
    assert math.isclose(at_once / once, 20.2, abs_tol=0.1)

"""The objective's closed-form gradients against autograd on the plain definition, and how much memory it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hspec.training.objective import LossWeights, TargetRows, block_objective, slot_decay

HIDDEN, RANK, VOCABULARY, POSITIONS = 12, 5, 31, 9
DRAFT_IDS = torch.tensor([0, 2, 3, 5, 8, 11, 12, 17, 18, 23, 29])
TERMS = {
    "ce": LossWeights(1.0, 0.0, 0.0),
    "kl": LossWeights(0.0, 1.0, 0.0),
    "tv": LossWeights(0.0, 0.0, 1.0),
    "recipe": LossWeights(0.1, 0.0, 0.9),
    "all": LossWeights(0.1, 0.4, 0.5),
}


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
        self.target = TargetRows(normal(POSITIONS, hidden), lambda h: h @ self.head_full.to(h.dtype).T, DRAFT_IDS)

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.markov, self.w2) if t is not None]

    def run(self, weights: LossWeights, chunk: int = 16) -> tuple[Tensor, Any]:
        return block_objective(
            self.hidden, self.markov, self.w2, self.head, self.rows, self.weight, self.target, weights, chunk
        )

    def naive(self, weights: LossWeights) -> Tensor:
        """By the definitions, all logits at once, differentiated by autograd."""
        full = self.target.logits(self.target.hidden[self.rows].double())
        p = full.softmax(-1)[:, DRAFT_IDS]
        z = self.hidden.double() @ self.head.double().T
        if self.markov is not None and self.w2 is not None:
            z = z + self.markov.double() @ self.w2.double().T
        q, log_q = z.softmax(-1), z.log_softmax(-1)
        label = full.argmax(-1)
        ce = torch.stack([-log_q[i, y == DRAFT_IDS].sum() for i, y in enumerate(label)])  # 0 where the label has no draft id
        kl = -(p * log_q).sum(-1)
        tv = 1 - torch.minimum(p, q).sum(-1)
        return ((weights.ce * ce + weights.kl * kl + weights.tv * tv) * self.weight.double()).sum()


@pytest.mark.parametrize("markov", [True, False], ids=["markov", "no markov"])
@pytest.mark.parametrize("weights", TERMS.values(), ids=TERMS.keys())
def test_value_and_gradients_are_those_of_the_definition(weights: LossWeights, markov: bool) -> None:
    case = Case(markov=markov)
    expected = case.naive(weights)
    expected_gradients = torch.autograd.grad(expected, case.leaves)
    total, _ = case.run(weights)
    gradients = torch.autograd.grad(3.0 * total, case.leaves)
    assert torch.allclose(total.double(), expected, rtol=1e-5)
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert float(theirs.abs().max()) > 1e-3
        assert torch.allclose(mine, 3.0 * theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 3, 16, 40, 1000])
def test_the_chunk_size_changes_nothing(chunk: int) -> None:
    case = Case()
    total, stats = case.run(TERMS["all"], 7)
    gradients = torch.autograd.grad(total, case.leaves)
    again, other = case.run(TERMS["all"], chunk)
    assert torch.allclose(total, again, rtol=1e-6)
    for name in ("loss", "acceptance"):
        assert torch.allclose(getattr(stats, name), getattr(other, name), rtol=1e-5)
    assert torch.equal(stats.agreement, other.agreement)
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
    assert float(total.detach()) == pytest.approx(0.9 * float(case.weight.sum()), rel=1e-5)  # and the label gives no CE


def test_statistics() -> None:
    case = Case()
    _, stats = case.run(TERMS["recipe"])
    assert case.markov is not None and case.w2 is not None
    full = case.target.logits(case.target.hidden[case.rows])
    q = (case.hidden @ case.head.T + case.markov @ case.w2.T).softmax(-1)
    accepted = torch.minimum(full.softmax(-1)[:, DRAFT_IDS], q).sum(-1)
    assert torch.allclose(stats.acceptance, accepted, rtol=1e-5)
    assert stats.agreement.tolist() == (DRAFT_IDS[q.argmax(-1)] == full.argmax(-1)).tolist()
    assert not stats.acceptance.requires_grad and not stats.loss.requires_grad


def test_no_gradients_are_computed_where_none_are_asked_for() -> None:
    case = Case()
    with torch.no_grad():
        total, _ = case.run(TERMS["all"])
    assert not total.requires_grad
    assert torch.allclose(total, case.run(TERMS["all"])[0])


def test_later_slots_weigh_less() -> None:
    assert torch.allclose(slot_decay(3, 2.0), torch.tensor([1.0, 2.718281828**-0.5, 2.718281828**-1.0]))


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
    with Largest() as naive:
        case.naive(TERMS["tv"])
    assert naive.numel == slots * VOCABULARY

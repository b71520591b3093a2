"""DFlash-2's path selector against its formula; the walk stays within the candidates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hspec.drafters.config import SelectorConfig
from hspec.drafters.heads.selector import PathSelector
from tests.drafters.heads.naive import dot, matvec, walked
from tests.tiny import randomise

VOCABULARY, DRAFT, RANK, HIDDEN, CANDIDATES = 11, 9, 3, 5, 4
BLOCKS, SLOTS = 2, 4


def make_selector() -> PathSelector:
    selector = PathSelector(SelectorConfig(rank=RANK, candidates=CANDIDATES), VOCABULARY, DRAFT, HIDDEN)
    randomise(selector, 0)
    return selector.requires_grad_(False)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(BLOCKS, SLOTS, HIDDEN), torch.randint(0, VOCABULARY, (BLOCKS, SLOTS)), torch.randn(DRAFT, HIDDEN)


def naive(selector: PathSelector, unary: list[float], hidden: list[float], previous: int) -> list[float]:
    """unary(c) + <P[previous] * W_h h, S[c]> for the best c, all else impossible."""
    best = sorted(range(DRAFT), key=lambda c: -unary[c])[:CANDIDATES]
    projected = matvec(selector.hidden_projection.weight.tolist(), hidden)
    path = [p * x for p, x in zip(selector.predecessor[previous].tolist(), projected, strict=True)]
    return [unary[c] + dot(path, selector.successor[c].tolist()) if c in best else -math.inf for c in range(DRAFT)]


def test_the_walk_is_the_formula() -> None:
    selector, (hidden, previous, lm_head) = make_selector(), inputs()
    logits = walked(selector, hidden, previous, lambda h: h @ lm_head.T)
    for m in range(BLOCKS):
        for j in range(SLOTS):
            unary = (lm_head @ hidden[m, j]).tolist()
            wanted = naive(selector, unary, hidden[m, j].tolist(), int(previous[m, j]))
            torch.testing.assert_close(logits[m, j], torch.tensor(wanted), atol=1e-5, rtol=1e-5)


def test_q_is_over_the_candidates_and_nothing_else() -> None:
    selector, (hidden, previous, lm_head) = make_selector(), inputs()
    q = walked(selector, hidden, previous, lambda h: h @ lm_head.T).softmax(-1)
    candidates = (hidden @ lm_head.T).topk(CANDIDATES).indices
    assert torch.equal((q > 0).sum(-1), torch.full((BLOCKS, SLOTS), CANDIDATES))
    torch.testing.assert_close(q.gather(-1, candidates).sum(-1), torch.ones(BLOCKS, SLOTS))


def test_the_path_can_overrule_the_unary_logits() -> None:
    """Candidates are chosen by the unary logits, the token among them by the score with the path."""
    selector, (hidden, previous, lm_head) = make_selector(), inputs()
    unary = hidden @ lm_head.T
    best = walked(selector, hidden, previous, lambda h: h @ lm_head.T).argmax(-1)
    assert (best != unary.argmax(-1)).any()
    other = walked(selector, hidden, (previous + 1) % VOCABULARY, lambda h: h @ lm_head.T).argmax(-1)
    assert (best != other).any(), "it depends on the token before"


def test_it_starts_all_but_without_effect() -> None:
    selector = PathSelector(SelectorConfig(rank=64, candidates=CANDIDATES), VOCABULARY, DRAFT, HIDDEN)
    for weight in (selector.predecessor, selector.successor, selector.hidden_projection.weight):
        assert 0.015 < weight.std().item() < 0.025

"""Domino's head against its formulas: the GRU by hand."""

from __future__ import annotations

import math

import torch

from hspec.drafters.config import GruConfig
from hspec.drafters.heads.gru import GruHead
from tests.drafters.heads.naive import Matrix, Vector, matvec, sigmoid, silu, walked
from tests.tiny import randomise

VOCABULARY, DRAFT, SIZE, RANK, HIDDEN = 11, 7, 4, 3, 5
BLOCKS, SLOTS = 2, 4


def make_head() -> GruHead:
    head = GruHead(GruConfig(size=SIZE, rank=RANK), torch.randn(VOCABULARY, HIDDEN), DRAFT, HIDDEN)
    randomise(head, 0)
    return head.requires_grad_(False)


def naive(head: GruHead, hidden: Matrix, previous: list[int]) -> list[Vector]:
    """W_b SiLU(W_a [h_j; s_j]), where s_j has read the tokens before slot j:
    r = sigma(W_r x + U_r s), z = sigma(W_z x + U_z s), n = tanh(W_n x + r U_n s), s' = (1 - z) n + z s."""
    w = [part.tolist() for part in head.cell.weight_ih.chunk(3)]
    u = [part.tolist() for part in head.cell.weight_hh.chunk(3)]
    state, out = [0.0] * SIZE, []
    for h, token in zip(hidden, previous, strict=True):
        x = head.embedding[token].tolist()
        (xr, xz, xn), (sr, sz, sn) = [matvec(m, x) for m in w], [matvec(m, state) for m in u]
        new = []
        for i in range(SIZE):
            r, z = sigmoid(xr[i] + sr[i]), sigmoid(xz[i] + sz[i])
            new.append((1 - z) * math.tanh(xn[i] + r * sn[i]) + z * state[i])
        state = new
        low = [silu(a) for a in matvec(head.w1.weight.tolist(), [*h, *state])]
        out.append(matvec(head.w2.weight.tolist(), low))
    return out


def test_training_and_drafting_are_the_formula() -> None:
    head = make_head()
    hidden, lm_head = torch.randn(BLOCKS, SLOTS, HIDDEN), torch.randn(DRAFT, HIDDEN)
    previous = torch.randint(0, VOCABULARY, (BLOCKS, SLOTS))
    wanted = torch.tensor([naive(head, h, p) for h, p in zip(hidden.tolist(), previous.tolist(), strict=True)])
    features = head.features(hidden, previous)
    torch.testing.assert_close(head.w2(features), wanted, atol=1e-5, rtol=1e-5)
    logits = walked(head, hidden, previous, lambda h: h @ lm_head.T)
    torch.testing.assert_close(logits, hidden @ lm_head.T + wanted, atol=1e-5, rtol=1e-5)


def test_a_slot_has_read_every_token_before_it_and_none_behind() -> None:
    head = make_head()
    hidden, previous = torch.randn(1, SLOTS, HIDDEN), torch.tensor([[1, 2, 3, 4]])
    before = head.features(hidden, previous)
    changed = (head.features(hidden, torch.tensor([[1, 9, 3, 4]])) - before).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, True, True, True]


def test_it_starts_without_effect_and_without_biases() -> None:
    head = GruHead(GruConfig(size=SIZE, rank=RANK), torch.randn(VOCABULARY, HIDDEN), DRAFT, HIDDEN)
    assert not head.w2.weight.any()
    assert all(p.dim() == 2 for p in head.parameters())
    assert "embedding" not in dict(head.named_parameters()) and "embedding" not in head.state_dict()

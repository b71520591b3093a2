"""DBLAST's head against its formula; the latent is drawn once, by the chooser."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hspec.drafters.config import LatentConfig
from hspec.drafters.context import GreedyChooser
from hspec.drafters.heads.latent import LatentHead
from tests.drafters.heads.naive import Vector, add, matvec, silu, walked
from tests.tiny import randomise

VALUES, RANK, HIDDEN, DRAFT = 3, 2, 5, 7
BLOCKS, SLOTS = 2, 4


class Told(GreedyChooser):
    """Takes the categories that it is told, and keeps the logits that it is asked with."""

    def __init__(self, z: list[int]):
        self.z, self.asked = torch.tensor(z), list[Tensor]()

    def latent(self, logits: Tensor) -> Tensor:
        self.asked.append(logits)
        return self.z


def make_head() -> LatentHead:
    head = LatentHead(LatentConfig(values=VALUES, rank=RANK), HIDDEN)
    randomise(head, 0)
    return head.requires_grad_(False)


def naive(head: LatentHead, hidden: Vector, z: int) -> Vector:
    """h + W_up (SiLU(W_down h) * e_z)."""
    low = [silu(a) for a in matvec(head.down.weight.tolist(), hidden)]
    code = [a * e for a, e in zip(low, head.codes.weight[z].tolist(), strict=True)]
    return add(hidden, matvec(head.up.weight.tolist(), code))


@pytest.mark.parametrize("z", [[0, 0], [2, 1]])
def test_logits_are_conditional_on_what_was_drawn(z: list[int]) -> None:
    head, hidden, lm_head = make_head(), torch.randn(BLOCKS, SLOTS, HIDDEN), torch.randn(DRAFT, HIDDEN)
    shifted = torch.tensor([[naive(head, h, z[m]) for h in hidden[m].tolist()] for m in range(BLOCKS)])
    logits = walked(head, hidden, torch.zeros(BLOCKS, SLOTS, dtype=torch.long), lambda h: h @ lm_head.T, Told(z))
    torch.testing.assert_close(logits, shifted @ lm_head.T, atol=1e-5, rtol=1e-5)


def test_the_prior_is_of_the_anchor_and_asked_once_a_block() -> None:
    head, chooser = make_head(), Told([1, 2])
    anchor, previous = torch.randn(BLOCKS, HIDDEN), torch.zeros(BLOCKS, SLOTS, dtype=torch.long)
    walked(head, torch.randn(BLOCKS, SLOTS, HIDDEN), previous, lambda h: h, chooser, anchor)
    (asked,) = chooser.asked
    wanted = [add(matvec(head.prior.weight.tolist(), a), head.prior.bias.tolist()) for a in anchor.tolist()]
    torch.testing.assert_close(asked, torch.tensor(wanted), atol=1e-5, rtol=1e-5)


def test_slots_are_independent_given_the_latent() -> None:
    head, hidden = make_head(), torch.randn(BLOCKS, SLOTS, HIDDEN)
    one, other = torch.zeros(BLOCKS, SLOTS, dtype=torch.long), torch.full((BLOCKS, SLOTS), 5)
    chooser = Told([1, 2])
    logits = walked(head, hidden, one, lambda h: h, chooser)
    assert torch.equal(walked(head, hidden, other, lambda h: h, chooser), logits)
    assert not torch.allclose(walked(head, hidden, one, lambda h: h, Told([0, 2]))[0], logits[0]), "but they share it"
    assert torch.equal(walked(head, hidden, one, lambda h: h, Told([0, 2]))[1], logits[1]), "by block"

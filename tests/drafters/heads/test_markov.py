"""The Markov head in its three variants against its formulas, slot by slot."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hspec.drafters.config import MarkovConfig
from hspec.drafters.heads.markov import GatedMarkovHead, MarkovHead, RecurrentMarkovHead, markov_head
from tests.drafters.heads.naive import Matrix, Vector, add, matvec, sigmoid, walked
from tests.tiny import randomise

VOCABULARY, DRAFT, RANK, HIDDEN = 11, 7, 3, 5
BLOCKS, SLOTS = 2, 4
VARIANTS = ["vanilla", "gated", "recurrent"]


def make_head(variant: str) -> MarkovHead:
    head = markov_head(MarkovConfig(rank=RANK, variant=variant), VOCABULARY, DRAFT, HIDDEN)  # type: ignore[arg-type]
    randomise(head, 0)
    return head.requires_grad_(False)


def naive(head: MarkovHead, hidden: Matrix, previous: list[int]) -> list[Vector]:
    """What is added to the logits of every slot of one block."""
    w1, w2 = head.w1.weight.tolist(), head.w2.weight.tolist()
    state, out = [0.0] * RANK, []
    for h, token in zip(hidden, previous, strict=True):
        e = w1[token]
        if isinstance(head, GatedMarkovHead):
            gate = add(matvec(head.gate.weight.tolist(), [*h, *e]), head.gate.bias.tolist())
            e = [sigmoid(g) * x for g, x in zip(gate, e, strict=True)]
        elif isinstance(head, RecurrentMarkovHead):
            z = add(matvec(head.joint.weight.tolist(), [*state, *e, *h]), head.joint.bias.tolist())
            gate, candidate, output = z[:RANK], z[RANK : 2 * RANK], z[2 * RANK :]
            state = [sigmoid(g) * s + (1 - sigmoid(g)) * math.tanh(c) for g, s, c in zip(gate, state, candidate, strict=True)]
            e = [math.tanh(o) for o in output]
        out.append(matvec(w2, e))
    return out


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, tokens before each slot, an LM head."""
    return torch.randn(BLOCKS, SLOTS, HIDDEN), torch.randint(0, VOCABULARY, (BLOCKS, SLOTS)), torch.randn(DRAFT, HIDDEN)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_drafting_are_the_formula(variant: str) -> None:
    head, (hidden, previous, lm_head) = make_head(variant), inputs()
    wanted = torch.tensor([naive(head, h, p) for h, p in zip(hidden.tolist(), previous.tolist(), strict=True)])
    features = head.features(hidden, previous)
    torch.testing.assert_close(head.w2(features), wanted, atol=1e-5, rtol=1e-5)
    state, steps = head.start(BLOCKS), []
    for j in range(SLOTS):
        e, state = head.step(state, hidden[:, j], previous[:, j])
        steps.append(e)
    torch.testing.assert_close(torch.stack(steps, 1), features)
    logits = walked(head, hidden, previous, lambda h: h @ lm_head.T)
    torch.testing.assert_close(logits, hidden @ lm_head.T + wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_slot_depends_on(variant: str) -> None:
    """Vanilla and gated know the last token only; the recurrent one all of the block's, and never one that follows."""
    head, (hidden, previous, _) = make_head(variant), inputs()
    before = head.features(hidden, previous)
    other = previous.clone()
    other[:, 1] = (previous[:, 1] + 1) % VOCABULARY
    changed = (head.features(hidden, other) - before).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, True, *[variant == "recurrent"] * 2]
    moved = hidden.clone()
    moved[:, 1] += 1.0
    changed = (head.features(moved, previous) - before).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, variant != "vanilla", *[variant == "recurrent"] * 2]


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_starts_without_effect(variant: str) -> None:
    head = markov_head(MarkovConfig(rank=RANK, variant=variant), VOCABULARY, DRAFT, HIDDEN)  # type: ignore[arg-type]
    features = head.features(*inputs()[:2])
    assert torch.equal(head.w2(features), torch.zeros(BLOCKS, SLOTS, DRAFT))
    assert features.abs().sum() > 0  # or W2 would never get a gradient


def test_blocks_do_not_share_a_state() -> None:
    head, (hidden, previous, _) = make_head("recurrent"), inputs()
    both = head.features(hidden, previous)
    for m in range(BLOCKS):
        torch.testing.assert_close(head.features(hidden[m : m + 1], previous[m : m + 1]), both[m : m + 1])


def test_a_slot_that_drafts_nothing_leads_the_recurrent_state() -> None:
    """Blocks whose slot 0 is the known token: the state has read it too, behind the anchor as the first drafted slot."""
    head = markov_head(MarkovConfig(rank=RANK, variant="recurrent"), VOCABULARY, DRAFT, HIDDEN, leads=True)
    randomise(head, 0)
    head.requires_grad_(False)
    (hidden, previous, lm_head), anchor = inputs(), torch.randn(BLOCKS, HIDDEN)
    whole = [naive(head, [a, *h], [p[0], *p])[1:] for a, h, p in zip(anchor.tolist(), hidden.tolist(), previous.tolist())]
    wanted = torch.tensor(whole)
    torch.testing.assert_close(head.w2(head.features(hidden, previous, anchor)), wanted, atol=1e-5, rtol=1e-5)
    logits = walked(head, hidden, previous, lambda h: h @ lm_head.T, anchor_hidden=anchor)
    torch.testing.assert_close(logits, hidden @ lm_head.T + wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(
        make_head("recurrent").features(hidden, previous, anchor), head.features(hidden, previous, anchor)
    )

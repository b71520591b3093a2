"""Beam search against trying everything."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hspec.drafters.beam import beam_search

BATCH, VOCABULARY, DEPTH = 3, 4, 3


class Counting:
    """A drafter whose next token depends on all before it: its state is a number that they spell."""

    def __init__(self, seed: int = 0):
        shape = (BATCH, VOCABULARY ** (DEPTH + 1), VOCABULARY)
        self.table = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
        self.state = torch.ones(BATCH, 1, dtype=torch.int64)

    @property
    def first(self) -> Tensor:
        return self.table[:, 1]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.state = self.state.gather(1, parents) * VOCABULARY + tokens
        return self.table.gather(1, self.state[..., None].expand(-1, -1, VOCABULARY))

    def score(self, row: int, tokens: tuple[int, ...]) -> float:
        state, total = 1, 0.0
        for token in tokens:
            total += float(self.table[row, state, token])
            state = state * VOCABULARY + token
        return total


@pytest.mark.parametrize("width", [1, 2, 3, 4, 9])
def test_the_best_of_what_the_beams_grow_to(width: int) -> None:
    drafter = Counting()
    beams, scores = beam_search(drafter.first, drafter.step, width, DEPTH)
    kept = min(width, VOCABULARY)
    assert beams.shape == (BATCH, kept, DEPTH) and scores.shape == (BATCH, kept)
    for row in range(BATCH):
        best: list[tuple[int, ...]] = [()]
        for _ in range(DEPTH):
            grown = [(*b, t) for b, t in itertools.product(best, range(VOCABULARY))]
            best = sorted(grown, key=lambda b: -drafter.score(row, b))[:kept]
        assert [tuple(b) for b in beams[row].tolist()] == best
        assert scores[row].tolist() == pytest.approx([drafter.score(row, b) for b in best], abs=1e-5)


def test_one_token_needs_no_step() -> None:
    def step(*_: Tensor) -> Tensor:
        raise AssertionError

    beams, _ = beam_search(torch.tensor([[0.1, 0.7, 0.2]]).log(), step, 2, 1)
    assert beams.tolist() == [[[1], [2]]]

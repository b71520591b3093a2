"""The confidence head is one linear over what it is given."""

from __future__ import annotations

import pytest
import torch

from hspec.drafters.heads.confidence import ConfidenceHead
from tests.drafters.heads.naive import dot
from tests.tiny import randomise


@pytest.mark.parametrize("rank", [0, 3])
def test_it_is_the_formula(rank: int) -> None:
    head = ConfidenceHead(6, rank).requires_grad_(False)
    randomise(head, 0)
    hidden, markov = torch.randn(2, 4, 6), torch.randn(2, 4, 3) if rank else None
    logits = head(hidden, markov)
    assert logits.shape == (2, 4)
    for m in range(2):
        for j in range(4):
            seen = [*hidden[m, j].tolist(), *(markov[m, j].tolist() if markov is not None else [])]
            wanted = dot(head.proj.weight[0].tolist(), seen) + head.proj.bias.item()
            assert float(logits[m, j]) == pytest.approx(wanted, abs=1e-5)

"""How drafts are picked: q must be exactly what each draft was drawn from."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from hspec.decoding.draft_sampler import DraftSampler
from hspec.decoding.params import SamplingParams
from hspec.decoding.processors import process

IDS = torch.tensor([1, 2, 5, 8, 9, 11])
"""Target ids of a draft vocabulary of 6."""


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, len(IDS), generator=torch.Generator().manual_seed(seed))


def test_greedy_drafts_are_the_argmax_and_one_hot() -> None:
    sampler = DraftSampler([SamplingParams(), SamplingParams(temperature=1.0, draft="greedy")], [4, 9], IDS, [None, None])
    chosen, q = sampler(1, rows := logits(2))
    assert chosen.tolist() == rows.argmax(-1).tolist()
    assert q is None


def test_a_mixed_batch_gives_greedy_rows_a_one_hot_q() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.5, top_k=3)]
    chosen, q = DraftSampler(params, [4, 9], IDS, [None, None])(1, rows := logits(2))
    assert q is not None
    assert q[0].tolist() == torch.nn.functional.one_hot(rows[0].argmax(), len(IDS)).tolist()
    assert chosen[0] == rows[0].argmax()
    assert torch.equal(q[1], process(rows[1:], params[1], None).softmax(-1)[0])


def test_drafts_are_drawn_from_q() -> None:
    rows, counts = logits(1), np.zeros(len(IDS))
    for seed in range(3000):
        chosen, q = DraftSampler([SamplingParams(temperature=0.8, top_k=4, seed=seed)], [7], IDS, [None])(2, rows)
        counts[int(chosen)] += 1
    assert q is not None and int((q > 0).sum()) == 4
    possible = q[0].numpy() > 0
    assert counts[~possible].sum() == 0
    expected = q[0].double().numpy()[possible]
    assert stats.chisquare(counts[possible], 3000 * expected / expected.sum()).pvalue > 1e-3


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    params = [SamplingParams(temperature=1.0, seed=s, repetition_penalty=1.0 + s) for s in range(3)]
    histories = [None, torch.tensor([2, 3]), torch.tensor([0, 8, 11])]
    together = DraftSampler(params, [3, 4, 5], IDS, histories)
    alone = [DraftSampler([params[i]], [3 + i], IDS, [histories[i]]) for i in range(3)]
    for slot in range(1, 5):
        rows = logits(3, slot)
        chosen, q = together(slot, rows)
        assert q is not None
        for i, one in enumerate(alone):
            own, own_q = one(slot, rows[i : i + 1])
            assert own_q is not None
            assert own[0] == chosen[i] and torch.equal(own_q[0], q[i])


def test_penalties_see_the_history_and_the_drafts_before() -> None:
    """The same rule as for the target's rows, on the part of the vocabulary that drafts have."""
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7, seed=3)
    history = torch.tensor([0, 2, 7, 11, 12])
    sampler = DraftSampler([params], [30], IDS, [history])
    drafts: list[int] = []
    for slot in range(1, 6):
        chosen, q = sampler(slot, rows := logits(1, slot))
        full = torch.full((1, 13), -100.0)
        full[0, IDS] = rows[0]
        wanted = process(full, params, torch.tensor(sorted({*history.tolist(), *drafts})))[0, IDS].softmax(-1)
        assert q is not None
        torch.testing.assert_close(q[0], wanted)
        drafts.append(int(IDS[chosen[0]]))
    assert len(set(drafts)) > 1

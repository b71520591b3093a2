"""Where anchors stand, what a block is given, and which of its slots count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.targets.target import Target
from hspec.training.blocks import Anchors, BlockBatch, anchor_counts, cut_blocks, draw_anchors
from hspec.training.examples import Batch, Example, collate
from hspec.training.features import Features
from tests.tiny import tiny_drafter

K = 4


def document(length: int, *answers: tuple[int, int], seed: int = 0) -> Example:
    """Random tokens; supervised in ``start <= t < end`` of every answer."""
    tokens = torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(seed + 1000 * length)).tolist()
    return Example(str(seed), tokens, [any(a <= t < b for a, b in answers) for t in range(length)])


DOCUMENTS = [document(23, (6, 11), (13, 23)), document(9, (4, 9), seed=1), document(16, (0, 16), seed=2)]


def make_blocks(target: Target, batch: Batch, anchors: Anchors, taps: list[int], k: int) -> BlockBatch:
    cache = target.new_cache(*batch.tokens.shape)
    output = target.forward(batch.tokens, cache, taps)
    cache.advance([batch.tokens.shape[1]] * batch.tokens.shape[0])
    return cut_blocks(Features(output.taps, output.hidden, cache.view()), batch, anchors, k)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(anchors: Anchors, row: int) -> list[int]:
    return sorted(anchors.positions[row][anchors.valid[row]].tolist())


def candidates(example: Example) -> list[int]:
    return [p for p in range(1, len(example.tokens) - 1) if example.supervised[p + 1]]


def test_every_candidate_is_drawn_once_at_full_density() -> None:
    anchors = draw_anchors(collate(DOCUMENTS), 1.0, generator())
    for row, example in enumerate(DOCUMENTS):
        assert drawn(anchors, row) == candidates(example)


@pytest.mark.parametrize("density", [0.01, 0.3, 0.5])
def test_anchors_are_drawn_without_replacement(density: float) -> None:
    batch, times = collate(DOCUMENTS), [0] * 23
    counts = anchor_counts([len(candidates(example)) for example in DOCUMENTS], density)
    for seed in range(30):
        anchors = draw_anchors(batch, density, generator(seed))
        for row, example in enumerate(DOCUMENTS):
            positions = drawn(anchors, row)
            assert len(positions) == len(set(positions)) == counts[row]
            assert set(positions) <= set(candidates(example))
        for p in drawn(anchors, 0):
            times[p] += 1
    assert all(times[p] for p in candidates(DOCUMENTS[0])) or density == 0.01  # none is left out for ever


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    density=st.floats(0.01, 1.0),
    cap=st.none() | st.integers(1, 100),
)
def test_every_document_gets_its_fair_share_of_the_anchors(sizes: list[int], density: float, cap: int | None) -> None:
    counts, has = anchor_counts(sizes, density, cap), np.array(sizes)
    room, busy = np.minimum(has, cap or 300), np.count_nonzero(has)
    total = min(max(math.ceil(density * has.sum() - 1e-9), busy), room.sum())
    assert counts.sum() == total
    assert (counts <= room).all() and ((counts > 0) == (has > 0)).all()
    if not busy:
        return
    # At least the smaller of the two shares, equal and proportional, of what is left after everyone's first; at most the larger one,
    # unless others were full.
    rest = total - busy
    equal, by_size = rest / busy, rest * has / has.sum()
    assert (counts >= np.minimum(room, np.minimum(equal, by_size).astype(int))).all()
    if (counts < room)[has > 0].all():
        assert (counts <= 2 + np.maximum(equal, by_size)).all()
    order = np.argsort(has)
    assert (np.diff(counts[order]) >= -1).all()  # a longer one never gets less, but for rounding


def test_a_short_document_is_not_lost_beside_long_ones() -> None:
    counts = anchor_counts([10, 1000, 1000], 0.1)
    assert counts.sum() == 201 and counts[0] == 10  # drawn from all alike, it would have one
    assert anchor_counts([10, 100, 100], 0.3).tolist() == [10, 27, 26]
    assert anchor_counts([10, 100, 100], 0.3, cap=20).tolist() == [10, 20, 20]
    assert anchor_counts([7], 0.5).tolist() == [4]


def test_an_anchor_always_has_a_token_before_it() -> None:
    """Position 0 has no hidden state to seed a block from."""
    anchors = draw_anchors(collate([document(5, (0, 5))]), 1.0, generator())
    assert drawn(anchors, 0) == [1, 2, 3]
    assert int(anchors.positions.min()) >= 1


def test_a_row_without_candidates_has_no_valid_anchor() -> None:
    batch = Batch(torch.ones(2, 5, dtype=torch.int64), torch.tensor([[False] * 5, [False, False, True, True, False]]))
    anchors = draw_anchors(batch, 1.0, generator())
    assert drawn(anchors, 0) == [] and drawn(anchors, 1) == [1, 2]
    assert int(anchors.positions.min()) >= 1 and int(anchors.positions.max()) < 5


def test_the_draw_depends_on_the_generator_alone() -> None:
    batch = collate(DOCUMENTS)
    one, two, other = (draw_anchors(batch, 0.4, generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(one.positions, two.positions) and not torch.equal(one.positions, other.positions)


def every_anchor(batch: Batch) -> Anchors:
    return draw_anchors(batch, 1.0, generator())


def test_tokens_rows_and_weights_of_every_slot(target: Target) -> None:
    batch = collate(DOCUMENTS)
    anchors = every_anchor(batch)
    blocks = make_blocks(target, batch, anchors, [1, 3, 5], K)
    T = batch.tokens.shape[1]
    for row, example in enumerate(DOCUMENTS):
        for n, position in enumerate(anchors.positions[row].tolist()):
            assert int(blocks.context.anchors[row, n]) == example.tokens[position] if anchors.valid[row, n] else True
            alive = bool(anchors.valid[row, n])
            for j in range(K):
                predicted = position + 1 + j
                alive = alive and predicted < len(example.tokens) and example.supervised[predicted]
                assert float(blocks.weight[row, n, j]) == float(alive), (row, position, j)
                if alive:
                    assert int(blocks.previous[row, n, j]) == example.tokens[predicted - 1]
                    assert int(blocks.rows[row, n, j]) == row * T + predicted - 1
    by_position = dict(zip(anchors.positions[0].tolist(), blocks.weight[0].tolist(), strict=True))
    assert by_position[9] == [
        1,
        0,
        0,
        0,
    ]  # the turn ends behind position 10, and the next one's begin does not revive the block
    assert by_position[14] == [1, 1, 1, 1]
    assert by_position[20] == [1, 1, 0, 0]  # the document ends behind position 22


def test_targets_rows_are_those_that_predict_the_slots_token(target: Target) -> None:
    batch = collate(DOCUMENTS[:1])
    blocks = make_blocks(target, batch, every_anchor(batch), [1], K)
    cache = target.new_cache(1, 23)
    alone = target.forward(batch.tokens, cache).hidden[0]
    assert torch.allclose(blocks.hidden, alone, atol=1e-5)
    position, slot = 15, 2
    n = blocks.context.positions[0].tolist().index(position)
    assert torch.equal(blocks.hidden[blocks.rows[0, n, slot]], blocks.hidden[position + slot])


def test_the_seed_is_the_state_before_the_anchor(target: Target) -> None:
    taps, batch = [1, 3, 5], collate(DOCUMENTS)
    blocks = make_blocks(target, batch, every_anchor(batch), taps, K)
    for row, example in enumerate(DOCUMENTS):
        for n, position in enumerate(blocks.context.positions[row].tolist()):
            if n % 4 or position >= len(example.tokens):
                continue
            # Run only what decoding would have run: every token before the anchor.
            before = torch.tensor([example.tokens[:position]])
            output = target.forward(before, target.new_cache(1, position), taps)
            assert torch.allclose(blocks.context.taps[row, n], output.taps[0, -1], atol=1e-4)


def test_a_block_in_a_padded_batch_is_the_block_computed_alone(target: Target) -> None:
    """Nothing leaks from another document, from padding, from behind the anchor, or from another block."""
    drafter = tiny_drafter(target)
    taps, batch = list(drafter.config.taps), collate(DOCUMENTS)
    with torch.no_grad():
        blocks = make_blocks(target, batch, every_anchor(batch), taps, K)
        together = drafter.backbone(blocks.context, K + 1)
        for row, example in enumerate(DOCUMENTS):
            for n, position in enumerate(blocks.context.positions[row].tolist()):
                if position >= len(example.tokens) or n % 3:
                    continue
                alone = collate([Example("", example.tokens[: position + 1], [True] * (position + 1))])
                one = Anchors(torch.tensor([[position]]), torch.tensor([[True]]))
                block = make_blocks(target, alone, one, taps, K)
                hidden = drafter.backbone(block.context, K + 1)[0, 0]
                assert torch.allclose(together[row, n], hidden, atol=2e-4), (row, position)
                if n and bool(blocks.weight[row, n, 0]):
                    assert not torch.allclose(together[row, n], together[row, n - 1], atol=1e-2)

"""In what order documents come, from one source or from several with weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.errors import HSpecError
from hspec.training.corpus import Corpus
from hspec.training.examples import Batch, Example, ExampleStream, collate


def documents(count: int, longest: int = 40) -> list[Example]:
    out = []
    for i in range(count):
        length = 4 + (i * 7) % (longest - 3)
        out.append(Example(str(i), [3 + i % 100] * length, [False, False] + [True] * (length - 2)))
    return out


def ids_of(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in batch.tokens]


def test_the_stream_is_a_pure_function_of_seed_and_step() -> None:
    examples = documents(60)
    stream = ExampleStream(examples, 100, seed=3)
    forward = [ids_of(stream.batch(s)) for s in range(3 * stream.batches_per_epoch)]
    assert stream.batches_per_epoch > 10
    for step in (len(forward) - 1, 3, 30, 0, 15, 30):
        assert ids_of(stream.batch(step)) == forward[step]
        assert ids_of(ExampleStream(examples, 100, seed=3).batch(step)) == forward[step]
    other = ExampleStream(examples, 100, seed=4)
    assert [ids_of(other.batch(s)) for s in range(len(forward))] != forward


def test_every_document_comes_once_an_epoch_in_another_order() -> None:
    examples = [Example(str(i), [i, *[9] * (4 + i % 5)], [False, False, *[True] * (3 + i % 5)]) for i in range(700)]
    stream = ExampleStream(examples, 64, seed=0)
    orders, step = [], 0
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < len(examples):
            seen += stream.batch(step).tokens[:, 0].tolist()
            step += 1
        assert Counter(seen) == Counter(range(700))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]


def test_batches_keep_the_token_budget() -> None:
    stream = ExampleStream(documents(200), 100, seed=0)
    sizes = [stream.batch(s).tokens.numel() for s in range(stream.batches_per_epoch)]
    assert max(sizes) <= 100 and sum(sizes) / len(sizes) > 60
    long = ExampleStream([*documents(3), Example("long", [5] * 300, [True] * 300)], 100, seed=0)
    shapes = [tuple(long.batch(s).tokens.shape) for s in range(long.batches_per_epoch)]
    assert (1, 300) in shapes  # a document longer than the budget is a batch of its own


def test_padding_is_never_supervised() -> None:
    batch = collate([Example("a", [5, 6], [False, True]), Example("b", [7, 8, 9], [True, True, True])])
    assert batch.tokens.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert batch.supervised.tolist() == [[False, True, False], [True, True, True]]
    assert batch.tokens.dtype == torch.int64


def test_documents_without_room_for_a_block_are_left_out() -> None:
    short = [Example("a", [1], [True]), Example("b", [1, 2], [True, True]), Example("c", [1, 2, 3], [True, True, False])]
    good = Example("d", [1, 2, 3], [False, False, True])
    stream = ExampleStream([*short, good], 10, 0)
    assert stream.batches_per_epoch == 1 and ids_of(stream.batch(5)) == [(1, 2, 3)]
    with pytest.raises(HSpecError, match="no training example"):
        ExampleStream(short, 10, 0)
    with pytest.raises(HSpecError, match="no training example"):
        ExampleStream([], 10, 0)


def test_the_fingerprint_knows_the_documents() -> None:
    base = documents(5)
    same = ExampleStream(list(base), 100, 1).fingerprint()
    assert same == ExampleStream(base, 50, 2).fingerprint()
    assert same != ExampleStream(base[::-1], 100, 1).fingerprint()
    changed = Example(base[0].id, [*base[0].tokens[:-1], 1], base[0].supervised)
    assert same != ExampleStream([changed, *base[1:]], 100, 1).fingerprint()


# -- sources with weights ----------------------------------------------------------------------------------------


def mixture(sizes: list[int], weights: list[float]) -> Corpus:
    """Documents that begin with the number of their source and their own."""
    corpus = Corpus(weights)
    for source, size in enumerate(sizes):
        for number in range(size):
            corpus.append(Example(f"{source}/{number}", [source, number, 1, 1], [False, False, True, True]), source)
    return corpus


def epochs(stream: ExampleStream, count: int) -> list[list[tuple[int, int]]]:
    """Source and number of the documents of each epoch, in the order in which they come."""
    size, drawn, step = len(stream.examples), [], 0
    while len(drawn) < count * size:
        drawn += [(row[0], row[1]) for row in stream.batch(step).tokens.tolist()]
        step += 1
    return [drawn[i * size : (i + 1) * size] for i in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=1, max_size=4),
    seed=st.integers(0, 5),
    budget=st.integers(4, 40),
)
def test_an_epoch_draws_by_weight_and_repeats_none_before_its_source_is_through(
    pairs: list[tuple[int, float]], seed: int, budget: int
) -> None:
    sizes, weights = [n for n, _ in pairs], [w for _, w in pairs]
    found = epochs(ExampleStream(mixture(sizes, weights), budget, seed), 3)
    total = sum(sizes)
    for epoch in found:
        for source, weight in enumerate(weights):
            share = sum(s == source for s, _ in epoch)
            assert abs(share - total * weight / sum(weights)) < 1 + 1e-6
    # Within an epoch documents are ordered by size; over epochs, of every document at most one pass more than of another.
    times = Counter(document for epoch in found for document in epoch)
    for source, size in enumerate(sizes):
        counts = [times[source, number] for number in range(size)]
        assert max(counts) - min(counts) <= 1


def test_a_small_source_is_drawn_again_and_a_large_one_goes_on() -> None:
    stream = ExampleStream(mixture([10, 90], [1.0, 1.0]), 40, 0)
    first, second = epochs(stream, 2)
    assert Counter(s for s, _ in first) == {0: 50, 1: 50}
    assert {n for s, n in first if s == 0} == set(range(10))
    large = [n for epoch in (first, second) for s, n in epoch if s == 1]
    assert len(set(large)) == 90  # the second epoch began with those that the first had left
    again, _ = epochs(ExampleStream(mixture([10, 90], [1.0, 1.0]), 40, 0), 2)
    other, _ = epochs(ExampleStream(mixture([10, 90], [1.0, 1.0]), 40, 1), 2)
    assert again == first and other != first


def test_a_source_with_a_weight_needs_documents() -> None:
    with pytest.raises(HSpecError, match="source 2 of 2 has a weight but no document"):
        ExampleStream(mixture([3, 0], [1.0, 1.0]), 40, 0)


# -- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [256, 2048, 8192])
def test_little_is_padding_at_lengths_as_they_are(budget: int) -> None:
    """Prompts of 20 to 190 tokens, answers of up to 256, a third of which are cut there: what the target's answers look like."""
    rng = np.random.default_rng(0)
    prompts, answers = rng.integers(20, 190, 1500), np.minimum(256, rng.exponential(240, 1500).astype(int) + 3)
    examples = [
        Example(str(i), [1] * (p + a), [False] * p + [True] * a)
        for i, (p, a) in enumerate(zip(prompts.tolist(), answers.tolist(), strict=True))
    ]
    stream = ExampleStream(examples, budget, 0)
    padded = sum(stream.batch(step).tokens.numel() for step in range(stream.batches_per_epoch))
    assert 0 <= 1 - int((prompts + answers).sum()) / padded < 0.03


def test_documents_of_a_batch_ascend_in_length() -> None:
    """The processes that share a batch take every other one, and so get about the same."""
    stream = ExampleStream(documents(200), 200, seed=0)
    for step in range(stream.batches_per_epoch):
        lengths = stream.examples.lengths[list(stream.batch(step).documents)]
        assert (np.diff(lengths) >= 0).all()

"""A forward over draft trees gives what each path gives alone, and leaves a cache that never saw the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hspec.drafters.tree import DraftTree, tree_rows
from hspec.errors import UsageError
from hspec.targets.cache import KVCache
from hspec.targets.target import Target
from tests.targets.reference import CASES, LAYERS, random_tokens, reference_target

TEXT = random_tokens(3, 40)
LENGTHS = (2, 11, 23)
"""Shorter and longer than the window of the windowed cases."""
TREES = [
    DraftTree.of([[5, 6, 7, 8], [5, 6, 9], [5, 10, 7], [11], [12, 6, 7]]),
    DraftTree.of([[3, 3, 3], [4]]),
    DraftTree.of([[20, 21, 22, 23, 24], [20, 25, 22, 23, 24], [26, 21, 22, 23, 24]]),
]
ANCHORS = [31, 32, 33]
TAPS = [1, LAYERS]
ROUNDING = 5e-5


@pytest.fixture(scope="module", params=CASES)
def target(request: pytest.FixtureRequest) -> Target:
    return reference_target(request.param)


def prefilled(target: Target, capacity: int = 48, lengths: tuple[int, ...] = LENGTHS) -> KVCache:
    cache = target.new_cache(3, capacity)
    for row, length in enumerate(lengths if all(lengths) else ()):
        own = cache.rows(row, row + 1)
        target.prefill(TEXT[row : row + 1, :length], own)
        cache.lengths[row] = own.lengths[0]
    return cache


def along(target: Target, row: int, length: int, tokens: list[int]) -> tuple[Tensor, Tensor, KVCache]:
    """Plain decoding of ``tokens`` behind row ``row``'s text: hidden and taps of each, and the cache."""
    cache = target.new_cache(1, 48)
    if length:
        target.prefill(TEXT[row : row + 1, :length], cache)
    outputs = []
    for token in tokens:
        outputs.append(target.forward(torch.tensor([[token]]), cache, TAPS))
        cache.advance([1])
    return torch.cat([o.hidden for o in outputs], 1)[0], torch.cat([o.taps for o in outputs], 1)[0], cache


@pytest.mark.parametrize("lengths", [LENGTHS, (11, 11, 11), (0, 0, 0)], ids=str)
def test_every_row_equals_plain_decoding_of_its_path(target: Target, lengths: tuple[int, ...]) -> None:
    """In every bit, hidden states, taps and logits."""
    cache = prefilled(target, lengths=lengths)
    tokens, depths = tree_rows(ANCHORS, TREES)
    out = target.forward(tokens, cache, TAPS, depths)
    logits = target.logits(out.hidden)
    for b, tree in enumerate(TREES):
        for node in range(-1, len(tree)):
            path = tree.path(node)
            hidden, taps, _ = along(target, b, lengths[b], [ANCHORS[b], *(tree.tokens[n] for n in path)])
            rows = [0, *(n + 1 for n in path)]
            assert torch.equal(out.hidden[b, rows], hidden) and torch.equal(out.taps[b, rows], taps)
            assert torch.equal(logits[b, rows], target.logits(hidden))


def test_one_masked_call_is_close(target: Target) -> None:
    """As close as a chain of drafts is to plain decoding."""
    tokens, depths = tree_rows(ANCHORS, TREES)
    exact = target.logits(target.forward(tokens, prefilled(target), (), depths).hidden)
    masked = target.logits(target.forward(tokens, prefilled(target), (), depths, bitwise=False).hidden)
    for b, own in enumerate(depths):
        torch.testing.assert_close(masked[b, : len(own)], exact[b, : len(own)], atol=ROUNDING, rtol=1e-5)
        assert torch.equal(masked[b, : len(own)].argmax(-1), exact[b, : len(own)].argmax(-1))


@pytest.mark.parametrize("bitwise", [True, False])
def test_a_tree_is_the_same_beside_any_neighbours(target: Target, bitwise: bool) -> None:
    tokens, depths = tree_rows(ANCHORS, TREES)
    together = target.forward(tokens, prefilled(target), TAPS, depths, bitwise)
    for b, own in enumerate(depths):
        cache = target.new_cache(1, 48)
        target.prefill(TEXT[b : b + 1, : LENGTHS[b]], cache)
        alone = target.forward(tokens[b : b + 1, : len(own)], cache, TAPS, [own], bitwise)
        assert torch.equal(alone.hidden[0], together.hidden[b, : len(own)])
        assert torch.equal(alone.taps[0], together.taps[b, : len(own)])


def test_a_chain_as_a_tree(target: Target) -> None:
    """The masked call of a chain-shaped tree computes what the forward of a chain does."""
    chain = DraftTree.of([[5, 6, 7, 8]])
    tokens, depths = tree_rows([31], [chain])
    caches = [prefilled(target).rows(2, 3) for _ in range(2)]
    tree = target.forward(tokens, caches[0], TAPS, depths, bitwise=False)
    plain = target.forward(tokens, caches[1], TAPS)
    assert torch.equal(tree.hidden, plain.hidden) and torch.equal(tree.taps, plain.taps)


def test_after_compaction_nothing_was_ever_drafted(target: Target) -> None:
    """Accept paths, decode on plainly: logits and K/V are those of plain decoding, bit for bit."""
    cache = prefilled(target)
    tokens, depths = tree_rows(ANCHORS, TREES)
    target.forward(tokens, cache, (), depths)
    paths = [TREES[0].path(4), [], TREES[2].path(len(TREES[2]) - 1)]
    assert any(path != list(range(len(path))) for path in paths), "else a rollback by length would do"
    cache.keep_paths([[0, *(n + 1 for n in path)] for path in paths])
    wanted = []
    for b, path in enumerate(paths):
        text = [ANCHORS[b], *(TREES[b].tokens[n] for n in path)]
        _, _, plain = along(target, b, LENGTHS[b], text)
        end = LENGTHS[b] + len(text)
        assert cache.lengths[b] == plain.lengths[0] == end
        for mine, theirs in zip((*cache.keys, *cache.values), (*plain.keys, *plain.values), strict=True):
            assert torch.equal(mine[b, :, :end], theirs[0, :, :end])
        wanted.append(along(target, b, LENGTHS[b], [*text, 40, 41, 42])[0][-3:])
    for i, token in enumerate((40, 41, 42)):
        hidden = target.forward(torch.full((3, 1), token), cache).hidden
        cache.advance([1, 1, 1])
        assert torch.equal(target.logits(hidden[:, 0]), target.logits(torch.stack([rows[i] for rows in wanted])))


def test_a_rollback_by_length_would_not_do(target: Target) -> None:
    cache = prefilled(target)
    tokens, depths = tree_rows(ANCHORS, TREES)
    target.forward(tokens, cache, (), depths)
    path = TREES[0].path(5)
    cache.advance([len(path) + 1, 1, 1])
    _, _, plain = along(target, 0, LENGTHS[0], [ANCHORS[0], *(TREES[0].tokens[n] for n in path)])
    assert not torch.equal(cache.keys[0][0, :, : cache.lengths[0]], plain.keys[0][0, :, : cache.lengths[0]])


def test_what_does_not_fit_is_refused() -> None:
    target = reference_target("llama")
    tokens, depths = tree_rows(ANCHORS, TREES)
    with pytest.raises(AssertionError, match="3 trees of up to 15 rows for 3 x 14 tokens"):
        target.forward(tokens[:, :-1], prefilled(target), (), depths)
    with pytest.raises(AssertionError, match="2 trees of"):
        target.forward(tokens, prefilled(target), (), depths[:2])
    with pytest.raises(UsageError, match="38 tokens do not fit into a KV cache of 37"):
        target.forward(tokens, prefilled(target, capacity=37), (), depths)

"""Draft trees: prefix trees of candidates, in preorder, nothing twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.drafters.tree import DraftTree, tree_rows

CANDIDATES = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=7)
EXAMPLE = DraftTree.of([[5, 7], [5, 8, 5], [6], [5, 7, 7]])


def spelled(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[n] for n in tree.path(node))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CANDIDATES)
def test_the_nodes_are_the_prefixes_of_the_candidates(candidates: list[list[int]]) -> None:
    tree = DraftTree.of(candidates)
    prefixes = {tuple(c[:i]) for c in candidates for i in range(1, len(c) + 1)}
    paths = [spelled(tree, node) for node in range(len(tree))]
    assert set(paths) == prefixes and len(paths) == len(prefixes), "every candidate is a path, no node is there twice"
    assert len(tree) <= sum(map(len, candidates))
    assert tree.depths == tuple(map(len, paths))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(CANDIDATES)
def test_ancestors_children_and_order(candidates: list[list[int]]) -> None:
    tree = DraftTree.of(candidates)
    assert tree.ancestors.dtype == torch.bool and tree.ancestors.shape == (len(tree) + 1, len(tree) + 1)
    for node in range(-1, len(tree)):
        own = {-1, *tree.path(node)}
        assert tree.ancestors[node + 1].tolist() == [other in own for other in range(-1, len(tree))]
        assert tree.children[node + 1] == tuple(n for n, parent in enumerate(tree.parents) if parent == node)
        for token in range(5):
            below = [c for c in tree.children[node + 1] if tree.tokens[c] == token]
            assert tree.child(node, token) == (below[0] if below else None) and len(below) <= 1
        # Siblings in the order in which the candidates bring them up.
        prefix = spelled(tree, node)
        depth = len(prefix)
        next_tokens = [c[depth] for c in candidates if tuple(c[:depth]) == prefix and len(c) > depth]
        assert [tree.tokens[c] for c in tree.children[node + 1]] == list(dict.fromkeys(next_tokens))
    assert all(parent < node for node, parent in enumerate(tree.parents)), "parents come first"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CANDIDATES, st.integers(0, 5))
def test_cut(candidates: list[list[int]], depth: int) -> None:
    assert DraftTree.of(candidates).cut(depth) == DraftTree.of([c[:depth] for c in candidates])


def test_an_example() -> None:
    assert DraftTree((5, 7, 7, 8, 5, 6), (-1, 0, 1, 0, 3, -1)) == EXAMPLE
    assert EXAMPLE.row_depths == (0, 1, 2, 3, 2, 3, 1)
    assert EXAMPLE.children == ((0, 5), (1, 3), (2,), (), (4,), (), ())


def test_a_chain_is_a_tree() -> None:
    chain = DraftTree.of([[4, 4, 2]])
    assert chain == DraftTree((4, 4, 2), (-1, 0, 1))
    assert torch.equal(chain.ancestors, torch.ones(4, 4).tril().bool())


def test_no_drafts_are_a_tree() -> None:
    empty = DraftTree.of([])
    assert len(empty) == 0 and empty.ancestors.tolist() == [[True]] and empty.children == ((),)


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, -1, 0), (-1, 0, 0, 1), (-1, 2, 1)], ids=str)
def test_other_orders_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="preorder"):
        DraftTree(tuple(range(len(parents))), parents)


def test_twins_and_missing_tokens_are_refused() -> None:
    with pytest.raises(AssertionError, match="siblings with one token"):
        DraftTree((3, 3), (-1, -1))
    with pytest.raises(AssertionError, match="1 tokens for 2 nodes"):
        DraftTree((3,), (-1, 0))
    DraftTree((3, 3), (-1, 0))


def test_rows_of_a_batch() -> None:
    tokens, depths = tree_rows([9, 8, 7], [DraftTree.of([[1, 2], [1, 3]]), DraftTree.of([]), DraftTree.of([[4], [5]])])
    assert tokens.tolist() == [[9, 1, 2, 3], [8, 0, 0, 0], [7, 4, 5, 0]]
    assert depths == [(0, 1, 2, 2), (0,), (0, 1, 1)]

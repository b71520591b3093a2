"""The acceptance rules on trees are exact: what is emitted is distributed as the target's own text."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspec.decoding.params import SamplingParams
from hspec.decoding.processors import process
from hspec.decoding.verify_tree import (
    TreeVerdict,
    judge_tree,
    process_row,
    verify_tree_greedy,
    verify_tree_sampled,
)
from hspec.drafters.tree import DraftTree

Table = Callable[[tuple[int, ...]], list[int]]
"""Prefix -> weights of the next token in quarters."""
Rule = Callable[[Callable[[int], Tensor], DraftTree, Sequence[float]], TreeVerdict]
Law = dict[tuple[int, ...], Fraction]
UNIT = 4
GRID = [(i + 0.5) / UNIT for i in range(UNIT)]
"""A draw from weights in quarters steps at multiples of 1/4 only: the mean over these midpoints is the integral."""


def cyclic(*rows: list[int]) -> Table:
    """A distribution that depends on all of the prefix."""
    return lambda prefix: rows[(len(prefix) + 2 * sum(prefix)) % len(rows)]


TABLES = {
    "three": cyclic([1, 1, 2], [0, 3, 1], [4, 0, 0], [2, 2, 0]),
    "even": cyclic([2, 1, 1], [1, 2, 1], [1, 1, 2]),
    "four": cyclic([1, 1, 1, 1], [2, 0, 2, 0], [0, 0, 1, 3], [1, 2, 0, 1]),
}
TREES = {
    "none": [],
    "chain": [[2, 1, 0]],
    "two siblings": [[1], [0]],
    "all siblings": [[2], [0], [1]],
    "bushy": [[1, 1], [1, 0], [0, 2], [0, 1], [2]],
    "uneven": [[0, 1, 2], [0, 1, 1], [0, 2], [2]],
}


def spelled(tree: DraftTree, nodes: Sequence[int]) -> tuple[int, ...]:
    return tuple(tree.tokens[node] for node in nodes)


def finish(law: Law, table: Table, tokens: tuple[int, ...], length: int, weight: Fraction) -> None:
    """What is missing of ``length`` tokens is the target's own."""
    if len(tokens) == length:
        law[tokens] += weight
        return
    for token, share in enumerate(table(tokens)):
        if share:
            finish(law, table, (*tokens, token), length, weight * Fraction(share, UNIT))


def target_law(table: Table, length: int) -> Law:
    law: Law = defaultdict(Fraction)
    finish(law, table, (), length, Fraction(1))
    return law


def rows_of(table: Table, tree: DraftTree) -> Tensor:
    rows = [table(spelled(tree, tree.path(node))) for node in range(-1, len(tree))]
    return torch.tensor(rows, dtype=torch.float32) / UNIT


def verdict_law(table: Table, tree: DraftTree, rule: Rule) -> dict[TreeVerdict, Fraction]:
    rows = rows_of(table, tree)
    draws = max(tree.row_depths) + 1
    law: dict[TreeVerdict, Fraction] = defaultdict(Fraction)
    for u in itertools.product(GRID, repeat=draws):
        law[rule(rows.__getitem__, tree, u)] += Fraction(1, UNIT**draws)
    return law


def emitted_law(table: Table, tree: DraftTree, rule: Rule) -> Law:
    """Of the first depth + 1 tokens."""
    law: Law = defaultdict(Fraction)
    for verdict, weight in verdict_law(table, tree, rule).items():
        tokens = (*spelled(tree, verdict.path), verdict.token)
        finish(law, table, tokens, max(tree.row_depths) + 1, weight)
    return law


def sibling_law(table: Table, tree: DraftTree) -> dict[TreeVerdict, Fraction]:
    """The rule as it is usually written: siblings in turn, each accepted with what p, renormalised, still gives it."""
    law: dict[TreeVerdict, Fraction] = defaultdict(Fraction)

    def at(path: tuple[int, ...], weight: Fraction) -> None:
        p = [Fraction(share, UNIT) for share in table(spelled(tree, path))]
        for child in tree.children[path[-1] + 1 if path else 0]:
            accept = p[tree.tokens[child]]
            if accept:
                at((*path, child), weight * accept)
            weight *= 1 - accept
            if not weight:
                return
            p[tree.tokens[child]] = Fraction(0)
            p = [share / (1 - accept) for share in p]
        for token, share in enumerate(p):
            if share:
                law[TreeVerdict(path, token)] += weight * share

    at((), Fraction(1))
    return law


@pytest.mark.parametrize("candidates", TREES.values(), ids=TREES)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_trees_leave_the_distribution(table: Table, candidates: list[list[int]]) -> None:
    tree = DraftTree.of(candidates)
    assert emitted_law(table, tree, verify_tree_sampled) == target_law(table, max(tree.row_depths) + 1)


@pytest.mark.parametrize("candidates", TREES.values(), ids=TREES)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_law_is_that_of_trying_siblings_in_turn(table: Table, candidates: list[list[int]]) -> None:
    """Paths included: as much is accepted."""
    tree = DraftTree.of(candidates)
    assert verdict_law(table, tree, verify_tree_sampled) == sibling_law(table, tree)


def one_number_for_all(p: Callable[[int], Tensor], tree: DraftTree, u: Sequence[float]) -> TreeVerdict:
    return verify_tree_sampled(p, tree, [u[0]] * len(u))


def a_row_off(p: Callable[[int], Tensor], tree: DraftTree, u: Sequence[float]) -> TreeVerdict:
    return verify_tree_sampled(lambda row: p(max(row - 1, 0)), tree, u)


def refused_but_drawn(p: Callable[[int], Tensor], tree: DraftTree, u: Sequence[float]) -> TreeVerdict:
    """Accepts the preferred child with probability p of it; refused, it may still be drawn: p is not zeroed there."""
    verdict = verify_tree_sampled(p, tree, u)
    first = verdict.path[:1] or (None,)
    if not tree.children[0] or first[0] == tree.children[0][0]:
        return verdict
    return verify_tree_sampled(p, DraftTree((), ()), u[1:] or u)


def as_the_beam_prefers(p: Callable[[int], Tensor], tree: DraftTree, u: Sequence[float]) -> TreeVerdict:
    """Takes any child that the target may write."""
    path: list[int] = []
    while below := [
        c for c in tree.children[path[-1] + 1 if path else 0] if p(path[-1] + 1 if path else 0)[tree.tokens[c]] > 0
    ]:
        path.append(below[0])
    row = path[-1] + 1 if path else 0
    return TreeVerdict(tuple(path), verify_tree_sampled(lambda _: p(row), DraftTree((), ()), u).token)


@pytest.mark.parametrize("fault", [one_number_for_all, a_row_off, refused_but_drawn, as_the_beam_prefers])
def test_faults_are_seen(fault: Rule) -> None:
    tree = DraftTree.of(TREES["bushy"])
    table = TABLES["even"]
    assert emitted_law(table, tree, fault) != target_law(table, max(tree.row_depths) + 1)


UNIFORM = st.one_of(st.sampled_from([0.0, 2.0**-53, 1 - 2.0**-53]), st.floats(0, 1, exclude_max=True))
CANDIDATES = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6)
WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1.0)), min_size=5, max_size=5).filter(lambda w: sum(w) > 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_nothing_of_probability_zero_is_emitted(data: st.DataObject) -> None:
    tree = DraftTree.of(data.draw(CANDIDATES))
    p = torch.tensor([data.draw(WEIGHTS) for _ in range(len(tree) + 1)])
    verdict = verify_tree_sampled(p.__getitem__, tree, [data.draw(UNIFORM) for _ in range(5)])
    for row, token in zip(verdict.rows, (*spelled(tree, verdict.path), verdict.token), strict=True):
        assert p[row, token] > 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(CANDIDATES, st.lists(st.integers(0, 4), min_size=25, max_size=25))
def test_greedy_follows_the_target(candidates: list[list[int]], target: list[int]) -> None:
    """As far as any candidate agrees with what the target writes, which depends on the path."""
    tree = DraftTree.of(candidates)
    verdict = verify_tree_greedy(target[: len(tree) + 1], tree)
    text: tuple[int, ...] = ()
    prefixes = {tuple(c[:i]) for c in candidates for i in range(len(c) + 1)} | {()}
    nodes = {spelled(tree, tree.path(node)): node for node in range(-1, len(tree))}
    while text in prefixes:
        text = (*text, target[nodes[text] + 1])
    assert (*spelled(tree, verdict.path), verdict.token) == text
    assert verdict.path == tuple(tree.path(verdict.rows[-1] - 1))


EXAMPLE = DraftTree.of([[5, 7, 5], [5, 8], [6, 5], [9, 10, 11]])
SETTINGS = [
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
    {"temperature": 0.0},
]


def random_logits(vocabulary: int = 61, seed: int = 0) -> Tensor:
    return 3 * torch.randn(len(EXAMPLE) + 1, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_every_row_is_processed_as_on_its_path(options: dict[str, float]) -> None:
    params = SamplingParams(**options)
    history = torch.tensor([1, 5, 30]) if params.repetition_penalty != 1.0 else None
    logits = random_logits()
    before = logits.clone()
    processed = torch.stack([process_row(logits, row, params, history, EXAMPLE) for row in range(len(EXAMPLE) + 1)])
    assert torch.equal(logits, before) and processed.shape == logits.shape
    for node in range(-1, len(EXAMPLE)):
        path = EXAMPLE.path(node)
        rows = [0, *(n + 1 for n in path)]
        chain = process(logits[rows], params, history, spelled(EXAMPLE, path))
        assert torch.equal(processed[rows], chain)
        assert torch.equal(process_row(logits, node + 1, params, history, EXAMPLE), chain[-1])


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_judging_is_processing_and_verifying(options: dict[str, float]) -> None:
    """And needs no rows but those of the path."""
    params = SamplingParams(**options)
    history = torch.tensor([1, 5]) if params.repetition_penalty != 1.0 else None
    lengths = set()
    for seed in range(200):
        logits = random_logits(12, seed)
        draw_u = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
        processed = torch.stack([process_row(logits, row, params, history, EXAMPLE) for row in range(len(EXAMPLE) + 1)])
        if params.greedy:
            wanted = verify_tree_greedy(processed.argmax(-1).tolist(), EXAMPLE)
        else:
            wanted = verify_tree_sampled(processed.softmax(-1).__getitem__, EXAMPLE, draw_u)
        unseen = [row for row in range(len(EXAMPLE) + 1) if row not in wanted.rows]
        logits[unseen] = float("nan")
        assert judge_tree(logits, params, history, EXAMPLE, draw_u) == wanted
        lengths.add(len(wanted.path))
    assert {0, 1, 2} <= lengths

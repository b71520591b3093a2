"""The acceptance rules on draft trees: pure functions of target distributions, a tree and random numbers.

The candidates of a beam are deterministic, so that every child has a one-hot q. The rule for those tries the siblings c_1, c_2,
.. in turn: accept c_i with probability p(c_i) over what is left of p, else zero it and go on; after the last one draw from what
is left (SpecInfer, Miao et al., 2024, with one-hot drafts). The chance of c_i is then

    (1 - p(c_1) - .. - p(c_{i-1})) * p(c_i) / (1 - p(c_1) - .. - p(c_{i-1})) = p(c_i),

and that of any other token x, by the same product, p(x): whatever the siblings and their order, the rule draws x from p and follows
the child that is x. So that is what is done here, with the one number that plain decoding uses at that position. It is exact
because there is nothing but the target's own draw in it, and where the logits are equal to plain decoding's in every bit, the
text is plain decoding's own at any temperature, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hspec.decoding.params import SamplingParams
from hspec.decoding.processors import process
from hspec.decoding.randomness import sample
from hspec.drafters.tree import DraftTree


@dataclass(frozen=True)
class TreeVerdict:
    """Of one verification: the nodes that stand, from the anchor's child on, and the token that the target puts after them."""

    path: tuple[int, ...]
    token: int

    @property
    def rows(self) -> list[int]:
        """The anchor's row and the path's, for :meth:`hspec.targets.cache.KVCache.keep_paths`."""
        return [0, *(node + 1 for node in self.path)]


def judge_tree(
    logits: Tensor, params: SamplingParams, history: Tensor | None, tree: DraftTree, draw_u: Sequence[float]
) -> TreeVerdict:
    """Apply a request's processors and the acceptance rule to a tree; only rows that the path reaches are processed.

    Args:
        logits: raw, ``[n + 1, vocabulary]`` fp32; row 0 is for the token after the anchor, row i + 1 after node i.
        history: distinct tokens up to and with the anchor ``[m]`` int64; only a repetition penalty needs it.
        draw_u: see :func:`verify_tree_sampled`; not read at temperature 0.
    """

    def row(i: int) -> Tensor:
        return process_row(logits, i, params, history, tree)

    if params.greedy:
        return _follow(tree, lambda i, _: int(row(i).argmax()))
    return verify_tree_sampled(lambda i: row(i).softmax(-1), tree, draw_u)


def verify_tree_greedy(target_tokens: Sequence[int], tree: DraftTree) -> TreeVerdict:
    """Follow the children that the target would have written itself.

    Args:
        target_tokens: the target's argmax at each row, n + 1 of them.
    """
    return _follow(tree, lambda row, _: target_tokens[row])


def verify_tree_sampled(p: Callable[[int], Tensor], tree: DraftTree, draw_u: Sequence[float]) -> TreeVerdict:
    """Draw from the target, and follow the tree for as long as it has what is drawn.

    Args:
        p: row -> the target's processed distribution there, ``[vocabulary]``; asked only for rows that the path reaches.
        draw_u: numbers in [0, 1), one a depth: ``draw_u[d]`` for the token behind d accepted drafts, which is
            ``uniform(seed, position of that token, Purpose.TARGET)``. The tree's depth + 1 of them.
    """

    def draw(row: int, depth: int) -> int:
        weights = p(row)
        return int(sample(weights[None], torch.tensor([draw_u[depth]], dtype=torch.float64, device=weights.device))[0])

    return _follow(tree, draw)


def process_row(logits: Tensor, row: int, params: SamplingParams, history: Tensor | None, tree: DraftTree) -> Tensor:
    """Row ``row`` of ``[n + 1, vocabulary]`` logits, processed with the history along its own path; ``[vocabulary]``."""
    if history is not None:
        history = torch.cat((history, history.new_tensor([tree.tokens[node] for node in tree.path(row - 1)])))
    return process(logits[row : row + 1], params, history)[0]


def _follow(tree: DraftTree, choose: Callable[[int, int], int]) -> TreeVerdict:
    """Go down from the anchor along the tokens that ``choose(row, depth)`` names, until the tree does not have one."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        token = choose(node + 1, len(path))
        child = tree.child(node, token)
        if child is None:
            return TreeVerdict(tuple(path), token)
        path.append(child)

"""Draft trees: several continuations of one anchor that share what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hspec.targets.attention import ancestors


@dataclass(frozen=True)
class DraftTree:
    """The drafts of one sequence as a tree below its anchor.

    Nodes are numbered in preorder: a node comes right before its subtree, and siblings in their fixed order, the preferred
    one first. The target runs *rows*: row 0 is the anchor, row ``i + 1`` node ``i``. A chain of k drafts is the tree in
    which node i's parent is i - 1.

    Raises:
        AssertionError: not in preorder, or two siblings with one token.
    """

    tokens: tuple[int, ...]
    """Target id of each node."""
    parents: tuple[int, ...]
    """The node before it on its path; -1 is the anchor."""

    def __post_init__(self) -> None:
        path: list[int] = [-1]
        for node, parent in enumerate(self.parents):
            if parent not in path:
                raise AssertionError(f"node {node} with parent {parent} is not in preorder: {self.parents}")
            path[path.index(parent) + 1 :] = [node]
        if len(self.tokens) != len(self.parents):
            raise AssertionError(f"{len(self.tokens)} tokens for {len(self.parents)} nodes")
        if len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens):
            raise AssertionError(f"siblings with one token: {self.tokens}, {self.parents}")

    @staticmethod
    def of(candidates: Sequence[Sequence[int]]) -> DraftTree:
        """The prefix tree of a beam's candidates: what they begin with alike becomes one path (ReDrafter, Cheng et al., 2024).

        Args:
            candidates: token sequences, the preferred one first; siblings keep the order in which candidates bring them up.
        """
        root: dict = {}
        for candidate in candidates:
            below = root
            for token in candidate:
                below = below.setdefault(token, {})
        tokens, parents = list[int](), list[int]()
        waiting = [(-1, token, below) for token, below in reversed(root.items())]
        while waiting:
            parent, token, below = waiting.pop()
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            waiting += [(node, *item) for item in reversed(below.items())]
        return DraftTree(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node: how many tokens behind the anchor it stands, 1 for the anchor's children."""
        return self.row_depths[1:]

    @cached_property
    def row_depths(self) -> tuple[int, ...]:
        """Of each row, the anchor's 0 first: what :meth:`hspec.targets.target.Target.forward` needs to know of a tree."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    @cached_property
    def ancestors(self) -> Tensor:
        """``[n + 1, n + 1]`` bool by rows: ``[i, j]`` where row j is on the way from the anchor to row i, i included."""
        return ancestors(self.row_depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of each row, the anchor first: its child nodes in their fixed order."""
        below: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            below[parent + 1].append(node)
        return tuple(map(tuple, below))

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` (-1: of the anchor) that is ``token``, if there is one."""
        return next((child for child in self.children[node + 1] if self.tokens[child] == token), None)

    def path(self, node: int) -> list[int]:
        """Nodes from the anchor's child down to ``node``; empty for -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def cut(self, depth: int) -> DraftTree:
        """The tree of the nodes down to ``depth``, for what still fits a context."""
        kept = [node for node, own in enumerate(self.depths) if own <= depth]
        number = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return DraftTree(tuple(self.tokens[n] for n in kept), tuple(number[self.parents[n]] for n in kept))


def tree_rows(anchors: Sequence[int], trees: Sequence[DraftTree]) -> tuple[Tensor, list[tuple[int, ...]]]:
    """What the target runs to verify one tree a sequence.

    Returns:
        Tokens ``[B, longest n + 1]`` int64, each row the anchor, its nodes, then padding (token 0); and the depths of the
        rows that are not padding.
    """
    longest = max(map(len, trees))
    rows = [[anchor, *tree.tokens, *[0] * (longest - len(tree))] for anchor, tree in zip(anchors, trees, strict=True)]
    return torch.tensor(rows), [tree.row_depths for tree in trees]

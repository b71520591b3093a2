"""The formulas of causal heads with scalars and lists: slow, and plain to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hspec.drafters.context import Chooser, greedy_chooser
from hspec.drafters.heads.causal import CausalHead

Vector = list[float]
Matrix = Sequence[Sequence[float]]


def matvec(matrix: Matrix, vector: Vector) -> Vector:
    return [sum(w * x for w, x in zip(row, vector, strict=True)) for row in matrix]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def add(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def silu(x: float) -> float:
    return x * sigmoid(x)


def walked(
    head: CausalHead, hidden: Tensor, previous: Tensor, base: Callable[[Tensor], Tensor], choose: Chooser = greedy_chooser,
    anchor_hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The logits of a walk in which the token before slot j is ``previous[:, j]``: ``[M, k, draft vocabulary]``."""
    walk = head.walk(hidden, hidden[:, 0] if anchor_hidden is None else anchor_hidden, base, choose)
    return torch.stack([walk(j, previous[:, j]) for j in range(hidden.shape[1])], dim=1)

"""Which of a step's documents a process trains on."""

from __future__ import annotations

from dataclasses import replace

from hspec.training.blocks import Anchors
from hspec.training.examples import Batch


def share_of(batch: Batch, anchors: Anchors, rank: int, count: int) -> tuple[Batch, Anchors]:
    """Every ``count``-th document, from ``rank`` on: the documents of a batch are ordered by size, so all get about the same. Anchors
    are drawn for the whole batch before, so that they do not depend on how many share it.

    A process for which no document is left takes the first one without an anchor: it has no block, but takes part.
    """
    if count == 1:
        return batch, anchors
    rows = list(range(rank, batch.tokens.shape[0], count))
    valid = anchors.valid
    if not rows:
        rows, valid = [0], valid & False
    width = max(1, int(valid[rows].sum(1).max()))
    return documents_of(batch, rank, count), Anchors(anchors.positions[rows, :width], valid[rows, :width])


def documents_of(batch: Batch, rank: int, count: int) -> Batch:
    """Those that :func:`share_of` gives a process."""
    if count == 1:
        return batch
    rows = list(range(rank, batch.tokens.shape[0], count)) or [0]
    return replace(
        batch,
        tokens=batch.tokens[rows],
        supervised=batch.supervised[rows],
        documents=tuple(batch.documents[row] for row in rows),
    )

"""Telling one set of weights from another by some rows of each, so that a file need not be read whole for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor

_ROWS = 16


def sampled_rows(count: int) -> range:
    """Which rows of a weight of ``count`` rows are looked at: some sixteen to thirty, evenly."""
    return range(0, count, max(1, count // _ROWS))


def hash_weights(rows: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (16 hex digits) over names and rows (see :func:`sampled_rows`) of all weights in fp32, which must come by name."""
    digest = hashlib.sha256()
    for name, some in rows:
        digest.update(name.encode())
        digest.update(some.detach().reshape(some.shape[0], -1).float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]

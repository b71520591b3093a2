"""What one step of vLLM's runner says about its requests, as the rows that a drafter needs. Plain numbers in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hspec.errors import HSpecError


@dataclass(frozen=True)
class DraftRow:
    """One request that gets drafts."""

    request: int
    """Its index in the runner's batch."""
    anchor: int
    """The last token sampled, not yet run by the target."""
    position: int
    """The anchor's: as many tokens lie before it, whose K/V are valid."""
    hidden: int
    """Row of the step's hidden states that belongs to the token before the anchor."""


def draft_rows(
    sampled: Sequence[Sequence[int]],
    drafted: Sequence[int],
    query_ends: Sequence[int],
    lengths: Sequence[int],
    known: Sequence[int],
) -> list[DraftRow]:
    """The requests that sampled a token in this step; those still within their prompt get no drafts.

    Args:
        sampled: of each request the tokens that the step emitted, accepted drafts and the target's own.
        drafted: of each request the drafts that were put to the test.
        query_ends: end of each request's rows in the step's hidden states.
        lengths: tokens of each request whose K/V lie in the pages after the step, rejected drafts included.
        known: tokens of each request so far, for a check: the anchor must be the last of them.

    Raises:
        HSpecError: the numbers contradict each other, so the rows would be wrong: this vLLM is not as it was known.
    """
    rows = []
    for i, tokens in enumerate(sampled):
        if not tokens:
            continue
        rejected = drafted[i] + 1 - len(tokens)
        position = lengths[i] - rejected
        if rejected < 0 or position != known[i] - 1:
            raise HSpecError(
                f"request {i} has {known[i]} tokens, but {lengths[i]} in its pages, {drafted[i]} drafted and {len(tokens)} emitted: "
                f"vLLM's runner is not the one that this plugin knows; please report it"
            )
        rows.append(DraftRow(i, tokens[-1], position, query_ends[i] - 1 - rejected))
    return rows

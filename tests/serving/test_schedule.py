"""Fewer drafts where many requests run at once, as vLLM is told."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspec.errors import UsageError
from hspec.serving.schedule import Schedule


def drafts(ranges: list[list[int]], requests: int) -> int:
    """What vLLM 0.32 makes of its setting: the range's, and behind the last range the last one's."""
    return next((n for first, last, n in ranges if first <= requests <= last), ranges[-1][2])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted),
    st.data(),
    st.integers(1, 60),
)
def test_every_number_of_requests_has_its_drafts(counts: list[int], data: st.DataObject, requests: int) -> None:
    values = [data.draw(st.integers(0, 7)) for _ in counts]
    ranges = Schedule.of(",".join(f"{c}:{v}" for c, v in zip(counts, values, strict=True))).ranges(7)
    wanted = next((v for c, v in reversed(list(zip(counts, values, strict=True))) if c <= requests), 7)
    assert drafts(ranges, requests) == wanted
    assert ranges[0][0] == 1 and all(a[1] + 1 == b[0] for a, b in pairwise(ranges))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not REQUESTS:DRAFTS"),
        ("3", "'3' is not REQUESTS:DRAFTS"),
        ("3:2,x:0", "'x:0' is not"),
        ("3:-1", "'3:-1' is not"),
        ("0:2", "must rise from 1"),
        ("5:1,3:0", "must rise"),
        ("3:1,3:0", "must rise"),
    ],
)
def test_what_is_no_schedule(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Schedule.of(text)


def test_more_drafts_than_there_are() -> None:
    with pytest.raises(UsageError, match="5 drafts are more than -k 4"):
        Schedule.of("1:5").ranges(4)

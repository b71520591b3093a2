"""Which tokens count as copied."""

from hypothesis import given
from hypothesis import strategies as st

from hspec.evaluation.origin import ANSWER, COPY, NEW, PROMPT, origins

TOKENS = st.lists(st.integers(0, 3), max_size=25)


def test_by_hand() -> None:
    """The prompt has 1 2 3 4 5. Of its copy the fourth token is the first to be known for one; what is said twice is known likewise."""
    assert origins([9, 1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 5, 6]) == "nnnppn"
    assert origins([9], [1, 2, 3, 4, 5, 1, 2, 3, 4, 7]) == "nnnnnnnnan"
    assert origins([1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3, 4]) == "nnnpaaap"  # and 2 3 4 1 the second time is the answer's own
    assert origins([], []) == "" and origins([], [1, 1, 1, 1, 1]) == "nnnna"


def test_runs_over_the_seam() -> None:
    """The last tokens of the prompt count for the first ones of the answer, which say on what stood there before."""
    assert origins([1, 2, 3, 4, 5, 1, 2, 3], [4, 5]) == "pp"


@given(TOKENS, TOKENS)
def test_against_a_search(prompt: list[int], answer: list[int]) -> None:
    """Each mark is what looking through the whole text, window by window, finds."""
    text = prompt + answer
    for place, mark in zip(range(len(prompt), len(text)), origins(prompt, answer), strict=True):
        last = text[: place + 1][-COPY:]
        ends = [end for end in range(COPY - 1, place) if text[end - COPY + 1 : end + 1] == last]
        expected = NEW if not ends else PROMPT if ends[0] < len(prompt) else ANSWER
        assert mark == expected

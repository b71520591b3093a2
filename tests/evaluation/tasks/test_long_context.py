"""Long prompts have the length that is asked for, are the same every time, and can be answered from what they say."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.errors import UsageError
from hspec.evaluation.tasks.long_context import LONG_TASKS, long_task


def words(text: str) -> int:
    return len(text.split())


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(LONG_TASKS), st.integers(256, 6000), st.integers(0, 99))
def test_length(name: str, tokens: int, seed: int) -> None:
    task = long_task(name, tokens, words, 2, seed)
    assert task.name == f"{name}-{tokens}"
    for prompt in task.prompts:
        assert tokens - 80 <= words(prompt.turns[0]) <= tokens, "as long as it may be, to within a document"
    assert long_task(name, tokens, words, 2, seed) == task
    assert task.prompts[0].turns != task.prompts[1].turns != long_task(name, tokens, words, 2, seed + 100).prompts[1].turns


def test_the_answer_is_in_it_once() -> None:
    for prompt in long_task("long-cite", 1500, words, 5).prompts:
        asked = re.search(r"did (.+?) of (.+?) build (.+?), and why\?", prompt.turns[0])
        assert asked is not None
        who, town, work = asked.groups()
        documents = re.findall(r"^\[(\d+)\] (.*)$", prompt.turns[0], re.MULTILINE)
        assert [int(number) for number, _ in documents] == list(range(1, len(documents) + 1))
        assert sum(f"{who} built {work} in {town}," in text for _, text in documents) == 1


def test_too_short_or_unknown() -> None:
    with pytest.raises(UsageError, match="100 tokens are too few"):
        long_task("long-qa", 100, words, 1)
    with pytest.raises(UsageError, match="there are long-cite, long-qa"):
        long_task("long-code", 1000, words, 1)

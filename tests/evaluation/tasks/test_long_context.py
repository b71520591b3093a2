"""Long prompts have the length that is asked for, are the same every time, and are answered by one document alone."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.errors import UsageError
from hspec.evaluation.tasks.long_context import LONG_TASKS, lengths_up_to, long_prompt, long_task
from tests.tiny import tiny_tokenizer

SHORT_DOCUMENT = 60
"""Words; what may be missing at most."""


def words(text: str) -> int:
    return len(text.split())


def body(text: str) -> list[str]:
    """The documents of a prompt."""
    return text.split("\n\n")[1:-1]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(LONG_TASKS), st.integers(256, 6000), st.integers(0, 99))
def test_length(name: str, tokens: int, seed: int) -> None:
    task = long_task(name, tokens, words, 2, seed)
    assert task.name == f"{name}-{tokens}"
    for prompt in task.prompts:
        assert tokens - SHORT_DOCUMENT <= words(prompt.turns[0]) <= tokens
    assert long_task(name, tokens, words, 3, seed).prompts[:2] == task.prompts, "more prompts change none"
    assert not {p.id for p in task.prompts} & {p.id for p in long_task(name, tokens, words, 2, seed + 1).prompts}
    assert task.prompts[0].turns != task.prompts[1].turns != long_task(name, tokens, words, 2, seed + 1).prompts[1].turns


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(LONG_TASKS), st.integers(300, 4000), st.integers(0, 99))
def test_one_document_answers(name: str, tokens: int, seed: int) -> None:
    made = long_prompt(name, tokens, words, seed, 0)
    (text,) = made.prompt.turns
    documents = body(text)
    question = text[text.rindex("Question: ") :]
    titles = [re.sub(r"^\[\d+\] ", "", d.split("\n")[0]) for d in documents]
    subjects = [title[0].lower() + title[1:] for title in titles]
    assert [subject in question for subject in subjects].index(True) == made.document - 1, "it asks about that document"
    places = [title.split()[-1] for title in titles]
    assert len(set(places)) == len(places)
    place = places[made.document - 1]
    assert [i for i, d in enumerate(documents, 1) if place in d] == [made.document], "its place is named nowhere else"
    assert made.answer in documents[made.document - 1] or all(
        part in documents[made.document - 1] for part in re.split(r", a | cents| metres", made.answer)
    )
    assert not re.search(r"[{}]", text)


def test_documents_are_numbered() -> None:
    text = long_prompt("long-cite", 1500, words, 0, 0).prompt.turns[0]
    numbers = [int(n) for n in re.findall(r"^\[(\d+)\] ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 8
    assert not re.search(r"^\[\d+\] ", long_prompt("long-qa", 1500, words, 0, 0).prompt.turns[0], re.MULTILINE)


def test_the_asked_document_lies_anywhere() -> None:
    shares = [(made.document - 0.5) / len(body(made.prompt.turns[0])) for made in (
        long_prompt("long-cite", 2000, words, 0, i) for i in range(60)
    )]  # fmt: skip
    counts = [sum(low <= share < low + 0.25 for share in shares) for low in (0, 0.25, 0.5, 0.75)]
    assert min(counts) >= 5


def test_with_a_tokenizer() -> None:
    tokenizer = tiny_tokenizer()
    counts = [
        len(tokenizer(p.turns[0]).input_ids)
        for p in long_task("long-cite", 4096, lambda t: len(tokenizer(t).input_ids), 2).prompts
    ]
    assert all(4096 - 6 * SHORT_DOCUMENT <= count <= 4096 for count in counts)


@pytest.mark.parametrize("extra", [-4, 7])
def test_counts_that_do_not_add_up(extra: int) -> None:
    """A whole that has more tokens than its parts, or fewer, still has the length that is asked for."""

    def count(text: str) -> int:
        return words(text) + extra * max(0, text.count("\n\n") - 1)

    for tokens in range(500, 3000, 100):
        (prompt,) = long_task("long-cite", tokens, count, 1).prompts
        assert tokens - SHORT_DOCUMENT <= count(prompt.turns[0]) <= tokens


def test_lengths() -> None:
    assert lengths_up_to(8192) == [1024, 2048, 4096, 8192]
    assert lengths_up_to(7900) == [1024, 2048, 4096, 7900]
    assert lengths_up_to(600) == [600]


def test_too_short_too_long_or_unknown() -> None:
    with pytest.raises(UsageError, match="10 tokens are too few, a document with its question takes"):
        long_task("long-qa", 10, words, 1)
    with pytest.raises(UsageError, match=r"can have [\d,]+ documents, which are too few"):
        long_task("long-qa", 100_000, lambda text: text.count("\n\n"), 1)
    with pytest.raises(UsageError, match="there are long-cite, long-qa"):
        long_task("long-code", 1000, words, 1)

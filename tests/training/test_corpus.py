"""Documents in little memory are the documents that were put in."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.training.corpus import Corpus, Example


@st.composite
def example(draw: st.DrawFn) -> Example:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=30))
    mask = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    return Example(draw(st.text(max_size=5)), tokens, mask)


EXAMPLES = st.lists(example(), max_size=8)


@settings(deadline=None)
@given(EXAMPLES)
def test_what_goes_in_comes_out(examples: list[Example]) -> None:
    corpus = Corpus.of(examples)
    assert list(corpus) == examples and corpus[:3] == examples[:3] and len(corpus) == len(examples)
    assert corpus.lengths.tolist() == [len(e.tokens) for e in examples]
    assert list(corpus.with_blocks()) == [e for e in examples if e.has_block]
    assert Corpus.of(corpus) is corpus
    if examples:
        assert corpus[-1] == examples[-1]
    with pytest.raises(IndexError):
        corpus[len(examples)]


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), max_size=5))
def test_supervised_tokens_are_counted(documents: list[list[tuple[int, bool]]]) -> None:
    corpus = Corpus.of(Example("", [t for t, _ in d], [own for _, own in d]) for d in documents)
    expected = [sum(t == token and own for d in documents for t, own in d) for token in range(10)]
    assert corpus.supervised_counts(10).tolist() == expected


def test_the_fingerprint_knows_documents_sources_and_weights() -> None:
    def made(source: int = 0, weights: tuple[float, ...] | None = None, tokens: tuple[int, ...] = (1, 2, 3)) -> str:
        corpus = Corpus(weights)
        corpus.append(Example("a", list(tokens), [False, True, True]), source)
        return corpus.fingerprint()

    assert made() == made()
    assert len({made(), made(1), made(weights=(1, 2)), made(weights=(2, 2)), made(tokens=(1, 2, 4))}) == 5


def test_a_million_tokens_take_five_megabytes_instead_of_forty() -> None:
    """In documents as long as the target's answers with their prompts."""
    rng = np.random.default_rng(0)
    lengths, count = rng.integers(60, 480, 370), 0

    def made(length: int) -> Example:
        nonlocal count
        count += 1
        return Example(f"{count:016x}", rng.integers(300, 49_000, length).tolist(), [t > 60 for t in range(length)])

    def taken(keep: bool) -> float:
        tracemalloc.start()
        try:
            made_of = (made(n) for n in lengths.tolist())
            held = list(made_of) if keep else Corpus.of(made_of)
            return tracemalloc.get_traced_memory()[0] / sum(len(e.tokens) for e in held)
        finally:
            tracemalloc.stop()

    compact, lists = taken(keep=False), taken(keep=True)
    assert compact < 5.2 and lists > 40

"""Cleaning prompts, and a split that other data cannot move."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.training.conversations import Conversation
from hspec.training.prompts import CleaningReport, Prompt, choose, clean_prompts, is_english, normalised


def words(text: str) -> int:
    return len(text.split())


def conversations(*texts: str | None) -> list[Conversation]:
    return [Conversation.of([{"role": "user", "content": t}] if t is not None else []) for t in texts]


def clean(*texts: str | None, limit: int = 20) -> tuple[list[str], CleaningReport]:
    prompts, report = clean_prompts(conversations(*texts), words, 3, limit)
    return [p.text for p in prompts], report


def many(count: int) -> list[str]:
    return [f"{i} what is the name of the number {i}?" for i in range(count)]


def test_each_reason_to_leave_one_out_is_counted() -> None:
    texts = [
        "  What is the sky?  ",
        "what   is the SKY?",  # the same, normalised
        None,
        "   ",
        "Was ist der Himmel über München für uns?",
        "the sky",  # short
        "the " * 21,  # long
    ]
    kept, report = clean(*texts)
    assert kept == ["What is the sky?"]
    assert report == CleaningReport(seen=7, kept=1, no_prompt=2, not_english=1, length=2, duplicate=1)


def test_prompts_with_the_same_beginning_are_duplicates() -> None:
    start = "Please write what you think of the following text, and do it in the style of a pirate, in short: "
    assert len(start) < 100
    kept, report = clean(start + "abcdefghij one", start + "abcdefghij two", start + "other", limit=60)
    assert len(kept) == 2 and report.duplicate == 1


@pytest.mark.parametrize("limit", [20, 60])
def test_other_limits_do_not_bring_in_another_of_the_near_duplicates(limit: int) -> None:
    """Else one of them could be trained on (with a low limit) and the other measured on (with a high one)."""
    start = "what is the meaning of " + "x" * 90
    long, short = start + " and" * 30, start + " it"
    kept, _ = clean(long, short, limit=limit)
    assert kept == ([] if limit == 20 else [long])


def test_the_split_depends_on_the_prompt_alone() -> None:
    texts = many(2000)
    prompts, _ = clean_prompts(conversations(*texts), words, 3)
    held = {p.text for p in prompts if p.held_out}
    assert 30 <= len(held) <= 95  # 3 % of 2,000
    for count, seed in ((2000, 1), (700, 2), (50, 3)):
        part = random.Random(seed).sample(texts, count)
        again, _ = clean_prompts(conversations(*part, "how is the weather in the city?"), words, 3)
        assert {p.text for p in again if p.held_out} - {"how is the weather in the city?"} == held & set(part)


def test_ids_and_order_are_the_same_on_every_machine() -> None:
    prompts, _ = clean_prompts(conversations("What is the sky?", "How do I write a letter?"), words, 3)
    assert [p.id for p in prompts] == sorted(p.id for p in prompts)
    assert {p.text: p.id for p in prompts}["What is the sky?"] == "5a3b7a8fcd2a994f"
    again, _ = clean_prompts(conversations("How do I write a letter?", "WHAT is   the sky?"), words, 3)
    assert [p.id for p in again] == [p.id for p in prompts]


def test_the_share_that_is_held_out_is_by_thousandths() -> None:
    assert Prompt(f"{29:08x}", "").held_out and not Prompt(f"{30:08x}", "").held_out and Prompt(f"{1000:08x}", "").held_out


@pytest.mark.parametrize(
    ("text", "english"),
    [
        ("Explain the theory of relativity to me.", True),
        ("Перевод текста", False),
        ("Schreibe einen Brief an meinen Freund", False),
        ("asdf qwer zxcv uiop", False),
        ("", False),
    ],
)
def test_english(text: str, english: bool) -> None:
    assert is_english(text) == english


def test_prompts_are_chosen_by_weight_and_in_order() -> None:
    prompts = [Prompt(f"{n:016x}", "", source=n % 2) for n in range(20)]
    assert choose(prompts, None, (9.0, 1.0)) == prompts and choose(prompts, 3, None) == prompts[:3]
    chosen = choose(prompts, 10, (4.0, 1.0))
    assert chosen == sorted(chosen, key=lambda p: p.id)
    for source, count in ((0, 8), (1, 2)):
        assert [p for p in chosen if p.source == source] == [p for p in prompts if p.source == source][:count]
    few = choose([p for p in prompts if p.source == 1 or p.id < f"{6:016x}"], 10, (4.0, 1.0))
    assert [sum(p.source == s for p in few) for s in (0, 1)] == [3, 7]  # what the first does not have, the second gives


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.text("ab ", max_size=6)), max_size=80))
def test_no_held_out_prompt_begins_like_one_that_is_trained_on(rows: list[tuple[int, int, str]]) -> None:
    """Across sources, whatever the order, with beginnings that differ in case and spaces, and ends that differ."""
    starts = [f"what is the meaning of the number {n}? " + "please " * 12 for n in range(61)]
    talks = [
        replace(
            Conversation.of([{"role": "user", "content": starts[n].upper() * (s % 2) + starts[n] * (1 - s % 2) + end}]),
            source=s,
        )
        for s, n, end in rows
    ]
    prompts, _ = clean_prompts(talks, words, 3, 100)
    sides: dict[bool, set[str]] = {True: set(), False: set()}
    for prompt in prompts:
        sides[prompt.held_out].add(normalised(prompt.text)[:100])
    assert not sides[True] & sides[False]
    assert len(prompts) == len({n for _, n, _ in rows})
    assert all(conversations_have(talks, p) for p in prompts)


def conversations_have(talks: list[Conversation], prompt: Prompt) -> bool:
    return any(t.source == prompt.source and (t.first_user_turn or "").strip() == prompt.text for t in talks)

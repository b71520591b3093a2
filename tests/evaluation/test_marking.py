"""Marking what was drafted: nothing of the text may be lost or changed by it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hspec.decoding.engine import Step
from hspec.evaluation.marking import MarkedStream

WORDS = {1: "Hello", 2: " wide", 3: " [bold]world[/bold]", 4: "\n", 5: ""}


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[t] for t in tokens)


def step(tokens: list[int], drafted: list[bool], text: str | None = None) -> Step:
    return Step(0, tokens, drafted, decode(tokens) if text is None else text, None)


def shown(*steps: Step, mark: bool = True, colours: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=20, force_terminal=colours, color_system="standard" if colours else None, highlight=False)
    stream = MarkedStream(console, mark)
    for one in steps:
        stream.show(one, decode)
    return out.getvalue()


def test_accepted_drafts_stand_in_guillemets_where_there_are_no_colours() -> None:
    text = shown(step([1], [False]), step([2, 3, 4], [True, True, False]))
    assert text == "Hello« wide [bold]world[/bold]»\n"


def test_on_a_terminal_they_are_bold_and_green() -> None:
    text = shown(step([1, 2], [True, False]), colours=True)
    assert text.startswith("\x1b[1;32mHello\x1b[0m") and text.endswith(" wide")
    assert "\x1b" not in shown(step([1, 2], [False, False]), colours=True)


@pytest.mark.parametrize("mark", [True, False])
def test_unmarked_and_undrafted_text_is_as_it_is(mark: bool) -> None:
    steps = [step([1, 2], [False, False]), step([3, 4], [not mark, False])]
    assert shown(*steps, mark=mark) == "Hello wide [bold]world[/bold]\n"


def test_text_that_waits_for_more_is_not_marked_twice() -> None:
    assert shown(step([1, 2], [True, False], text="")) == ""  # held back, a stop string may be coming
    assert shown(step([1, 2], [True, False], text="Hel")) == "«Hel»"
    assert shown(step([5, 2], [True, False])) == " wide"  # a special token has no text


def test_long_lines_are_not_broken() -> None:
    long = step([1] * 30, [True] * 29 + [False])
    assert "\n" not in shown(long)

"""Showing which parts of a streamed text were drafted and accepted."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from hspec.decoding.engine import Step

DRAFTED = "bold green"


class MarkedStream:
    """Prints a stream step by step; the part of a step that came from accepted drafts is green and bold on a terminal, and in
    «guillemets» where there are no colours.

    A step's text is split by the share of its tokens that were drafted (accepted drafts come first, the target's own token
    last), at the nearest word boundary where a character is not one token's.
    """

    def __init__(self, console: Console, mark: bool = True):
        self.console, self.mark = console, mark

    def show(self, step: Step, decode) -> None:  # type: ignore[no-untyped-def]
        """``decode`` turns token ids into text; used to find where the drafted part ends."""
        drafted = [t for t, d in zip(step.tokens, step.drafted, strict=True) if d]
        head = len(decode(drafted)) if drafted and self.mark else 0
        head = min(head, len(step.text))
        text = Text()
        if head and self.console.color_system is None:
            text.append("«" + step.text[:head] + "»")
        else:
            text.append(step.text[:head], style=DRAFTED)
        text.append(step.text[head:])
        self.console.print(text, end="", soft_wrap=True)

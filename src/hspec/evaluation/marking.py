"""Showing which parts of a streamed text were drafted and accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from hspec.decoding.engine import Step

DRAFTED = "bold green"


class MarkedStream:
    """Prints a stream step by step; the part of a step that came from accepted drafts is green and bold on a terminal, and in
    «guillemets» where there are no colours. Accepted drafts come first in a step, the target's own token last.
    """

    def __init__(self, console: Console, mark: bool = True):
        self.console, self.mark = console, mark

    def show(self, step: Step, decode: Callable[[list[int]], str]) -> None:
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


class DemoView:
    """The demo's running output: each prompt, and below it each way of answering, streamed."""

    def __init__(self, console: Console, prompts: Sequence[str], decode: Callable[[list[int]], str]):
        self.console, self.prompts, self.decode = console, prompts, decode
        self.stream = MarkedStream(console)
        self._at: tuple[int, str] | None = None

    def show(self, index: int, way: str, step: Step) -> None:
        """A step of prompt ``index``, answered ``"h-spec"`` or ``"plain"``."""
        if self._at != (index, way):
            self._at = (index, way)
            if way == "h-spec":
                self.console.print(f"\n\n[bold]{escape(self.prompts[index])}[/bold]")
                self.console.print("[dim]with H-Spec; accepted draft tokens are marked:[/dim]")
            else:
                self.console.print("\n[dim]without drafting:[/dim]")
        self.stream.show(step, self.decode)

"""Where an answer's tokens come from: copied from the prompt, said before in the answer, or new.

Text that is copied is what prompt lookup lives on, and where a drafter that was trained on chat alone may be poor; a mean over both
hides that.
"""

from __future__ import annotations

from collections.abc import Sequence

COPY = 4
"""A token counts as copied if it and those before it, so many in all, stand elsewhere in this order. A choice: fewer make chance hits of
common phrases, more miss short quotations."""

NEW, PROMPT, ANSWER = "npa"
"""A token's mark."""


def origins(prompt: Sequence[int], answer: Sequence[int]) -> str:
    """A mark for each token of an answer: :data:`PROMPT` if the :data:`COPY` tokens that end in it stand in the prompt, :data:`ANSWER`
    if they end at a token of the answer before it instead, else :data:`NEW`."""
    tokens = [*prompt, *answer]
    in_prompt = {tuple(tokens[end - COPY : end]) for end in range(COPY, len(prompt) + 1)}
    said: set[tuple[int, ...]] = set()
    marks = []
    for end in range(len(prompt) + 1, len(tokens) + 1):
        last = tuple(tokens[max(end - COPY, 0) : end])
        marks.append(PROMPT if last in in_prompt else ANSWER if last in said else NEW)
        said.add(last)
    return "".join(marks)

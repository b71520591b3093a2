"""Cutting the steps of answers into bins: by how far the answer had come, by how long the text before it was, by what was copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hspec.evaluation.origin import ANSWER, NEW, PROMPT
from hspec.evaluation.records import Record
from hspec.evaluation.statistics import Floats


@dataclass(frozen=True)
class Bins:
    """Ranges of whole numbers, each up to the next one's beginning; the last has no end."""

    lows: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lows)

    def index(self, value: int) -> int:
        """The bin that a number lies in; it must not lie below the first."""
        return bisect_right(self.lows, value) - 1

    def label(self, index: int) -> str:
        """``<64``, ``64-255``, ``1024+``."""
        low, above = self.lows[index], self.lows[index + 1 :]
        if not above:
            return f"{low}+"
        return f"{low}-{above[0] - 1}" if low else f"<{above[0]}"

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(map(self.label, range(len(self))))


POSITIONS = Bins((1, 33, 65, 129, 257, 513, 1025))
"""Of a token in its answer, counted from 1."""
INPUTS = Bins((0, 64, 256, 1024, 4096, 16384))
"""Tokens before an answer."""

ORIGINS = {NEW: "new", PROMPT: "in the prompt", ANSWER: "said before"}
"""Labels of tokens by their mark (:mod:`hspec.evaluation.origin`)."""

Cut = Callable[[Record], Floats]
"""The tokens that a record's steps emitted, and how many steps there were, in each bin: ``[bins, 2]``."""


def by_position(record: Record) -> Floats:
    """Steps by the number of the first token that they emit, with all their tokens, as a :data:`Cut` over :data:`POSITIONS`. Every
    turn is counted anew, and its token 1 is the prefill's: the first step begins with token 2."""
    sums = np.zeros((len(POSITIONS), 2))
    for turn in record.turns:
        token = 2
        for run in turn.runs:
            sums[POSITIONS.index(token)] += (run, 1)
            token += run
    return sums


def by_input(record: Record) -> Floats:
    """Turns by the tokens of their prompt, the turns before included, as a :data:`Cut` over :data:`INPUTS`."""
    sums = np.zeros((len(INPUTS), 2))
    for turn in record.turns:
        sums[INPUTS.index(turn.prompt_tokens)] += (sum(turn.runs), len(turn.runs))
    return sums


def by_origin(record: Record) -> Floats:
    """Steps by where the first token that they emit comes from, with all their tokens, as a :data:`Cut` over :data:`ORIGINS`."""
    sums = np.zeros((len(ORIGINS), 2))
    rows = {mark: row for row, mark in enumerate(ORIGINS)}
    for turn in record.turns:
        token = 1
        for run in turn.runs if turn.origins else ():
            sums[rows[turn.origins[token]]] += (run, 1)
            token += run
    return sums

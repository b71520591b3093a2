"""The order in which documents come: a pure function of (seed, step), so that resuming needs no state."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hspec.errors import HSpecError
from hspec.training.apportion import apportion
from hspec.training.corpus import Corpus, Example

WINDOW = 64
"""So many batches' documents are sorted by size at once: more pad less, but the same documents meet again and again."""


@dataclass(frozen=True)
class Batch:
    """B documents padded on the right to T tokens; padding is never supervised and nothing attends to it."""

    tokens: Tensor
    """``[B, T]`` int64."""
    supervised: Tensor
    """``[B, T]`` bool."""
    documents: tuple[int, ...] = ()
    """Which of the stream's examples they are."""


class ExampleStream:
    """Batches of about ``token_budget`` padded tokens, documents of like length together, reshuffled every epoch.

    A row is a document, padded to the longest of its batch, so that nothing needs to keep documents apart in the attention of target
    and drafter. Measured, padding is 1.3 % of the tokens at a budget of 2,048 and 1.6 % at 8,192 for 5,530 answers of SmolLM2 with their
    prompts (20 to 450 tokens); for lengths from 20 to 4,096 (log-normal, median 400) 0.8 %, 2.7 %, and 4.0 % at 32,768.

    An epoch draws as many documents as there are. Without weights each comes once. With them (see :class:`Corpus`) each source gives its
    share, and goes on in the next epoch where it stopped: no document comes again before all of its source have come.

    Raises:
        HSpecError: there is no document with a block, or none of a source that has a weight.
    """

    def __init__(self, examples: Sequence[Example], token_budget: int, seed: int):
        self.examples = Corpus.of(examples).with_blocks()
        if not self.examples:
            raise HSpecError("no training example has a token that the assistant wrote: check the data file")
        self.token_budget, self.seed = token_budget, seed
        self._lengths = self.examples.lengths
        self._of_source = _by_source(self.examples)
        self._epoch = -1
        self._batches: list[list[int]] = []
        self._starts = [0]
        """First step of every epoch whose length is known, and of the one after it."""
        self.batches_per_epoch = self._length(0)

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step ``step``, counted over all epochs; its documents ascend in length."""
        while self._starts[-1] <= step:
            self._length(len(self._starts) - 1)
        epoch = bisect_right(self._starts, step) - 1
        documents = self._plan(epoch)[step - self._starts[epoch]]
        return replace(collate([self.examples[i] for i in documents]), documents=tuple(documents))

    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of the documents in their order: a run can only be resumed on the same ones."""
        return self.examples.fingerprint()

    def _length(self, epoch: int) -> int:
        """Batches in an epoch; those of the epochs before it are known."""
        if epoch == len(self._starts) - 1:
            self._starts.append(self._starts[-1] + len(self._plan(epoch)))
        return self._starts[epoch + 1] - self._starts[epoch]

    def _plan(self, epoch: int) -> list[list[int]]:
        if epoch == self._epoch:
            return self._batches
        rng = random.Random(f"{self.seed}/{epoch}")
        order = self._drawn(epoch)
        rng.shuffle(order)
        window = max(512, round(WINDOW * self.token_budget / float(self._lengths[order].mean())))
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            batches.extend(self._cut(sorted(order[start : start + window], key=self._lengths.__getitem__)))
        rng.shuffle(batches)
        self._epoch, self._batches = epoch, batches
        return batches

    def _drawn(self, epoch: int) -> list[int]:
        """The documents of an epoch."""
        if self.examples.weights is None:
            return list(range(len(self.examples)))
        shares = apportion(len(self.examples), self.examples.weights).tolist()
        drawn: list[int] = []
        for source, share in enumerate(shares):
            drawn += self._from(source, epoch * share, share)
        return drawn

    def _from(self, source: int, start: int, count: int) -> list[int]:
        """``count`` documents of a source, from place ``start`` on in the sequence of its passes, each shuffled anew."""
        documents = self._of_source[source]
        out: list[int] = []
        while len(out) < count:
            number, place = divmod(start + len(out), len(documents))
            shuffled = list(documents)
            random.Random(f"{self.seed}/source {source}/{number}").shuffle(shuffled)
            out += shuffled[place : place + count - len(out)]
        return out

    def _cut(self, window: list[int]) -> list[list[int]]:
        """Batches of documents that ascend in length."""
        batches: list[list[int]] = []
        current: list[int] = []
        for index in window:
            if current and self._lengths[index] * (len(current) + 1) > self.token_budget:
                batches.append(current)
                current = []
            current.append(index)
        return [*batches, current]


def _by_source(corpus: Corpus) -> list[list[int]]:
    """The documents of each source that has a weight."""
    groups = [np.flatnonzero(corpus.sources == number).tolist() for number in range(len(corpus.weights or ()))]
    if not all(groups):
        raise HSpecError(
            f"source {groups.index([]) + 1} of {len(groups)} has a weight but no document to train on: leave it out of data, or allow more "
            f"or longer prompts"
        )
    return groups


def collate(examples: Sequence[Example]) -> Batch:
    longest = max(len(e.tokens) for e in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
    supervised = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        supervised[row, : len(example.tokens)] = torch.tensor(example.supervised)
    return Batch(tokens, supervised)

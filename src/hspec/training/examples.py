"""Training examples and the order in which they come: a pure function of (seed, step), so that resuming needs no state."""

from __future__ import annotations

import hashlib
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hspec.errors import HSpecError
from hspec.files import reason
from hspec.targets.template import ChatTemplate
from hspec.training.conversations import Conversation


@dataclass(frozen=True)
class Example:
    """One document: its tokens, and which of them the assistant wrote."""

    id: str
    tokens: list[int]
    supervised: list[bool]

    @property
    def supervised_count(self) -> int:
        return sum(self.supervised)

    @property
    def has_block(self) -> bool:
        """Whether any block fits: an anchor with a token before it and a supervised token behind it."""
        return any(self.supervised[2:])


@dataclass(frozen=True)
class Batch:
    """B documents padded on the right to T tokens; padding is never supervised and nothing attends to it."""

    tokens: Tensor
    """``[B, T]`` int64."""
    supervised: Tensor
    """``[B, T]`` bool."""
    documents: tuple[int, ...] = ()
    """Which of the stream's examples they are."""


_PROBE = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]


def from_conversations(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    max_tokens: int,
    on_refused: Callable[[Conversation, HSpecError], None] = lambda *_: None,
) -> list[Example]:
    """Whole conversations as examples, cut to ``max_tokens``; those without a supervised token are left out.

    ``on_refused`` is told of each that the template does not take (roles that do not alternate, say).

    Raises:
        UsageError: the tokenizer has no chat template.
        HSpecError: the template does not show which tokens the assistant wrote.
    """
    template.encode_supervised(_PROBE)  # a template that cannot do one plain exchange can do none
    examples = []
    for conversation in conversations:
        if not conversation.has_answer:
            continue
        try:
            tokens, mask = template.encode_supervised(list(conversation.messages))
        except HSpecError as error:
            on_refused(conversation, error)
            continue
        tokens, mask = tokens[:max_tokens], mask[:max_tokens]
        if any(mask):
            examples.append(Example(conversation.id, tokens, mask))
    return examples


def from_answers(path: Path, max_tokens: int) -> list[Example]:
    """The target's own answers (see :mod:`hspec.training.answers`), with exactly the tokens that it drew."""
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise HSpecError(f"cannot read the answers in {path}: {reason(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            id, prompt, answer = record["id"], list(record["prompt_tokens"]), list(record["tokens"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # the last line of a file that is still being written
            raise HSpecError(f"{path}, line {number}: not an answer record ({error!r}): remove that line") from error
        tokens = (prompt + answer)[:max_tokens]
        mask = ([False] * len(prompt) + [True] * len(answer))[:max_tokens]
        if any(mask):
            examples.append(Example(id, tokens, mask))
    return examples


class ExampleStream:
    """Batches of about ``token_budget`` padded tokens, documents of like size together, reshuffled every epoch."""

    def __init__(self, examples: Sequence[Example], token_budget: int, seed: int):
        self.examples = [e for e in examples if e.has_block]
        if not self.examples:
            raise HSpecError("no training example has a token that the assistant wrote: check the data file")
        self.token_budget, self.seed = token_budget, seed
        self._epoch = -1
        self._batches: list[list[int]] = []
        self._starts = [0]
        """First step of every epoch whose length is known, and of the one after it."""
        self.batches_per_epoch = self._length(0)

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step ``step``, counted over all epochs."""
        while self._starts[-1] <= step:
            self._length(len(self._starts) - 1)
        epoch = bisect_right(self._starts, step) - 1
        documents = self._plan(epoch)[step - self._starts[epoch]]
        return replace(collate([self.examples[i] for i in documents]), documents=tuple(documents))

    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of the documents in their order: a run can only be resumed on the same ones."""
        digest = hashlib.sha256()
        for e in self.examples:
            digest.update(json.dumps([e.id, e.tokens, [int(s) for s in e.supervised]]).encode())
        return digest.hexdigest()[:16]

    def _length(self, epoch: int) -> int:
        """Batches in an epoch; those of the epochs before it are known."""
        if epoch == len(self._starts) - 1:
            self._starts.append(self._starts[-1] + len(self._plan(epoch)))
        return self._starts[epoch + 1] - self._starts[epoch]

    def _plan(self, epoch: int) -> list[list[int]]:
        if epoch == self._epoch:
            return self._batches
        rng = random.Random(f"{self.seed}/{epoch}")
        order = list(range(len(self.examples)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        for start in range(0, len(order), 512):
            window = sorted(order[start : start + 512], key=self._size)
            batches.extend(self._cut(window))
        rng.shuffle(batches)
        self._epoch, self._batches = epoch, batches
        return batches

    def _size(self, index: int) -> tuple[int, int]:
        example = self.examples[index]
        return example.supervised_count, len(example.tokens)

    def _cut(self, window: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        current: list[int] = []
        longest = 0
        for index in window:
            length = max(longest, len(self.examples[index].tokens))
            if current and length * (len(current) + 1) > self.token_budget:
                batches.append(current)
                current, length = [], len(self.examples[index].tokens)
            current.append(index)
            longest = length
        return [*batches, current]


def collate(examples: Sequence[Example]) -> Batch:
    longest = max(len(e.tokens) for e in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
    supervised = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        supervised[row, : len(example.tokens)] = torch.tensor(example.supervised)
    return Batch(tokens, supervised)

"""Documents of tokens in little memory."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np


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


class Corpus(Sequence[Example]):
    """Documents end to end: int32 tokens, one bit a token for who wrote it. An :class:`Example` is made when it is asked for.

    A million tokens (SmolLM2's answers with their prompts, 270 tokens a document) take 4.6 MB; as Python lists they would take 39.6.

    Args:
        weights: of each source, the share of the documents that an epoch draws from it; None draws each document once.
    """

    def __init__(self, weights: Sequence[float] | None = None):
        self.weights = None if weights is None else tuple(weights)
        self.ids: list[str] = []
        self._tokens, self._starts = array("i"), array("q", [0])
        # A document's bits begin at a byte of their own.
        self._bits, self._bit_starts = bytearray(), array("q", [0])
        self._sources, self._last = array("h"), array("i")

    @staticmethod
    def of(examples: Iterable[Example]) -> Corpus:
        """The examples; the same object if they are a corpus already."""
        if isinstance(examples, Corpus):
            return examples
        corpus = Corpus()
        for example in examples:
            corpus.append(example)
        return corpus

    def append(self, example: Example, source: int = 0) -> None:
        """Add a document of the source with this number."""
        self.ids.append(example.id)
        self._tokens.extend(example.tokens)
        self._starts.append(len(self._tokens))
        mask = np.asarray(example.supervised, dtype=bool)
        self._bits += np.packbits(mask).tobytes()
        self._bit_starts.append(len(self._bits))
        self._sources.append(source)
        self._last.append(int(mask.nonzero()[0].max(initial=-1)))

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        tokens = self._tokens[self._starts[index] : self._starts[index + 1]].tolist()
        bits = np.frombuffer(self._bits[self._bit_starts[index] : self._bit_starts[index + 1]], dtype=np.uint8)
        return Example(self.ids[index], tokens, np.unpackbits(bits, count=len(tokens)).astype(bool).tolist())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, ``[documents]`` int64."""
        return np.diff(np.array(self._starts))

    @property
    def sources(self) -> np.ndarray:
        """The number of each document's source, ``[documents]`` int16."""
        return np.array(self._sources)

    @property
    def nbytes(self) -> int:
        """What tokens, bits, offsets and source numbers take; ids come on top."""
        arrays = (self._tokens, self._starts, self._bit_starts, self._sources, self._last)
        return len(self._bits) + sum(a.itemsize * len(a) for a in arrays)

    def with_blocks(self) -> Corpus:
        """Only the documents in which a block fits (see :attr:`Example.has_block`)."""
        fits = np.array(self._last) >= 2
        if fits.all():
            return self
        kept = Corpus(self.weights)
        for index in fits.nonzero()[0].tolist():
            kept.append(self[index], self._sources[index])
        return kept

    def supervised_counts(self, vocabulary: int) -> np.ndarray:
        """How often the assistant wrote each token, ``[vocabulary]`` int64."""
        counts = np.zeros(vocabulary, dtype=np.int64)
        for example in self:
            own = np.asarray(example.tokens, dtype=np.int64)[np.asarray(example.supervised, dtype=bool)]
            np.add.at(counts, own, 1)
        return counts

    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) of the documents in their order, and of how they are drawn."""
        digest = hashlib.sha256(json.dumps([self.ids, self.weights]).encode())
        for values, kind in ((self._tokens, "<i4"), (self._starts, "<i8"), (self._sources, "<i2")):
            digest.update(np.array(values).astype(kind).tobytes())
        digest.update(self._bits)
        return digest.hexdigest()[:16]

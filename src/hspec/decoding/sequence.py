"""One request while it is being decoded, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from hspec.decoding.params import SamplingParams
from hspec.decoding.text import Detokeniser

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """A prompt as tokens, and what is asked of its continuation."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class Counters:
    """Of a request or of many: kept as sums, so that ratios pool."""

    steps: int = 0
    """Verification steps (without drafting: plain steps)."""
    emitted: int = 0
    """Tokens that those steps emitted; the token that the prefill yields is not among them."""
    reached: list[int] = field(default_factory=list)
    """How often draft position i (from 0) was tested."""
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean accepted length: tokens emitted a verification step, the bonus included. 0.0 before the first step."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Conditional acceptance rate by draft position: accepted there / reached there."""
        return [a / r for a, r in zip(self.accepted, self.reached, strict=True) if r]

    def count(self, accepted: int, rejected: bool, emitted: int) -> None:
        """One step: ``accepted`` drafts emitted, whether the next one was tested and failed, tokens emitted in all."""
        self.steps += 1
        self.emitted += emitted
        reached = accepted + rejected
        for counter, value in ((self.reached, reached), (self.accepted, accepted)):
            counter.extend([0] * (max(reached, len(self.reached)) - len(counter)))
            for i in range(value):
                counter[i] += 1

    def add(self, other: Counters) -> None:
        self.steps += other.steps
        self.emitted += other.emitted
        for mine, theirs in ((self.reached, other.reached), (self.accepted, other.accepted)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, n in enumerate(theirs):
                mine[i] += n


@dataclass(frozen=True)
class Result:
    """A finished answer."""

    text: str
    tokens: list[int]
    """Emitted tokens, an end-of-turn token included."""
    drafted: list[bool]
    """For each token, whether it was a draft that the target accepted."""
    finish_reason: FinishReason
    counters: Counters
    runs: list[int]
    """Tokens emitted by each verification step."""
    refused: list[list[int]] = field(default_factory=list, compare=False)
    """For each verification step the drafts that did not stand: the rest of a chain, or the alternatives that a tree had. Not part of
    the answer: behind a refused draft, rounding in a batch of another size may draw others."""


class Sequence:
    """The state of a running request. ``tokens`` ends with the anchor once the prompt has been run."""

    def __init__(self, request: Request, tokenizer: Any, eos_ids: frozenset[int]):
        self.request, self.params = request, request.params
        self.tokens: list[int] = []
        self.drafted: list[bool] = []
        self.runs: list[int] = []
        self.refused: list[list[int]] = []
        self.counters = Counters()
        self.finish_reason: FinishReason | None = None
        self.taps: Tensor | None = None
        """Tapped hidden states of the last token that the target has run, ``[taps, hidden]``."""
        self.text = Detokeniser(tokenizer, request.params.stop)
        self._eos_ids = frozenset() if request.params.ignore_eos else eos_ids

    @property
    def length(self) -> int:
        """Tokens before the anchor: what the target has run."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    def emit_first(self, token: int) -> None:
        self._emit(token, False)

    def emit_step(self, accepted: list[int], token: int, refused: list[int]) -> int:
        """Emit one step's accepted drafts and the target's token, up to where the request ends; returns how many.

        Args:
            refused: drafts behind the accepted ones, none of which stood. They count as one position reached, and only if the
                request did not end before it.
        """
        emitted = 0
        for i, new in enumerate([*accepted, token]):
            self._emit(new, i < len(accepted))
            emitted += 1
            if self.finish_reason is not None:
                break
        tested = refused if emitted > len(accepted) else []
        self.counters.count(min(emitted, len(accepted)), bool(tested), emitted)
        self.runs.append(emitted)
        self.refused.append(tested)
        return emitted

    def _emit(self, token: int, drafted: bool) -> None:
        self.tokens.append(token)
        self.drafted.append(drafted)
        if token in self._eos_ids:
            self.finish_reason = "stop"
            return
        self.text.push(token)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.params.max_tokens:
            self.finish_reason = "length"

    def result(self) -> Result:
        assert self.finish_reason is not None
        self.text.finish()
        return Result(self.text.text, self.tokens, self.drafted, self.finish_reason, self.counters, self.runs, self.refused)

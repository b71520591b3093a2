"""A conversation whose KV cache is kept over its turns."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hspec.decoding.engine import Drafter, Engine, Step
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.decoding.state import DecodingState
from hspec.errors import UsageError
from hspec.targets.target import Target
from hspec.targets.template import Message


class Session:
    """Messages so far, and the target's K/V of as many of their tokens as still agree with the next prompt."""

    def __init__(self, target: Target, drafter: Drafter | None = None, k: int | None = None, system: str | None = None):
        self.target = target
        self.engine = Engine(target, drafter, k, max_batch=1)
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.cached: list[int] = []
        """Tokens whose K/V lie in the cache."""
        self._state: DecodingState | None = None

    def ask(self, text: str, params: SamplingParams) -> Iterator[Step]:
        """Add a user turn and stream the answer; the conversation then includes both.

        If the caller stops listening, what was answered so far is kept as the answer; a turn that got no answer at all is
        taken back.

        Raises:
            UsageError: an empty turn, or a conversation that outgrew the target's context.
        """
        if not text.strip():
            raise UsageError("an empty message: type some text")
        prompt = self.target.template.encode([*self.messages, {"role": "user", "content": text}])
        request = Request(tuple(prompt), params)
        reuse = min(_common_prefix(self.cached, prompt), len(prompt) - 1)
        if self._state is not None and self._state.memory is not None:
            reuse = max(
                0, reuse - 1
            )  # what a drafter keeps of a token may depend on the one behind it, which may be another now
        state = self._room(len(prompt) + params.max_tokens, reuse)
        self.messages.append({"role": "user", "content": text})
        answer, tokens = "", []
        self.cached = prompt[:reuse]
        try:
            for step in self.engine.stream([request], state, reuse):
                answer += step.text
                tokens += step.tokens
                # Every emitted token but the last, the anchor, has been run.
                self.cached = [*prompt, *tokens[:-1]]
                yield step
        finally:
            if tokens:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _room(self, tokens: int, keep: int) -> DecodingState:
        """The state, grown to hold ``tokens`` with the first ``keep`` kept."""
        wanted = min(tokens, self.target.max_positions)
        if self._state is None or self._state.capacity < wanted + self.engine.staged:
            grown = self.engine.new_state(1, min(max(2 * wanted, 1024), self.target.max_positions))
            if self._state is not None:
                with torch.no_grad():
                    grown.copy_from(self._state, keep)
            self._state = grown
        self._state.set_length(0, keep)
        return self._state


def _common_prefix(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n

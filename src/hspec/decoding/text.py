"""From tokens to text as they come, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokeniser:
    """Incremental decoding: gives text only once it cannot change any more.

    A token may be part of a character, or change the spacing of its neighbour, so a few tokens are decoded again with each
    new one; text that ends in a replacement character waits for the rest of the character.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""
        """All that is decided so far, without a stop string or what follows it."""
        self.stopped = False
        self._tokens: list[int] = []
        self._decoded = 0  # tokens before this one are in `text`
        self._context = 0  # decoding starts here, so that spacing is right
        self._given = 0

    def push(self, token: int) -> None:
        """Add a token; sets :attr:`stopped` when a stop string is complete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._decoded])
        after = self._decode(self._tokens[self._context :])
        if after.endswith("\ufffd"):
            return
        self._append(after[len(before) :])
        if len(after) > len(before):  # a token without text (a special one) is no context: the next one's space needs a word
            self._context = self._decoded
        self._decoded = len(self._tokens)

    def finish(self) -> None:
        """No more tokens: what still waited is decided as it is."""
        if not self.stopped and self._decoded < len(self._tokens):
            before = self._decode(self._tokens[self._context : self._decoded])
            self._append(self._decode(self._tokens[self._context :])[len(before) :])
            self._decoded = len(self._tokens)

    def take(self, final: bool = False) -> str:
        """Text decided since the last call; holds back what may be the beginning of a stop string, unless ``final``."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._held_back()
        out = self.text[self._given : end]
        self._given = max(self._given, end)
        return out

    def _append(self, new: str) -> None:
        old = len(self.text)
        self.text += new
        longest = max((len(s) for s in self.stop), default=0)
        hits = [at for s in self.stop if (at := self.text.find(s, max(0, old - longest + 1))) >= 0]
        if hits:
            self.text, self.stopped = self.text[: min(hits)], True

    def _held_back(self) -> int:
        return max((n for s in self.stop for n in range(len(s) - 1, 0, -1) if self.text.endswith(s[:n])), default=0)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

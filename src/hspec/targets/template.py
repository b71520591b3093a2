"""The chat template: from messages to tokens, and which of those tokens the assistant wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hspec.errors import HSpecError, UsageError

Message = dict[str, str]


@dataclass
class ChatTemplate:
    """A tokenizer with its chat template.

    Args:
        tokenizer: a transformers tokenizer.
        prepend_bos: a token id to put before plain text, for tokenizers that do not do so themselves (Gemma as GGUF).
    """

    tokenizer: Any
    prepend_bos: int | None = None
    extra_eos: frozenset[int] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    """What the template is told besides the messages (``enable_thinking``, say); it ignores what it does not know."""

    @property
    def eos_ids(self) -> frozenset[int]:
        own = self.tokenizer.eos_token_id
        return self.extra_eos | (frozenset() if own is None else frozenset([own]))

    @property
    def hash(self) -> str:
        """SHA-256 of the template's text, 16 hex digits: a drafter trained under another one accepts less."""
        return hashlib.sha256((self.tokenizer.chat_template or "").encode()).hexdigest()[:16]

    def text(self, messages: Sequence[Message], generate: bool = True, tools: list[Any] | None = None) -> str:
        """Messages as text, ending where the assistant is to speak if ``generate``.

        Raises:
            UsageError: the tokenizer has no chat template.
            HSpecError: the template refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise UsageError("this target's tokenizer has no chat template: pass a plain prompt (--raw) instead")
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generate, tools=tools, **self.options
            )
        except Exception as error:  # jinja raises whatever the template's author chose
            raise HSpecError(f"the chat template refuses these messages: {error}") from error

    def encode(self, messages: Sequence[Message], generate: bool = True, tools: list[Any] | None = None) -> list[int]:
        return self.tokenizer(self.text(messages, generate, tools), add_special_tokens=False).input_ids

    def encode_plain(self, text: str) -> list[int]:
        ids = self.tokenizer(text).input_ids
        if self.prepend_bos is not None and ids[:1] != [self.prepend_bos]:
            ids = [self.prepend_bos, *ids]
        return ids

    def encode_supervised(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Tokens of a whole conversation, and for each whether the assistant wrote it (its end-of-turn token counts).

        Found by growing the conversation message by message: what an assistant message adds behind the generation
        prompt is its own. That needs a template whose text for a shorter conversation is a prefix of that for a longer.

        Raises:
            HSpecError: the template is not of that kind, so that the assistant's tokens cannot be told apart.
        """
        full = self.text(messages, generate=False)
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.text(messages[:i], generate=True), self.text(messages[: i + 1], generate=False)
            if not (full.startswith(after) and after.startswith(before)):
                raise HSpecError(
                    "the chat template does not mark where the assistant speaks (a longer conversation rewrites a "
                    "shorter one), so its tokens cannot be told apart for training: use a template that only appends"
                )
            spans.append((len(before), len(after)))
        encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
        mask = [any(start < e and b < end for b, e in spans) for start, end in encoded.offset_mapping]
        return encoded.input_ids, self._end_at_turn(encoded.input_ids, mask)

    def _end_at_turn(self, ids: list[int], mask: list[bool]) -> list[bool]:
        """Drop what a template prints behind the end-of-turn token (a newline): the model never writes it."""
        out = list(mask)
        for i in range(1, len(ids)):
            if mask[i] and ids[i - 1] in self.eos_ids and mask[i - 1]:
                j = i
                while j < len(ids) and mask[j]:
                    out[j] = False
                    j += 1
        return out

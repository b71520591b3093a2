"""From raw conversations to clean prompts: English, of a sensible length, no duplicates, a fixed held-out part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hspec.training.apportion import apportion
from hspec.training.conversations import Conversation

HELD_OUT_PER_MILLE = 30
"""Share of prompts that is never trained on. Chosen by hash, so the split never moves when data is added."""

_ENGLISH = re.compile(r"\b(the|of|and|to|is|in|for|with|what|how|you|that|this|write|are|can|please)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Prompt:
    """One user turn; ``id`` is the first 16 hex digits of the SHA-256 of its normalised text."""

    id: str
    text: str
    source: int = 0
    """Which of a job's sources it comes from."""

    @property
    def held_out(self) -> bool:
        return int(self.id[:8], 16) % 1000 < HELD_OUT_PER_MILLE


@dataclass
class CleaningReport:
    """How many were seen and why others were left out."""

    seen: int = 0
    kept: int = 0
    no_prompt: int = 0
    not_english: int = 0
    length: int = 0
    duplicate: int = 0


def normalised(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().lower()


def prompt_id(text: str) -> str:
    """The id of a prompt with this text."""
    return hashlib.sha256(normalised(text).encode()).hexdigest()[:16]


def choose(prompts: Sequence[Prompt], limit: int | None, weights: Sequence[float] | None) -> list[Prompt]:
    """The first ``limit`` prompts; with weights so many of each source, as far as it has them."""
    if limit is None:
        return list(prompts)
    if weights is None:
        return list(prompts[:limit])
    there = np.bincount([p.source for p in prompts], minlength=len(weights))
    left = apportion(limit, weights, there).tolist()
    chosen = []
    for prompt in prompts:
        if left[prompt.source]:
            left[prompt.source] -= 1
            chosen.append(prompt)
    return chosen


def clean_prompts(
    conversations: Iterable[Conversation],
    count_tokens: Callable[[str], int],
    min_tokens: int = 8,
    max_tokens: int = 512,
) -> tuple[list[Prompt], CleaningReport]:
    """Keep the distinct English first turns of ``min_tokens`` to ``max_tokens`` tokens, in a hash order.

    Near-duplicates (the same first 100 normalised characters, as shared prompt templates have) count as duplicates:
    otherwise the held-out part would contain what was trained on. The first one stands for all, even where its length leaves
    it out, so that other limits never bring in another of them. So a held-out prompt never begins like one that is trained on,
    from whatever source, if all sources come in one call. The order is that of the ids, so that a prefix of the list is a random
    sample, the same on every machine.
    """
    report = CleaningReport()
    kept: list[Prompt] = []
    met: set[str] = set()
    for conversation in conversations:
        report.seen += 1
        text = conversation.first_user_turn
        if text is None or not text.strip():
            report.no_prompt += 1
            continue
        text = text.strip()
        if not is_english(text):
            report.not_english += 1
            continue
        key = normalised(text)[:100]
        if key in met:
            report.duplicate += 1
            continue
        met.add(key)
        if not min_tokens <= count_tokens(text) <= max_tokens:
            report.length += 1
            continue
        kept.append(Prompt(prompt_id(text), text, conversation.source))
    prompts = sorted(kept, key=lambda prompt: prompt.id)
    report.kept = len(prompts)
    return prompts, report


def is_english(text: str) -> bool:
    """A cheap test that needs no model: nearly all ASCII, and some of the commonest English words."""
    sample = text[:2000]
    ascii_share = sum(character < "\x7f" for character in sample) / max(len(sample), 1)
    words = len(sample.split())
    return ascii_share > 0.95 and len(_ENGLISH.findall(sample)) >= max(1, words // 25)

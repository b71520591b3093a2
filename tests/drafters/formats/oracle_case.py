"""A drafter of the library ``speculators`` and the same checkpoint read by this project, on one target and one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hspec.drafters.checkpoint import load_drafter
from hspec.drafters.context import DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.heads.causal import LowRankHead
from hspec.drafters.heads.markov import MarkovHead
from hspec.targets.cache import KVView
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from tests.drafters.speculators_oracle import Oracle, make_inputs
from tests.tiny import tiny_tokenizer

TOLERANCE = 1e-4
LENGTH = 30
PREFIXES = (1, 3, 6, 7, 19)
"""Of one token, shorter than the window, as long, longer, much longer."""


def target_of(folder: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return Target(model, ChatTemplate(tiny_tokenizer()), str(folder)).prepare("plain")


@dataclass
class Sequence1:
    """One sequence, its tokens all of the draft vocabulary, so that a chain of drafts can follow it."""

    tokens: Tensor
    """``[1, LENGTH]``."""
    taps: Tensor
    """``[1, LENGTH, F, H]``."""
    draft_ids: Tensor
    """Draft id of every token, ``[1, LENGTH]``."""


def sequence_for(oracle: Oracle, seed: int = 5) -> Sequence1:
    tokens, taps = make_inputs(LENGTH, seed)
    ids = tokens % len(oracle.draft_ids)
    return Sequence1(oracle.draft_ids[ids], taps, ids)


def context_at(drafter: Drafter, sequence: Sequence1, anchors: Sequence[int]) -> DraftContext:
    """All of ``anchors`` as blocks of the sequence, with what the drafter keeps of it; behind that, NaN."""
    T, at = sequence.tokens.shape[1], torch.tensor(anchors)
    following = functional.pad(sequence.tokens[:, 1:], (0, 1))
    stop = max(anchors)
    # In two parts, as decoding does it; rows at an anchor or behind it must not matter.
    cut, memory = stop // 2, None
    kept: list[tuple[Tensor, Tensor]] = []
    for start, end in ((0, cut), (cut, stop)):
        if start < end:
            positions = torch.arange(start, end)[None]
            new = drafter.remember(sequence.taps[:, start:end], following[:, start:end], positions, memory)
            kept = [tuple(map(torch.cat, zip(a, b), (2, 2))) for a, b in zip(kept, new)] if kept else new  # type: ignore[misc]
            memory = KVView([k for k, _ in kept], [v for _, v in kept], (end,))
    behind = [[functional.pad(t, (0, 0, 0, T - stop), value=float("nan")) for t in pair] for pair in kept]
    view = KVView([k for k, _ in behind], [v for _, v in behind], (stop,))
    taps = sequence.taps[:, (at - 1).clamp_min(0)]
    return DraftContext(sequence.tokens[:, at], at[None], taps, KVView([], [], (stop,)), view)


def previous_at(sequence: Sequence1, anchors: Sequence[int], k: int) -> Tensor:
    """The true token before each slot, ``[1, N, k]``."""
    padded = functional.pad(sequence.tokens, (0, k))
    return torch.stack([padded[0, a : a + k] for a in anchors])[None]


@torch.no_grad()
def predicted(drafter: Drafter, sequence: Sequence1, anchors: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Training's path: all blocks in one pass. Logits ``[N, k, Vd]`` with what a low-rank head adds, and the confidence."""
    previous = previous_at(sequence, anchors, drafter.max_draft)
    context = context_at(drafter, sequence, anchors)
    if context.memory is not None:  # the masked positions of shorter prefixes may not hold NaN: 0 * NaN is NaN
        context.memory.keys[:] = [t.nan_to_num() for t in context.memory.keys]
        context.memory.values[:] = [t.nan_to_num() for t in context.memory.values]
    found = drafter.predict(context, previous)
    logits = drafter.base_logits(found.hidden)
    if found.features is not None:
        assert isinstance(drafter.causal, LowRankHead)
        logits = logits + drafter.causal.w2(found.features)
    if drafter.confidence is None:
        return logits, None
    seen = drafter.causal.embed(previous[0]) if isinstance(drafter.causal, MarkovHead) and drafter.confident_of_markov else None
    return logits, drafter.confidence(found.hidden, seen)


class Follower:
    """A chooser that drafts what the sequence has, and takes down the logits."""

    def __init__(self, ids: Tensor):
        self.ids = ids
        self.logits: list[Tensor] = []

    def __call__(self, slot: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        self.logits.append(logits)
        return self.ids[slot - 1 : slot], None

    def latent(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


def decoded(drafter: Drafter, sequence: Sequence1, anchor: int, k: int) -> Tensor:
    """Decoding's path: one block, walked slot by slot. Logits ``[k, Vd]``."""
    follower = Follower(functional.pad(sequence.draft_ids, (0, k))[0, anchor + 1 : anchor + 1 + k])
    drafter.propose(context_at(drafter, sequence, [anchor]), k, follower)
    return torch.cat(follower.logits)


def difference(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None and found.shape == expected.shape
    return float((found - expected).abs().max())


def load_same(oracle: Oracle) -> Drafter:
    return load_drafter(oracle.folder, target_of(oracle.target_folder))

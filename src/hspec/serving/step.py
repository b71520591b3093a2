"""One step of a served target, as a drafter sees it. Nothing here knows vLLM; what lasts between steps lies in its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hspec.decoding.draft_sampler import DraftSampler
from hspec.decoding.params import SamplingParams
from hspec.drafters.config import ParallelConfig
from hspec.drafters.context import Draft, DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.source import NOTHING, Around
from hspec.serving.flash import flash_view, vllm_kernel
from hspec.serving.memory import DrafterMemory
from hspec.serving.pages import PagedView, Pages, gathered_view
from hspec.serving.ranks import ALONE, Ranks
from hspec.serving.rows import DraftRow, draft_rows
from hspec.serving.sampling import draft_params


@dataclass(frozen=True)
class Step:
    """One step of the target over R requests, just sampled."""

    ids: Sequence[str]
    params: Sequence[Any]
    """``vllm.SamplingParams`` of each."""
    sampled: Sequence[Sequence[int]]
    """Tokens that each emitted; none where its prompt is not through."""
    drafted: Sequence[int]
    """Drafts of each that were put to the test."""
    query_ends: Sequence[int]
    """End of each one's rows in ``taps``."""
    lengths: Sequence[int]
    """Tokens of each in its pages, rejected drafts included."""
    known: Sequence[int]
    """Tokens of each so far, those just emitted included."""
    tables: Tensor
    """Block tables ``[R, n]``."""
    taps: Sequence[Tensor]
    """The tapped residual streams, ascending, ``[rows, hidden]`` each."""
    k: int
    """Drafts a request that the scheduler takes."""
    history: Callable[[int], list[int]]
    """All tokens of a request so far."""


@dataclass(frozen=True)
class Proposal:
    """Drafts for the R requests of a step, B of which got some."""

    tokens: list[list[int]]
    """Of each of the R."""
    probabilities: Tensor | None = None
    """What they were drawn from, over the target's vocabulary, ``[B, k, vocabulary]``; None where all are greedy."""
    ids: list[str] = field(default_factory=list)
    """The B, in the order of ``probabilities``."""


class StepDrafter:
    """Drafts for all requests of a step in one forward of a drafter.

    ``pages`` are those of the target's layers that it reads, ``memory`` is what it keeps itself, for one that does (None for
    others); the pages of both are set once they are there. Of several ranks, each has a drafter cut down to its share of heads.

    Args:
        around: what is put around the drafter. Lookup drafts up to k tokens as well: a server has room for no more.
    """

    def __init__(self, drafter: Drafter, k: int, ranks: Ranks = ALONE, around: Around = NOTHING):
        self.drafter, self.k, self.ranks = drafter, k, ranks
        self._proposes = around.put(drafter, longest_copy=k)
        self.pages = Pages()
        self.memory = None if drafter.memory_shape is None else DrafterMemory(drafter)

    @property
    def target_layers(self) -> set[int]:
        """The target's layers whose K/V the drafter reads."""
        config = self.drafter.config
        if not isinstance(config, ParallelConfig) or config.attention is None or config.attention.context != "target":
            return set()
        return set(config.kv_layers)

    def draft(self, step: Step) -> Proposal:
        """Draft behind every request that sampled a token; none for those still within their prompt."""
        rows = draft_rows(step.sampled, step.drafted, step.query_ends, step.lengths, step.known)
        drafts: list[list[int]] = [[] for _ in step.sampled]
        k = min(self.k, step.k)
        if not rows or k == 0:
            return Proposal(drafts)
        params = [draft_params(step.params[row.request]) for row in rows]
        draft = self._propose(step, rows, params, k)
        counts = draft.counts or (k,) * len(rows)
        for row, tokens, count in zip(rows, draft.tokens.tolist(), counts, strict=True):
            drafts[row.request] = tokens[: min(count, k)]
        return Proposal(drafts, self._over_vocabulary(draft), [step.ids[row.request] for row in rows])

    def _propose(self, step: Step, rows: Sequence[DraftRow], params: Sequence[SamplingParams], k: int) -> Draft:
        device = step.taps[0].device
        requests = torch.tensor([row.request for row in rows], device=device)
        hidden = torch.tensor([row.hidden for row in rows], device=device)
        positions = [row.position for row in rows]
        context = DraftContext(
            anchors=torch.tensor([[row.anchor] for row in rows], device=device),
            positions=torch.tensor(positions, device=device)[:, None],
            taps=torch.stack([tap[hidden] for tap in step.taps], dim=1)[:, None],  # [B, 1, taps, hidden]
            kv=_view(self.pages, step.tables[requests], positions),
            memory=None if self.memory is None else _view(self.memory.pages, step.tables[requests], positions),
            history=tuple(tuple(step.history(row.request)) for row in rows) if self._proposes.reads_history else None,
        )
        histories = [
            torch.tensor(sorted(set(step.history(row.request))), device=device) if p.repetition_penalty != 1.0 else None
            for row, p in zip(rows, params, strict=True)
        ]
        draft = self._proposes.propose(context, k, DraftSampler(params, positions, self.drafter.draft_ids, histories))
        return self.ranks.agree(draft)

    def _over_vocabulary(self, draft: Draft) -> Tensor | None:
        """``[B, k, draft vocabulary]`` -> ``[B, k, vocabulary]``."""
        q = draft.probabilities
        if q is None:
            return None
        full = q.new_zeros(*q.shape[:2], self.drafter.config.target.vocab_size)
        full[..., self.drafter.draft_ids] = q
        for row, certain in enumerate(draft.one_hot or ()):
            if certain:
                full[row].zero_().scatter_(1, draft.tokens[row, : full.shape[1], None], 1.0)
        return full


def _view(pages: Pages, tables: Tensor, lengths: Sequence[int]) -> PagedView:
    """``tables``: ``[B, n]``; of each sequence the positions before ``lengths[b]`` are valid."""
    if tables.device.type == "cuda":
        return flash_view(pages.layers, tables, lengths, vllm_kernel)
    return gathered_view(pages.layers, pages.layout, tables, lengths)

"""How drafts are picked from the drafter's logits: by argmax, or from its own processed distribution."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from hspec.decoding.params import SamplingParams
from hspec.decoding.processors import penalise, truncate
from hspec.decoding.randomness import Purpose, sample, uniform


class DraftSampler:
    """The chooser of one step (see :class:`hspec.drafters.context.Chooser`).

    Args:
        params: of each of the n requests.
        positions: of their anchors; the draft of slot j stands at position + j.
        draft_ids: target id of each draft id.
        histories: distinct tokens so far of each request that has a repetition penalty, else None.
    """

    def __init__(
        self,
        params: SequenceOf[SamplingParams],
        positions: SequenceOf[int],
        draft_ids: Tensor,
        histories: SequenceOf[Tensor | None],
    ):
        self.params, self.positions, self.draft_ids = params, positions, draft_ids
        self.penalised = [None if h is None else _to_draft(h, draft_ids) for h in histories]
        self.one_hot = all(p.drafts_greedily for p in params)

    def __call__(self, slot: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        if any(ids is not None for ids in self.penalised):
            logits = torch.stack([self._penalise(i, row) for i, row in enumerate(logits)])
        chosen = logits.argmax(-1)
        q = None
        if not self.one_hot:
            q = torch.zeros_like(logits)
            for i, params in enumerate(self.params):
                if params.drafts_greedily:
                    q[i, chosen[i]] = 1.0
                    continue
                q[i] = truncate(logits[i : i + 1] / params.temperature, params).softmax(-1)[0]
                u = uniform(params.seed, self.positions[i] + slot, Purpose.DRAFT)
                chosen[i] = sample(q[i : i + 1], torch.tensor([u], dtype=torch.float64, device=q.device))[0]
        for i, ids in enumerate(self.penalised):
            if ids is not None:
                self.penalised[i] = torch.cat((ids, chosen[i : i + 1]))
        return chosen, q

    def latent(self, logits: Tensor) -> Tensor:
        """A block's latent category: drawn from the drafter's own distribution, the likeliest where drafts are greedy.

        Whatever it is, drafts are tested against their distribution given it, so temperature and truncation have no part here.
        """
        chosen = logits.argmax(-1)
        for i, params in enumerate(self.params):
            if not params.drafts_greedily:
                u = uniform(params.seed, self.positions[i], Purpose.LATENT)
                chosen[i] = sample(logits[i : i + 1].softmax(-1), torch.tensor([u], dtype=torch.float64, device=logits.device))[
                    0
                ]
        return chosen

    def _penalise(self, i: int, row: Tensor) -> Tensor:
        ids = self.penalised[i]
        return row if ids is None else penalise(row, ids, self.params[i].repetition_penalty)


def _to_draft(ids: Tensor, draft_ids: Tensor) -> Tensor:
    """Those of ``ids`` that are in the draft vocabulary, as draft ids."""
    index = torch.searchsorted(draft_ids, ids).clamp_max(draft_ids.shape[0] - 1)
    return index[draft_ids[index] == ids]

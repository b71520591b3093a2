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
        alike: dict[tuple[float, int, float, float], list[int]] = {}
        for i, p in enumerate(params):
            if not p.drafts_greedily:
                alike.setdefault((p.temperature, p.top_k, p.top_p, p.min_p), []).append(i)
        self._alike = list(alike.values())
        """Requests that draw, those together whose distributions are processed alike."""

    def __call__(self, slot: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        if any(ids is not None for ids in self.penalised):
            logits = torch.stack([self._penalise(i, row) for i, row in enumerate(logits)])
        chosen = logits.argmax(-1)
        q = None
        if not self.one_hot:
            q = torch.zeros_like(logits).scatter_(1, chosen[:, None], 1.0)
            for rows in self._alike:
                params = self.params[rows[0]]
                q[rows] = truncate(logits[rows] / params.temperature, params).softmax(-1)
                chosen[rows] = self._draw(q[rows], rows, slot, Purpose.DRAFT)
        for i, ids in enumerate(self.penalised):
            if ids is not None:
                self.penalised[i] = torch.cat((ids, chosen[i : i + 1]))
        return chosen, q

    def latent(self, logits: Tensor) -> Tensor:
        """A block's latent category: drawn from the drafter's own distribution, the likeliest where drafts are greedy.

        Whatever it is, drafts are tested against their distribution given it, so temperature and truncation have no part here.
        """
        chosen = logits.argmax(-1)
        for rows in self._alike:
            chosen[rows] = self._draw(logits[rows].softmax(-1), rows, 0, Purpose.LATENT)
        return chosen

    def _draw(self, q: Tensor, rows: list[int], slot: int, purpose: Purpose) -> Tensor:
        """A token of each of some requests, ``[m, draft vocabulary]`` -> ``[m]``."""
        numbers = [uniform(self.params[i].seed, self.positions[i] + slot, purpose) for i in rows]
        return sample(q, torch.tensor(numbers, dtype=torch.float64, device=q.device))

    def _penalise(self, i: int, row: Tensor) -> Tensor:
        ids = self.penalised[i]
        return row if ids is None else penalise(row, ids, self.params[i].repetition_penalty)


def _to_draft(ids: Tensor, draft_ids: Tensor) -> Tensor:
    """Those of ``ids`` that are in the draft vocabulary, as draft ids."""
    index = torch.searchsorted(draft_ids, ids).clamp_max(draft_ids.shape[0] - 1)
    return index[draft_ids[index] == ids]

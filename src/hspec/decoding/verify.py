"""The acceptance rules: pure functions of target distributions, drafts and random numbers.

Sampling follows Leviathan et al. (2023) and Chen et al. (2023): accept d_i with probability min(1, p(d_i) / q(d_i)); at the
first rejection draw from max(p - q, 0), normalised; after k acceptances draw a bonus token from the last row. The emitted
tokens are then distributed exactly as if the target had drawn each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hspec.decoding.randomness import sample


@dataclass(frozen=True)
class Verdict:
    """Of one verification: how many drafts stand, and the token that the target puts after them."""

    accepted: int
    token: int

    @property
    def rows(self) -> list[int]:
        """Of ``[anchor, d_1 .. d_k]``, those that stand."""
        return list(range(self.accepted + 1))


def verify_greedy(target_tokens: list[int], drafts: list[int]) -> Verdict:
    """Accept the longest prefix that the target would have written itself.

    Args:
        target_tokens: the target's argmax after the anchor and after each draft, k + 1 of them.
        drafts: k draft tokens.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == target_tokens[accepted]:
        accepted += 1
    return Verdict(accepted, target_tokens[accepted])


def verify_sampled(
    p: Tensor,
    drafts: list[int],
    q: Tensor | None,
    draft_ids: Tensor | None,
    accept_u: list[float],
    draw_u: list[float],
) -> Verdict:
    """Accept drafts so that what is emitted is distributed as the target's own text.

    Args:
        p: the target's processed distributions, ``[k + 1, vocabulary]``; row i is for the token after i drafts.
        drafts: k draft tokens (target ids).
        q: what each was drawn from, over the draft vocabulary, ``[k, draft vocabulary]``; None where drafts are one-hot.
        draft_ids: target id of each draft id, for ``q``.
        accept_u, draw_u: numbers in [0, 1): k for the acceptances, k + 1 for the draw at each row.
    """
    for i, draft in enumerate(drafts):
        q_draft = 1.0 if q is None or draft_ids is None else float(q[i, torch.searchsorted(draft_ids, draft)])
        p_draft = float(p[i, draft])
        if accept_u[i] * q_draft < p_draft:
            continue
        rest = p[i].double().clone()
        if q is None or draft_ids is None:
            rest[draft] = 0.0
        else:
            rest[draft_ids] -= q[i].double()
            rest.clamp_min_(0.0)
        # Rounding can leave nothing where p and q agree to the last bit; a rejection then had probability 0 in exact
        # arithmetic, and any draw from p is right.
        return Verdict(i, _draw(rest if float(rest.sum()) > 0 else p[i], draw_u[i]))
    return Verdict(len(drafts), _draw(p[len(drafts)], draw_u[len(drafts)]))


def _draw(weights: Tensor, u: float) -> int:
    return int(sample(weights[None], torch.tensor([u], dtype=torch.float64, device=weights.device))[0])

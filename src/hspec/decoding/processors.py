"""Logit processors: every one acts on every verified row, with exactly the tokens accepted before that row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hspec.decoding.params import SamplingParams


def process(logits: Tensor, params: SamplingParams, history: Tensor | None, drafts: Sequence[int] = ()) -> Tensor:
    """Penalties, temperature and truncations, in the order that transformers applies them.

    Args:
        logits: ``[m, vocabulary]`` fp32; row i predicts the token after ``history + drafts[:i]``.
        history: distinct token ids of prompt and answer so far, ``[n]`` int64; only a repetition penalty needs it.

    Returns:
        Processed logits, same shape; what is truncated is -inf. At temperature 0 only penalties act.
    """
    if params.repetition_penalty != 1.0:
        assert history is not None
        logits = torch.stack(
            [
                penalise(row, torch.cat((history, history.new_tensor(list(drafts[:i])))), params.repetition_penalty)
                for i, row in enumerate(logits)
            ]
        )
    return logits if params.greedy else truncate(logits / params.temperature, params)


def penalise(row: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (Keskar et al., 2019) on ``[vocabulary]``; each id counts once however often it occurs."""
    row = row.clone()
    picked = row[ids]  # read before any is written: repeated ids do no harm
    row[ids] = torch.where(picked < 0, picked * penalty, picked / penalty)
    return row


NUCLEUS = (256, 4096)
"""How many of the likeliest tokens are looked at before all of them are sorted."""


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the tokens before which, from the likeliest on, there is less than ``top_p``; the likeliest is always kept.

    Few tokens mostly have all that is kept, and finding those takes a twentieth of a sort of 49,152 tokens.
    """
    p, width = logits.softmax(-1), logits.shape[-1]
    for count in (*(n for n in NUCLEUS if n < width), width):
        top, ids = p.topk(count, dim=-1)
        through = top.cumsum(-1)
        if count == width or bool((through[..., -1] >= top_p).all()):
            break
    kept = logits.gather(-1, ids).masked_fill(through - top >= top_p, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(-1, ids, kept)


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, then top-p, then min-p of ``[m, vocabulary]`` logits that have their temperature."""
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if params.top_p < 1.0:
        logits = _nucleus(logits, params.top_p)
    if params.min_p > 0.0:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p < params.min_p * p.max(-1, keepdim=True).values, float("-inf"))
    return logits

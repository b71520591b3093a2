"""Every processor, and all of them together, against transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hspec.decoding.params import SamplingParams
from hspec.decoding.processors import process, truncate

VOCABULARY = 61

CASES = [
    {"temperature": 0.7},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 500},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_p": 0.7, "min_p": 0.02, "repetition_penalty": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
]


def reference(ids: list[int], row: Tensor, params: SamplingParams) -> Tensor:
    """What transformers makes of one row of logits after the tokens ``ids``."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.greedy:
        chain.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            chain.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            chain.append(MinPLogitsWarper(params.min_p))
    return chain(torch.tensor([ids]), row[None])[0]


def random_case(seed: int) -> tuple[Tensor, list[int], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    k = seed % 8
    logits = 3 * torch.randn(k + 1, VOCABULARY, generator=generator)
    text = torch.randint(0, VOCABULARY, (20 + k,), generator=generator).tolist()
    return logits, text[:20], text[20:]


def distinct(ids: list[int]) -> Tensor:
    return torch.tensor(sorted(set(ids)))


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_equal_to_transformers(settings: dict[str, float]) -> None:
    params = SamplingParams(**settings)
    for seed in range(16):
        logits, history, drafts = random_case(seed)
        before = logits.clone()
        ours = process(logits, params, distinct(history), drafts)
        theirs = torch.stack([reference(history + drafts[:i], row, params) for i, row in enumerate(before)])
        assert torch.equal(ours, theirs)
        assert torch.equal(logits, before), "the logits themselves are not touched"
        assert torch.isfinite(ours).any(-1).all(), "something is always left"


def test_the_cases_truncate_and_penalise() -> None:
    """Otherwise the comparison above would show nothing."""
    logits, history, drafts = random_case(7)
    for settings in CASES:
        params = SamplingParams(**settings)
        out = process(logits, params, distinct(history), drafts)
        truncates = not params.greedy and (0 < params.top_k < VOCABULARY or params.top_p < 1 or params.min_p > 0)
        assert truncates == bool(torch.isinf(out).any())


def test_a_row_depends_on_the_drafts_before_it_only() -> None:
    params = SamplingParams(repetition_penalty=1.3)
    logits, _, _ = random_case(7)
    history, drafts = torch.arange(10), list(range(20, 27))
    plain = process(logits, params, history, drafts)
    for j in range(len(drafts)):
        changed = process(logits, params, history, [*drafts[:j], 50, *drafts[j + 1 :]])
        same = [torch.equal(a, b) for a, b in zip(plain, changed, strict=True)]
        assert same == [row <= j for row in range(8)], "row i sees d_1 .. d_i"


def test_a_penalised_token_counts_once() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    logits = torch.tensor([[4.0, -4.0, 1.0]] * 3)
    out = process(logits, params, torch.tensor([0]), [0, 1])
    assert out.tolist() == [[2.0, -4.0, 1.0], [2.0, -4.0, 1.0], [2.0, -8.0, 1.0]]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999, 1 - 1e-6])
@pytest.mark.parametrize("spread", [0.001, 1.0, 3.0, 20.0])
def test_a_nucleus_of_any_size(spread: float, top_p: float) -> None:
    """From one token to all 6,000, found among the likeliest or not: the rows' own definition, but for sums that touch ``top_p``."""
    scale = torch.tensor([spread, spread / 2, spread])[:, None]
    logits = torch.randn(3, 6000, generator=torch.Generator().manual_seed(1)) * scale
    cut = truncate(logits, SamplingParams(temperature=1.0, top_p=top_p))
    kept = ~cut.isinf()
    p, order = logits.double().softmax(-1).sort(dim=-1, descending=True)
    before = torch.zeros_like(p).scatter_(-1, order, p.cumsum(-1) - p)
    clear = (before - top_p).abs() > 1e-5
    assert torch.equal(kept[clear], (before < top_p)[clear])
    assert kept.any(-1).all() and torch.equal(cut[kept], logits[kept])

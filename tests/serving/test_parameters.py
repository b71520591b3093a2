"""Sampling parameters: with drafts as without. What vLLM cannot honour beside drafts it refuses at the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hspec import SamplingParams, load_drafter, load_target
from hspec.api import make_request
from hspec.decoding.engine import Engine
from hspec.decoding.processors import process
from tests.serving.engine import Job, K, Outcome, VllmEngine
from tests.test_real import PROMPTS

pytestmark = pytest.mark.serve

TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
}

GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence and frequency penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "stop string": {"stop": ["\n", "and"]},
    "stop token": {"stop_token_ids": [28, 30]},
    "bad words": {"bad_words": ["the", " of"]},
    "least length": {"min_tokens": 30},
    "allowed tokens": {"allowed_token_ids": list(range(0, 49152, 2))},
    "top-k, top-p": {"top_k": 5, "top_p": 0.7},
    "logprobs": {"logprobs": 3},
    "schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    "regular expression": {"structured_outputs": {"regex": "(yes|no), because [a-z ,]{20,60}\\."}},
    "choice": {"structured_outputs": {"choice": ["positive", "negative", "neither of them"]}},
}
"""At temperature 0 each must give the text that it gives without drafts."""

SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top-k": {"temperature": 0.9, "top_k": 20},
    "top-p": {"temperature": 0.9, "top_p": 0.9},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.2},
    "schema": {"temperature": 0.8, "structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    "several": {"temperature": 0.8, "n": 3},
}

REFUSED: dict[str, dict[str, Any]] = {"min-p": {"temperature": 1.0, "min_p": 0.1}, "logit bias": {"logit_bias": {5: 3.0}}}


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2")


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    return [list(make_request(target, prompt, SamplingParams()).prompt) for prompt in PROMPTS]


def greedy_jobs(prompts: list[list[int]]) -> list[Job]:
    return [
        Job(prompt, {"max_tokens": TOKENS} | params) for params in GREEDY.values() for prompt in prompts[:3]
    ]  # fmt: skip


def sampled_jobs(prompts: list[list[int]]) -> list[Job]:
    return [
        Job(prompt, {"max_tokens": TOKENS, "seed": 7 * i} | params)
        for params in SAMPLED.values()
        for i, prompt in enumerate(prompts[:2])
    ]  # fmt: skip


PAIRS = 1000
"""Continuations of two tokens whose frequencies are compared with the target's own distribution."""


@pytest.fixture(scope="module")
def plain(prompts) -> list[Outcome]:
    with VllmEngine(speculate=False) as engine:
        return engine.run(greedy_jobs(prompts))


@pytest.fixture(scope="module")
def engine(request) -> Iterator[VllmEngine]:
    """With drafts; started when the other has stopped, if that is wanted at all."""
    if any("plain" in item.fixturenames for item in request.session.items if item.module is request.module):
        request.getfixturevalue("plain")
    with VllmEngine(speculate=True, max_num_seqs=32, block_size=32) as started:
        yield started


def test_greedy_texts_are_the_same(prompts, plain, engine):
    served = engine.run(greedy_jobs(prompts))
    for i, name in enumerate(name for name in GREEDY for _ in range(3)):
        mine, theirs = served[i], plain[i]
        assert (mine.tokens, mine.text, mine.finish_reason) == (theirs.tokens, theirs.text, theirs.finish_reason), name
        assert [a.keys() for a in mine.logprobs] == [a.keys() for a in theirs.logprobs], name
        for ours, exact in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert ours == pytest.approx(exact, abs=2e-3), name
    for name in GREEDY:  # none of them switches drafting off
        own = [outcome for outcome, of in zip(served, (n for n in GREEDY for _ in range(3)), strict=True) if of == name]
        assert name == "choice" or any(max(outcome.lengths) > 1 for outcome in own), name


def test_seeded_texts_come_again(prompts, engine):
    first, again = engine.run(sampled_jobs(prompts)), engine.run(sampled_jobs(prompts))
    assert [outcome.runs for outcome in again] == [outcome.runs for outcome in first]
    for i, name in enumerate(name for name in SAMPLED for _ in range(2)):
        if name == "schema" and first[i].finish_reason == "stop":
            assert set(json.loads(first[i].text)) == {"name", "legs"}


def test_what_cannot_be_honoured_is_refused(prompts, engine):
    for outcome in engine.run([Job(prompts[0], params) for params in REFUSED.values()]):
        assert "not yet supported with speculative decoding" in (outcome.error or "")


def test_pairs_are_distributed_as_the_target_says(target, prompts, engine):
    """The second token comes out of a verification."""
    prompt, own = prompts[1], SamplingParams(temperature=1.0, top_k=6)
    jobs = [Job(prompt, {"temperature": 1.0, "top_k": 6, "max_tokens": 2, "ignore_eos": True}) for _ in range(PAIRS)]
    outcomes = engine.run(jobs)
    first = distribution(target, prompt, own)
    expected = {(a, b): p * q for a, p in first.items() for b, q in distribution(target, [*prompt, a], own).items()}
    seen = dict.fromkeys(expected, 0)
    for outcome in outcomes:
        seen[tuple(outcome.tokens)] += 1  # type: ignore[index]
    statistic = sum((seen[pair] - PAIRS * p) ** 2 / (PAIRS * p) for pair, p in expected.items() if PAIRS * p >= 5)
    cells = sum(PAIRS * p >= 5 for p in expected.values())
    assert cells > 8
    assert statistic < cells + 4 * (2 * cells) ** 0.5, (statistic, cells)  # chi-square: its mean and four deviations


def distribution(target: Any, tokens: list[int], params: SamplingParams) -> dict[int, float]:
    cache = target.new_cache(1, len(tokens))
    logits = target.logits(target.prefill(torch.tensor([tokens]), cache).hidden)[0]
    p = process(logits, params, None).softmax(-1)[0]
    return {int(i): float(p[i]) for i in p.nonzero()[:, 0]}


def test_acceptance_of_sampled_drafts_is_the_embedded_engines(target, prompts, engine, record_property):
    """Tau at temperature 1 over the same prompts; the two draw with different random numbers."""
    drafter = load_drafter(None, target)
    seeds = range(4)
    requests = [make_request(target, p, SamplingParams(max_tokens=48, temperature=1.0, seed=s)) for s in seeds for p in PROMPTS]
    results = Engine(target, drafter, K).generate(requests)
    embedded = [run for result in results for run in result.runs]
    jobs = [Job(prompt, {"temperature": 1.0, "seed": s, "max_tokens": 48}) for s in seeds for prompt in prompts]
    served = [length for outcome in engine.run(jobs) for length in outcome.lengths[1:]]
    means = [torch.tensor(values, dtype=torch.float64) for values in (embedded, served)]
    taus = [float(values.mean()) for values in means]
    noise = sum(float(values.var()) / len(values) for values in means) ** 0.5
    record_property("tau embedded, served, noise", (taus, noise))
    assert abs(taus[0] - taus[1]) < 0.02 * taus[0] + 2 * noise, (taus, noise)

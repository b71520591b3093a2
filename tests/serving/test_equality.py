"""At temperature 0 the served text is the target's own, and its drafts are those of the embedded engine, step for step."""

from __future__ import annotations

import pytest

import hspec.drafters.drafter as drafter_module
from hspec import SamplingParams, load_drafter, load_target
from hspec.api import make_request
from hspec.decoding.engine import Engine
from hspec.decoding.sequence import Result
from tests.serving.engine import Job, K, Outcome, VllmEngine
from tests.test_real import PROMPTS

pytestmark = pytest.mark.serve

TOKENS = 48
SHARED = "You are a patient teacher who answers every question in plain words, with an example where it helps. " * 14
"""About 280 tokens, so that two blocks of 128 are shared."""


@pytest.fixture(scope="module")
def embedded() -> dict[str, tuple[list[int], Result]]:
    """Prompt tokens and the embedded engine's answer by prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_module, "has_bf16_products", lambda *_: False)  # as in tests.serving.engine
        target = load_target("smollm2")
        drafter = load_drafter(None, target)
        prompts = [*PROMPTS, *(SHARED + prompt for prompt in PROMPTS[:6])]
        requests = [make_request(target, prompt, SamplingParams(max_tokens=TOKENS)) for prompt in prompts]
        results = Engine(target, drafter, K).generate(requests)
    return {p: (list(q.prompt), r) for p, q, r in zip(prompts, requests, results, strict=True)}


def compare(outcomes: list[Outcome], expected: list[Result]) -> None:
    assert [o.tokens for o in outcomes] == [r.tokens for r in expected]
    assert [o.lengths for o in outcomes] == [[1, *r.runs] for r in expected]


def jobs_of(embedded: dict[str, tuple[list[int], Result]], prompts: list[str], arrivals: int = 0) -> list[Job]:
    return [Job(embedded[prompt][0], {"max_tokens": TOKENS}, arrives=i * arrivals) for i, prompt in enumerate(prompts)]


def test_token_for_token_and_step_for_step(embedded):
    long = list(embedded)[20:]
    with VllmEngine(speculate=False) as engine:
        kv_tokens = engine.kv_tokens
        plain = engine.run(jobs_of(embedded, PROMPTS))
    with VllmEngine(speculate=True) as engine:
        assert engine.kv_tokens == kv_tokens  # the drafter has no KV group, and reserves nothing ahead
        served = engine.run(jobs_of(embedded, PROMPTS))
        assert [o.tokens for o in served] == [o.tokens for o in plain]
        compare(served, [embedded[p][1] for p in PROMPTS])

        staggered = engine.run(jobs_of(embedded, PROMPTS, arrivals=3))
        compare(staggered, [embedded[p][1] for p in PROMPTS])

        hits = engine.metrics()["vllm:prefix_cache_hits"]
        for prompt in long:  # one after the other: each but the first finds the shared blocks
            compare(engine.run(jobs_of(embedded, [prompt])), [embedded[prompt][1]])
        assert engine.metrics()["vllm:prefix_cache_hits"] - hits >= 256 * (len(long) - 1)

        aborted = [
            Job(job.prompt, job.params, job.arrives, aborted_at=5 + i if i % 2 else None)
            for i, job in enumerate(jobs_of(embedded, PROMPTS, arrivals=1))
        ]
        outcomes = engine.run(aborted)
        for i, (outcome, prompt) in enumerate(zip(outcomes, PROMPTS, strict=True)):
            tokens = embedded[prompt][1].tokens
            assert outcome.tokens == tokens[: len(outcome.tokens)]
            assert i % 2 or len(outcome.tokens) == len(tokens)


def test_chunked_prefill_and_preemption(embedded):
    long = list(embedded)[20:]
    settings = {"max_num_batched_tokens": 96, "block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 512}
    with VllmEngine(speculate=True, **settings) as engine:
        mixed = [*long, *PROMPTS[:8]]
        outcomes = engine.run(jobs_of(embedded, mixed, arrivals=1))
        assert engine.metrics()["vllm:num_preemptions"] > 0
    assert [o.tokens for o in outcomes] == [embedded[p][1].tokens for p in mixed]
    # A step whose rows do not fit in what is left of the 96 tests fewer drafts, so only the text must be the same.


def test_fewer_drafts_under_load(embedded):
    """Requests that come and go: none drafts while four run, two while two or three do, and all as before when one is alone."""
    with VllmEngine(speculate=True, drafts_at="2:2,4:0") as engine:
        outcomes = engine.run(jobs_of(embedded, PROMPTS[:8], arrivals=6))
        (alone,) = engine.run(jobs_of(embedded, PROMPTS[:1]))
    assert [o.tokens for o in outcomes] == [embedded[p][1].tokens for p in PROMPTS[:8]]
    counts = {len(drafts) for o in outcomes for drafts in o.drafts}
    assert counts >= {0, 2, 4} and max(counts) == 4
    compare([alone], [embedded[PROMPTS[0]][1]])


def test_greedy_requests_are_undisturbed_by_sampled_neighbours(embedded):
    jobs = [
        Job(job.prompt, {"max_tokens": TOKENS} | ({"temperature": 0.5 + 0.05 * i, "seed": i, "top_p": 0.9} if i % 2 else {}))
        for i, job in enumerate(jobs_of(embedded, PROMPTS))
    ]
    with VllmEngine(speculate=True) as engine:
        outcomes = engine.run(jobs)
        again = engine.run(jobs)
        assert engine.expand() == pytest.approx([0.7, 0.7, 1.0, 1.0, 1.0])  # stock vLLM gives uninitialised memory
    compare(outcomes[::2], [embedded[p][1] for p in PROMPTS[::2]])
    assert [o.tokens for o in again] == [o.tokens for o in outcomes]  # seeded

"""Drafters that keep K/V of their own, in vLLM's pages: drafts are those of the embedded engine whatever becomes of the blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hspec.drafters.checkpoint import save_drafter
from hspec.drafters.config import MarkovConfig, ParallelConfig
from hspec.drafters.methods import configuration
from hspec.targets.target import Target
from hspec.training.examples import Example
from tests.serving.engine import Job
from tests.serving.served import check_drafts, compare, serve, taught
from tests.serving.taught import SLOTS, prompts
from tests.tiny import tiny_config, tiny_drafter

pytestmark = pytest.mark.serve

ATTENTION = {"context": "features", "heads": 2, "kv_heads": 1, "head_dim": 64, "window": 17, "causal_block": False}


def test_dspark_step_for_step(tmp_path: Path) -> None:
    served = serve(tmp_path, taught("dspark"))
    expected = served.embedded()
    assert [r.tokens for r in expected] == [r.tokens for r in served.embedded(draft=False)]
    assert sum(r.counters.tau for r in expected) > 1.3 * len(expected)  # some drafts stand, some do not
    with served.engine(max_num_batched_tokens=64) as engine:
        assert engine.kv_tokens == served.kv_tokens()
        outcomes = engine.run(served.jobs())
        compare(outcomes, expected)  # prompts in chunks, staggered
        assert check_drafts(served, served.prompts, outcomes) > 100

        hits = engine.metrics()["vllm:prefix_cache_hits"]
        longest = max(served.prompts, key=len)
        shared = [[*longest[:75], 8 + i] for i in range(3)]
        for prompt, result in zip(shared, served.embedded(shared), strict=True):
            compare(engine.run(served.jobs([prompt])), [result])
        assert engine.metrics()["vllm:prefix_cache_hits"] - hits >= 64 * len(shared)

        jobs = [Job(j.prompt, j.params, i, aborted_at=4 + i if i % 2 else None) for i, j in enumerate(served.jobs())]
        for i, (outcome, result) in enumerate(zip(engine.run(jobs), expected, strict=True)):
            assert outcome.tokens == result.tokens[: len(outcome.tokens)]
            assert i % 2 or outcome.lengths == [1, *result.runs]

        # One is at the end of its context: vLLM asks for no drafts of anybody then, and what the others ran meanwhile is not missing.
        asked = [served.prompts[2], prompts((244,), seed=1)[0], served.prompts[5]]
        jobs = [Job(j.prompt, j.params | ({"max_tokens": 12} if i == 1 else {}), i) for i, j in enumerate(served.jobs(asked))]
        outcomes = engine.run(jobs)
        assert outcomes[0].tokens == expected[2].tokens and outcomes[2].tokens == expected[5].tokens
        assert all(len(o.drafts) < len(o.runs) - 2 for o in outcomes)
        assert check_drafts(served, asked, outcomes) > 20


def test_preemption(tmp_path: Path) -> None:
    served = serve(tmp_path, taught("dspark", head={"kind": "markov", "rank": 8, "variant": "recurrent"}))
    asked = served.prompts * 2
    with served.engine(max_num_batched_tokens=96, num_gpu_blocks_override=14) as engine:
        outcomes = engine.run(served.jobs(asked, arrivals=1))
        assert engine.metrics()["vllm:num_preemptions"] > 0
    expected = served.embedded(draft=False)
    assert [o.tokens for o in outcomes] == [r.tokens for r in expected] * 2
    assert check_drafts(served, asked, outcomes) > 100


def test_heads_of_another_shape_than_the_targets(tmp_path: Path) -> None:
    """The drafter's layers have smaller pages, in the same KV group."""

    def make(target: Target, texts: list[Example], folder: Path) -> None:
        base = configuration("dspark", tiny_config(target, block_size=SLOTS + 1, head=MarkovConfig(rank=8, variant="gated")))
        config = ParallelConfig.model_validate(
            base.model_dump()
            | {"pattern": ["attention", "mlp"], "kv_layers": [3], "attention": {**ATTENTION, "rope": [base.attention.rope[0]]}}
        )
        save_drafter(tiny_drafter(target, config=config), folder)

    served = serve(tmp_path, make, "qwen3")
    with served.engine(max_num_batched_tokens=64) as engine:
        assert engine.kv_tokens == served.kv_tokens()
        outcomes = engine.run(served.jobs())
    compare(outcomes, served.embedded())
    assert check_drafts(served, served.prompts, outcomes) > 100


def test_heads_that_vllm_has_no_pages_for(tmp_path: Path) -> None:
    def make(target: Target, texts: list[Example], folder: Path) -> None:
        base = configuration("dspark", tiny_config(target, block_size=SLOTS + 1))
        attention = {**base.attention.model_dump(), "head_dim": 48}
        save_drafter(
            tiny_drafter(target, config=ParallelConfig.model_validate(base.model_dump() | {"attention": attention})), folder
        )

    served = serve(tmp_path, make)
    with (
        pytest.raises(RuntimeError, match="keeps K/V of heads 48 wide, and the attention backend CPU_ATTN has 32, 64, "),
        served.engine(),
    ):
        pass


def test_dflash_through_the_plugin(tmp_path: Path) -> None:
    served = serve(tmp_path, taught("dflash"))
    with served.engine(max_num_batched_tokens=64) as engine:
        assert engine.kv_tokens == served.kv_tokens()
        outcomes = engine.run(served.jobs())
        compare(outcomes, served.embedded())
        sampled = [
            Job(j.prompt, j.params | {"temperature": 0.8, "seed": 3} if i % 2 else j.params)
            for i, j in enumerate(served.jobs())
        ]
        mixed = engine.run(sampled)
        assert [o.tokens for o in mixed[::2]] == [r.tokens for r in served.embedded()[::2]]
        assert check_drafts(served, served.prompts[::2], mixed[::2]) > 50

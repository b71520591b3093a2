"""Drafters that keep K/V of their own, in vLLM's pages: drafts are those of the embedded engine whatever becomes of the blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from hspec import SamplingParams
from hspec.decoding.engine import Engine
from hspec.decoding.sequence import Request, Result
from hspec.drafters.checkpoint import load_drafter, save_drafter
from hspec.drafters.config import MarkovConfig, ParallelConfig
from hspec.drafters.drafter import Drafter
from hspec.drafters.methods import configuration
from hspec.targets.target import Target
from hspec.training.examples import Example
from tests.serving.engine import Job, Outcome, VllmEngine
from tests.serving.taught import SLOTS, answers, from_scratch, prompts, teach
from tests.tiny import tiny_config, tiny_drafter, tiny_target

pytestmark = pytest.mark.serve

TOKENS, BLOCK = 40, 32
LENGTHS = (5, 40, 70, 33, 100, 12)
ATTENTION = {"context": "features", "heads": 2, "kv_heads": 1, "head_dim": 64, "window": 17, "causal_block": False}
SPACE = 1 << 30
"""Bytes of KV cache that every engine here has."""


@dataclass(frozen=True)
class Served:
    """A target and a drafter of it, as files and in the embedded engine."""

    folders: tuple[str, str]
    target: Target
    drafter: Drafter
    prompts: list[list[int]]

    def embedded(self, asked: list[list[int]] | None = None, draft: bool = True) -> list[Result]:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        engine = Engine(self.target, self.drafter, SLOTS) if draft else Engine(self.target)
        return engine.generate([Request(tuple(p), params) for p in asked or self.prompts])

    def jobs(self, asked: list[list[int]] | None = None, arrivals: int = 2) -> list[Job]:
        settings = {"max_tokens": TOKENS, "ignore_eos": True}
        return [Job(p, settings, arrives=arrivals * i) for i, p in enumerate(asked or self.prompts)]

    def engine(self, **settings: Any) -> VllmEngine:
        return VllmEngine(True, self.folders, **({"max_model_len": 256, "block_size": BLOCK} | settings))

    def kv_tokens(self) -> int:
        """That fit into the space with the drafter's layers beside the target's."""
        own, theirs = self.drafter.memory_shape, self.target.cache_shape
        assert own is not None
        block = sum(BLOCK * s.layers * s.kv_heads * s.head_dim * 2 * 4 for s in (own, theirs))
        return SPACE // block * BLOCK


Make = Callable[[Target, list[Example], Path], None]
"""Saves a drafter of a target, for which these are its own answers, to a folder."""


def serve(folder: Path, make: Make, family: Literal["llama", "qwen3"] = "llama") -> Served:
    target = tiny_target(family, head_dim=32, linears="plain")  # vLLM's CPU attention has no smaller heads
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    asked = prompts(LENGTHS)
    make(target, answers(target, asked, TOKENS), folder / "drafter")
    drafter = load_drafter(folder / "drafter", target).prepare(half=False)
    return Served((str(folder / "target"), str(folder / "drafter")), target, drafter, asked)


def taught(method: str, **changes: Any) -> Make:
    return lambda target, texts, folder: teach(target, method, texts, folder, **changes)


def compare(outcomes: list[Outcome], expected: list[Result]) -> None:
    assert [o.tokens for o in outcomes] == [r.tokens for r in expected]
    assert [o.lengths for o in outcomes] == [[1, *r.runs] for r in expected]


def check_drafts(served: Served, asked: list[list[int]], outcomes: list[Outcome]) -> int:
    """Every draft is that of a memory which is made at once of all tokens before it; returns how many there were."""
    count = 0
    for prompt, outcome in zip(asked, outcomes, strict=True):
        tokens = [*prompt, *outcome.tokens]
        for known, drafts in zip(outcome.drafted_at, outcome.drafts, strict=True):
            if known <= len(tokens):  # behind the last step that counts nothing is known
                assert drafts == from_scratch(served.target, served.drafter, tokens[:known], SLOTS)
                count += 1
    return count


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

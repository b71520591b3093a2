"""A target whose heads are spread over ranks: the drafter's are spread alike, and everything is as with one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.engine import Job, Outcome
from tests.serving.served import Served, check_drafts, compare, serve, taught

pytestmark = pytest.mark.serve


def mixed(served: Served) -> list[Job]:
    """Every other request samples: one with a seed, the next without."""
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3, "top_p": 0.9}, {}, {"temperature": 0.8}]
    return [Job(j.prompt, j.params | changes[i % 4], j.arrives) for i, j in enumerate(served.jobs())]


def texts(outcomes: list[Outcome]) -> list[list[int]]:
    return [o.tokens for o in outcomes]


@pytest.mark.parametrize(
    "ranks, shape",
    [
        (2, {"kv_heads": 2}),
        (2, {"kv_heads": 1, "tie_word_embeddings": True}),  # both ranks have the one KV head
        (3, {"hidden": 96, "heads": 6, "kv_heads": 3, "vocab": 185}),  # vLLM pads to 192 tokens, which 3 divides
    ],
)
def test_served_as_by_one_rank(tmp_path: Path, ranks: int, shape: dict[str, Any]) -> None:
    served = serve(tmp_path, taught("hspec"), layers=4, **shape)
    expected = served.embedded()
    assert [r.tokens for r in expected] == [r.tokens for r in served.embedded(draft=False)]
    assert sum(r.counters.tau for r in expected) > 1.3 * len(expected)  # some drafts stand, some do not
    spread = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 64}
    with served.engine(speculate=False, **spread) as engine:
        kv_tokens = engine.kv_tokens
        plain = texts(engine.run(served.jobs()))
    with served.engine(**spread) as engine:
        assert engine.kv_tokens == kv_tokens  # nothing is kept for a token, on any rank
        outcomes = engine.run(served.jobs())
        assert texts(outcomes) == plain
        compare(outcomes, expected)  # prompts in chunks, staggered
        assert check_drafts(served, served.prompts, outcomes) > 60

        outcomes = engine.run(mixed(served))
        compare(outcomes[::2], expected[::2])
        again = engine.run(mixed(served))
        assert texts(again)[1::4] == texts(outcomes)[1::4]  # seeded


def test_a_drafter_that_keeps_something(tmp_path: Path) -> None:
    """Its own layers are spread too."""
    served = serve(tmp_path, taught("dspark"), layers=4)
    with served.engine(tensor_parallel_size=2, max_num_batched_tokens=64) as engine:
        assert engine.kv_tokens == served.kv_tokens(ranks=2)  # each has the space, for half of the heads
        outcomes = engine.run(served.jobs())
    compare(outcomes, served.embedded())
    assert check_drafts(served, served.prompts, outcomes) > 60

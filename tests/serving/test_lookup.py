"""Prompt lookup before the drafter on the real engine: step for step the embedded one, with as much room for tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from hspec.drafters.source import Around
from tests.serving.engine import Job
from tests.serving.served import compare, serve, taught

pytestmark = pytest.mark.serve


def test_step_for_step(tmp_path: Path) -> None:
    served = serve(tmp_path, taught("hspec"))
    asked = [[*p, *p[: len(p) // 2]] for p in served.prompts[:4]] + served.prompts[4:]
    expected, without = served.embedded(asked, around=Around(lookup=True)), served.embedded(asked)
    assert [r.tokens for r in expected] == [r.tokens for r in served.embedded(asked, draft=False)]
    assert [r.runs for r in expected] != [r.runs for r in without]
    with served.engine(max_num_batched_tokens=64, around=Around(lookup=True)) as engine:
        assert engine.kv_tokens == served.kv_tokens()
        outcomes = engine.run(served.jobs(asked))
        compare(outcomes, expected)
        assert any(0 < len(drafts) < 4 for o in outcomes for drafts in o.drafts), "a copy ends where the text does"

        jobs = served.jobs(asked)  # some draw, beside others that do not
        mixed = [
            Job(j.prompt, j.params | ({"temperature": 0.7, "seed": 5} if i % 2 else {}), 2 * i) for i, j in enumerate(jobs)
        ]
        first, again = engine.run(mixed), engine.run(mixed)
        assert [o.tokens for o in first] == [o.tokens for o in again]
        compare(first[::2], expected[::2])

"""A drafter that stops where it doubts, on the real engine: step for step the embedded one, with as much room for tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from hspec.drafters.source import Around
from tests.serving.engine import Job
from tests.serving.served import compare, serve, taught

pytestmark = pytest.mark.serve


def test_step_for_step(tmp_path: Path) -> None:
    served = serve(tmp_path, taught("hspec"))
    around = Around(least=0.5)
    expected, always = served.embedded(around=around), served.embedded()
    assert [r.tokens for r in expected] == [r.tokens for r in always] == [r.tokens for r in served.embedded(draft=False)]
    tested = [sum(sum(r.counters.reached) for r in results) for results in (expected, always)]
    assert 0 < tested[0] < tested[1], "some drafts are left out, not all"
    with served.engine(max_num_batched_tokens=64, around=around) as engine:
        assert engine.kv_tokens == served.kv_tokens()
        outcomes = engine.run(served.jobs())
        compare(outcomes, expected)
        assert len({len(drafts) for o in outcomes for drafts in o.drafts}) > 1

        mixed = [  # some draw, beside others that do not
            Job(j.prompt, j.params | ({"temperature": 0.7, "seed": 5} if i % 2 else {}), 2 * i)
            for i, j in enumerate(served.jobs())
        ]
        first, again = engine.run(mixed), engine.run(mixed)
        assert [o.tokens for o in first] == [o.tokens for o in again]
        compare(first[::2], expected[::2])

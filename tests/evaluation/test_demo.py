"""The numbers of the demo, from known times, and from a real run on a tiny target."""

from __future__ import annotations

from pathlib import Path

import pytest

from hspec.decoding.engine import Step
from hspec.decoding.sequence import Counters, Result
from hspec.evaluation import demo
from hspec.evaluation.demo import Comparison, Report, Timed
from hspec.targets.sources import load_reference
from tests.saved import loaded, save_target
from tests.tiny import tiny_drafter


def timed(tokens: list[int], steps: int, seconds: float, reached: list[int], accepted: list[int]) -> Timed:
    counters = Counters(steps, len(tokens) - 1, reached, accepted)
    return Timed(Result("", tokens, [False] * len(tokens), "stop", counters, []), seconds)


def comparison(reference: list[int] | None = None, plain: list[int] | None = None) -> Comparison:
    tokens = list(range(21))
    return Comparison(
        "p", timed(tokens, 10, 2.0, [10, 6], [6, 4]), timed(plain or tokens, 20, 4.0, [], []), reference or tokens, 8.0
    )


def test_numbers() -> None:
    other = Comparison("q", timed([1] * 11, 10, 2.0, [10], [0]), timed([1] * 11, 10, 2.0, [], []), [1] * 11, 4.0)
    numbers = Report([comparison(), other]).numbers()
    assert (numbers["tokens"], numbers["steps"]) == (30, 20)
    assert numbers["tau"] == pytest.approx(1.5)
    assert numbers["acceptance"] == pytest.approx([6 / 20, 4 / 6])
    assert numbers["ms_per_token"] == pytest.approx(1e3 * 4 / 30)
    assert numbers["ms_per_token_ar"] == pytest.approx(1e3 * 6 / 30)
    assert numbers["ms_per_token_transformers"] == pytest.approx(1e3 * 12 / 30)
    assert numbers["cycle"] == pytest.approx((4 / 20) / (6 / 30))
    assert numbers["speedup"] == pytest.approx(1.5) and numbers["speedup_transformers"] == pytest.approx(3.0)
    assert numbers["speedup"] == pytest.approx(numbers["tau"] / numbers["cycle"])
    assert numbers["identical"] is True


@pytest.mark.parametrize("which", ["plain", "reference"])
def test_one_different_text_is_not_identical(which: str) -> None:
    different = [*range(20), 99]
    one = comparison(plain=different) if which == "plain" else comparison(reference=different)
    assert Report([comparison(), one, comparison()]).numbers()["identical"] is False
    shorter = comparison(reference=list(range(20)))
    assert Report([shorter]).numbers()["identical"] is False


def test_answers_of_one_token_have_no_times() -> None:
    one = Comparison("p", timed([5], 0, 0.0, [], []), timed([5], 0, 0.0, [], []), [5], 0.0)
    numbers = Report([one]).numbers()
    assert numbers["tokens"] == 0 and numbers["speedup"] == numbers["tau"] == numbers["cycle"] == 0.0
    assert numbers["identical"] is True


@pytest.mark.parametrize("max_tokens", [1, 12, 500])
def test_a_run_gives_one_text_three_ways(tmp_path: Path, max_tokens: int) -> None:
    folder = save_target(tmp_path / "t", max_positions=140)
    target, (reference, _) = loaded(folder), load_reference(str(folder))
    seen: list[tuple[int, str, Step]] = []
    report = demo.run(target, tiny_drafter(target), reference, 3, max_tokens, lambda *step: seen.append(step))
    assert report.numbers()["identical"] is True
    assert [c.prompt for c in report.comparisons] == list(demo.PROMPTS)
    for index, c in enumerate(report.comparisons):
        assert len(c.reference_tokens) == len(c.plain.result.tokens) <= max_tokens
        for kind, result in (("h-spec", c.drafted.result), ("plain", c.plain.result)):
            steps = [s for i, k, s in seen if (i, k) == (index, kind)]
            assert "".join(s.text for s in steps) == result.text

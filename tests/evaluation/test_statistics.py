"""Intervals against scipy and against simulated truth; pairing; seeds; how many prompts are needed."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hspec.errors import HSpecError
from hspec.evaluation.statistics import Estimate, Resampling, in_words, prompts_needed, verdict


def answers(
    rng: np.random.Generator, prompts: int, tau: float, hardness: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and steps of answers of various lengths; a prompt's own tau varies around ``tau``, hard ones have less."""
    steps = rng.integers(20, 120, prompts).astype(float)
    own = tau * np.exp((0 if hardness is None else hardness) + rng.normal(0, 0.05, prompts))
    return np.round(steps * own), steps


def test_pooled_is_not_the_mean_of_ratios() -> None:
    """Pooled: 310 tokens in 110 steps. The mean of the two prompts' own taus, 1 and 3, is what it is not."""
    emitted, steps = np.array([10.0, 300.0]), np.array([10.0, 100.0])
    tau = Resampling(10).ratio("t", "m", emitted, steps)
    assert tau.value == pytest.approx(310 / 110)
    assert float(np.mean(emitted / steps)) == pytest.approx(2.0) and tau.value > 2.8


def test_against_scipy() -> None:
    rng = np.random.default_rng(1)
    emitted, steps = answers(rng, 60, 2.0, rng.normal(0, 0.2, 60))
    ours = Resampling().ratio("t", "m", emitted, steps)

    def pooled(index: np.ndarray, axis: int = -1) -> np.ndarray:
        return emitted[index].sum(axis) / steps[index].sum(axis)

    theirs = stats.bootstrap(
        (np.arange(60),), pooled, n_resamples=10_000, method="percentile", vectorized=True, rng=np.random.default_rng(2)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.interval == pytest.approx((theirs.low, theirs.high), abs=0.05 * width)
    assert ours.samples.std() == pytest.approx(width / 3.92, rel=0.05)


def test_intervals_cover_the_truth() -> None:
    """Of 400 worlds with a known quotient of taus, about 95 % of the intervals hold it, and their verdicts rarely err."""
    rng = np.random.default_rng(3)
    hits = wrong = 0
    for world in range(400):
        hardness = rng.normal(0, 0.3, 60)
        a, b = answers(rng, 60, 2.1, hardness), answers(rng, 60, 2.0, hardness)
        resampling = Resampling(400, seed=world)
        ratio = resampling.ratio("t", "a", *a) / resampling.ratio("t", "b", *b)
        hits += ratio.low <= 2.1 / 2.0 <= ratio.high
        wrong += verdict(ratio) == "behind"
    assert 0.91 <= hits / 400 <= 0.975
    assert wrong == 0


def test_pairing_narrows_and_order_turns_round() -> None:
    rng = np.random.default_rng(4)
    hardness = rng.normal(0, 0.3, 80)
    a, b = answers(rng, 80, 2.2, hardness), answers(rng, 80, 2.0, hardness)
    resampling = Resampling(2000)
    taus = resampling.ratio("t", "a", *a), resampling.ratio("t", "b", *b)
    paired = taus[0] / taus[1]
    apart = taus[0] / Resampling(2000, seed=9).ratio("t", "b", *b)
    assert paired.value == apart.value
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)
    assert (verdict(paired), verdict(taus[1] / taus[0])) == ("ahead", "behind")
    assert verdict(apart) == "level", "the same data, and nothing to be told without pairs"


ROWS = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 100)), min_size=2, max_size=20)
"""Of prompts: tokens and steps."""


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, seeds=st.integers(1, 4))
def test_a_method_against_itself_is_one(rows: list[tuple[int, int]], seeds: int) -> None:
    emitted, steps = (np.tile(column, (seeds, 1)) for column in np.array(rows, dtype=float).T)
    emitted = emitted * np.arange(1, seeds + 1)[:, None]
    one, again = (Resampling(50).ratio("t", "a", emitted, steps) for _ in range(2))
    assert (one / again).interval == (1.0, 1.0) and verdict(one / again) == "level"


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, other=st.integers(1, 9))
def test_turned_round(rows: list[tuple[int, int]], other: int) -> None:
    """The second against the first is the inverse of the first against the second, draw by draw."""
    emitted, steps = np.array(rows, dtype=float).T
    a, b = Resampling(50).ratio("t", "a", emitted, steps), Resampling(50).ratio("t", "b", emitted[::-1] + other, steps)
    assert np.allclose((a / b).samples * (b / a).samples, 1)
    opposite = {"ahead": "behind", "behind": "ahead", "level": "level"}
    assert verdict(b / a) == opposite[verdict(a / b)]


def test_neither_order_nor_company_nor_chunks_change_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    emitted, steps = answers(rng, 30, 2.0)
    first = Resampling(300).ratio("maths", "a", emitted, steps)
    resampling = Resampling(300)
    resampling.ratio("code", "b", emitted[:7], steps[:7])
    assert np.array_equal(resampling.ratio("maths", "a", emitted, steps).samples, first.samples)
    assert not np.array_equal(resampling.ratio("code", "a", emitted, steps).samples, first.samples)
    monkeypatch.setattr("hspec.evaluation.statistics._CHUNK", 30 * 64)
    assert np.allclose(Resampling(300).ratio("maths", "a", emitted, steps).samples, first.samples)


def test_seeds_are_resampled_too() -> None:
    """Three trainings that differ leave more doubt than one, even when the prompts are many."""
    rng = np.random.default_rng(7)
    steps = np.full((3, 400), 50.0)
    emitted = np.round(steps * np.array([[1.8], [2.0], [2.2]]) * np.exp(rng.normal(0, 0.05, (3, 400))))
    resampling = Resampling(2000)
    three = resampling.ratio("t", "a", emitted, steps)
    one = resampling.ratio("t", "a", emitted[1], steps[1])
    assert three.value == pytest.approx(2.0, abs=0.01)
    assert three.high - three.low > 10 * (one.high - one.low)
    expected = 0.2 / np.sqrt(3)  # the standard error of a mean of three, whose standard deviation is 0.2
    assert three.samples.std() == pytest.approx(expected, rel=0.1)
    # The same seeds are drawn on every task, so a mean over tasks does not average the doubt away.
    mean = Estimate.mean([three, resampling.ratio("u", "a", emitted, steps)])
    assert mean.samples.std() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("seeds", "least", "most"), [(2, 0.72, 0.84), (3, 0.84, 0.93), (8, 0.89, 0.97)])
def test_few_seeds_leave_intervals_too_narrow(seeds: int, least: float, most: float) -> None:
    """Trainings that differ by 5 %, far more than prompts do: how many of 300 intervals of 95 % hold the true quotient."""
    rng = np.random.default_rng(9)
    hits = 0
    for world in range(300):
        hardness = rng.normal(0, 0.3, 40)
        steps = np.tile(rng.integers(20, 120, 40).astype(float), (seeds, 1))
        resampling = Resampling(300, seed=world)
        taus = []
        for name, tau in (("a", 2.1), ("b", 2.0)):
            own = tau * np.exp(hardness + rng.normal(0, 0.05, (seeds, 1)) + rng.normal(0, 0.05, (seeds, 40)))
            taus.append(resampling.ratio("t", name, steps * own, steps))
        ratio = taus[0] / taus[1]
        hits += ratio.low <= 2.1 / 2.0 <= ratio.high
    assert least < hits / 300 < most


def test_mean_over_tasks_is_unweighted() -> None:
    resampling = Resampling(50)
    large = resampling.ratio("large", "a", np.full(100, 60.0), np.full(100, 30.0))
    small = resampling.ratio("small", "a", np.full(4, 90.0), np.full(4, 30.0))
    assert Estimate.mean([large, small]).as_dict() == pytest.approx({"value": 2.5, "low": 2.5, "high": 2.5})


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    scale=st.floats(0.01, 100),
)
def test_scaling(rows: list[tuple[int, int]], scale: float) -> None:
    """A clock that runs faster changes no quotient, and multiplies every ratio alike."""
    above, below = np.array(rows, dtype=float).T
    plain, scaled = Resampling(50).ratio("t", "a", above, below), Resampling(50).ratio("t", "a", scale * above, below)
    assert scaled.value == pytest.approx(scale * plain.value)
    assert np.allclose((scaled / plain).samples, scale)
    assert plain.low <= plain.high and min(above / below) - 1e-9 <= plain.value <= max(above / below) + 1e-9


def test_positions_that_a_draw_misses() -> None:
    """One prompt alone reached the position: draws without it have nothing to divide by, and are left out."""
    rate = Resampling(200).ratio("t", "a", [3, 0, 0, 0], [4, 0, 0, 0])
    assert np.isnan(rate.samples).any()
    assert rate.as_dict() == pytest.approx({"value": 0.75, "low": 0.75, "high": 0.75})


def test_prompts_needed_by_simulation() -> None:
    """With as many prompts as it says, a 5 % difference is seen in about 80 % of the worlds."""
    rng = np.random.default_rng(8)

    def world(prompts: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        hardness = rng.normal(0, 0.3, prompts)
        steps = rng.integers(20, 120, prompts).astype(float)
        taus = [tau * np.exp(hardness + rng.normal(0, 0.15, prompts)) for tau in (2.1, 2.0)]
        return (steps * taus[0], steps * taus[1]), (steps, steps)

    needed = prompts_needed(*world(5000))
    assert 60 < needed < 400
    seen = 0
    for seed in range(300):
        emitted, steps = world(needed)
        resampling = Resampling(200, seed)
        ratio = resampling.ratio("t", "a", emitted[0], steps[0]) / resampling.ratio("t", "b", emitted[1], steps[1])
        seen += verdict(ratio) == "ahead"
    assert 0.7 < seen / 300 < 0.9
    assert prompts_needed(*world(5000), difference=0.025) > 3 * needed


def test_one_prompt_tells_no_doubt() -> None:
    one = Resampling(500).ratio("t", "m", [7.0], [4.0])
    assert one.as_dict() == {"value": 1.75, "low": None, "high": None} and in_words(one.as_dict()) == "1.75 (?)"
    assert verdict(one / Resampling(500).ratio("t", "n", [6.0], [4.0])) == "level"
    two = Resampling(500).ratio("u", "m", [7.0, 9.0], [4.0, 4.0])
    assert in_words(two.as_dict()) == "2.00 (1.75 .. 2.25)"
    assert in_words(Estimate.mean([one, two]).as_dict(), 3) == "1.875 (?)"


def test_nothing_to_divide_by() -> None:
    with pytest.raises(HSpecError, match="m on t: no step was measured"):
        Resampling(10).ratio("t", "m", [0.0], [0.0])
    with pytest.raises(HSpecError, match="m on t: no step was measured"):
        Resampling(10).ratio("t", "m", [], [])
    with pytest.raises(HSpecError, match="fewer than two"):
        prompts_needed(([3.0], [2.0]), ([1.0], [1.0]))
    with pytest.raises(HSpecError, match="no task"):
        Estimate.mean([])
    assert math.isnan(Estimate(1.0, np.array([np.nan])).low)

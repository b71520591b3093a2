"""Paired statistics of ratios over prompts: who is ahead, by how much, and how surely.

Everything that is compared is a ratio of sums: tau is tokens over steps, latency seconds over tokens, an acceptance rate drafts
accepted over drafts reached. Sums are pooled over prompts, so that a long answer counts for more than a short one; a mean of
per-prompt ratios would be another number (Jensen). Uncertainty comes from the bootstrap (Efron, 1979): prompts are drawn again with
replacement, the same ones for all methods, so that what makes a prompt hard for all of them cancels in a comparison. Where a method
was trained with several seeds, these are drawn again too, for each method on its own, as trainings know nothing of each other.
Of n seeds n - 1 are drawn: a mean of n draws would vary by (n - 1) / n of what it should (Rao and Wu, 1988), and n is small. With
three seeds or fewer intervals stay too narrow all the same: no draw is outside of the seeds that there are (the tests say how much).

An :class:`Estimate` carries its resampled values along, so that a quotient or a mean of estimates is one as well, pairing included.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm

from hspec.errors import HSpecError

RESAMPLES = 10_000
LEVEL = 0.95
"""Of the intervals: percentiles of the resampled values."""
_CHUNK = 4_000_000
"""Numbers that a resampling holds at once."""

Floats = NDArray[np.float64]
Verdict = Literal["ahead", "behind", "level"]


@dataclass(frozen=True)
class Estimate:
    """A number, and what it would have been on other draws of prompts (and seeds)."""

    value: float
    samples: Floats
    """``[resamples]``; not a number where a draw has nothing to divide by, and everywhere if there is one prompt alone, from which
    no doubt can be told."""

    @property
    def low(self) -> float:
        return self._percentile((1 - LEVEL) / 2)

    @property
    def high(self) -> float:
        return self._percentile((1 + LEVEL) / 2)

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high

    def _percentile(self, share: float) -> float:
        usable = self.samples[~np.isnan(self.samples)]
        return float(np.quantile(usable, share)) if len(usable) else math.nan

    def __truediv__(self, other: Estimate) -> Estimate:
        with np.errstate(divide="ignore", invalid="ignore"):
            return Estimate(self.value / other.value, self.samples / other.samples)

    def as_dict(self) -> dict[str, float | None]:
        """``value``, ``low``, ``high``; without an interval the last two are None."""
        low, high = (None if math.isnan(end) else end for end in self.interval)
        return {"value": self.value, "low": low, "high": high}

    @staticmethod
    def mean(estimates: Sequence[Estimate]) -> Estimate:
        """Unweighted, as the paper's means over tasks are."""
        if not estimates:
            raise HSpecError("a mean over no task: nothing was measured")
        samples = np.mean([e.samples for e in estimates], axis=0)
        return Estimate(float(np.mean([e.value for e in estimates])), samples)


def in_words(estimate: Mapping[str, Any] | None, digits: int = 2) -> str:
    """``1.93 (1.86 .. 2.00)`` of an :meth:`Estimate.as_dict`; ``1.93 (?)`` without an interval, ``-`` where nothing was measured."""
    if estimate is None:
        return "-"
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    return f"{value:.{digits}f} (?)" if low is None else f"{value:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def verdict(ratio: Estimate) -> Verdict:
    """Whether a ratio of two methods is above 1, below 1, or cannot be told from it."""
    if ratio.low > 1:
        return "ahead"
    return "behind" if ratio.high < 1 else "level"


class Resampling:
    """Draws of prompts and seeds, the same for whoever asks for the same task, or the same method.

    Args:
        resamples: how many. seed: of the draws; the same seed gives the same intervals.
    """

    def __init__(self, resamples: int = RESAMPLES, seed: int = 0):
        self.resamples, self.seed = resamples, seed

    def ratio(self, task: str, method: str, numerator: ArrayLike, denominator: ArrayLike) -> Estimate:
        """Sum over sum, of one method on one task.

        Args:
            numerator, denominator: ``[prompts]``, or ``[training seeds, prompts]``; prompts in the same order for all methods.

        Raises:
            HSpecError: no prompt, two shapes, or nothing to divide by.
        """
        above, below = _table(numerator), _table(denominator)
        if above.shape != below.shape:
            raise AssertionError(f"{method} on {task}: {above.shape} numerators for {below.shape} denominators")
        if not above.size or not below.sum():
            raise HSpecError(f"{method} on {task}: no step was measured, so there is no ratio to give")
        seeds, prompts = above.shape
        samples = np.full(self.resamples, np.nan)
        if prompts < 2:
            return Estimate(float(above.sum() / below.sum()), samples)
        draws = max(1, seeds - 1)
        drawn_prompts, drawn_seeds = self._generator("prompts", task), self._generator("seeds", method)
        chunk = max(1, min(self.resamples, _CHUNK // prompts))
        for start in range(0, self.resamples, chunk):
            count = min(chunk, self.resamples - start)
            of_prompts = drawn_prompts.multinomial(prompts, np.full(prompts, 1 / prompts), size=count).astype(float)
            of_seeds = drawn_seeds.multinomial(draws, np.full(seeds, 1 / seeds), size=count).astype(float)
            with np.errstate(divide="ignore", invalid="ignore"):
                samples[start : start + count] = _drawn(above, of_seeds, of_prompts) / _drawn(below, of_seeds, of_prompts)
        return Estimate(float(above.sum() / below.sum()), samples)

    def _generator(self, what: str, name: str) -> np.random.Generator:
        """Of its own for every task and every method, so that neither order nor company changes a draw."""
        return np.random.default_rng([self.seed % 2**64, zlib.crc32(f"{what}/{name}".encode())])


def _table(values: ArrayLike) -> Floats:
    table = np.asarray(values, dtype=float)
    return table[None] if table.ndim == 1 else table


def _drawn(values: Floats, of_seeds: Floats, of_prompts: Floats) -> Floats:
    """Sums of ``values`` ``[seeds, prompts]`` with each seed and each prompt as often as it was drawn, ``[draws]``."""
    return ((of_seeds @ values) * of_prompts).sum(axis=1)


def prompts_needed(
    numerators: tuple[ArrayLike, ArrayLike],
    denominators: tuple[ArrayLike, ArrayLike],
    difference: float = 0.05,
    power: float = 0.8,
) -> int:
    """How many prompts it takes to see that one method's ratio of sums is larger than another's by ``difference``.

    With that chance of seeing it, two-sided at 5 %, paired. The log of the quotient of two pooled ratios has, for n prompts, the
    variance var(d) / n, where prompt i contributes d_i = (a_i - A s_i) / (A mean(s)) of the one less the same of the other (delta
    method); so n = (z_0.975 + z_power)^2 var(d) / log(1 + difference)^2.

    Args:
        numerators, denominators: of both methods, ``[prompts]`` or ``[seeds, prompts]`` (seeds are pooled), in the same order.

    Raises:
        HSpecError: fewer than two prompts, from which no variance can be told.
    """
    parts = [_influence(_table(n).sum(0), _table(d).sum(0)) for n, d in zip(numerators, denominators, strict=True)]
    if parts[0].shape != parts[1].shape:
        raise AssertionError(f"prompts are not paired: {parts[0].shape} and {parts[1].shape}")
    if len(parts[0]) < 2:
        raise HSpecError("how many prompts are needed cannot be told from fewer than two: give more")
    variance = float(np.var(parts[0] - parts[1], ddof=1))
    z = norm.ppf(0.975) + norm.ppf(power)
    return max(2, math.ceil(z**2 * variance / math.log1p(difference) ** 2))


def _influence(numerator: Floats, denominator: Floats) -> Floats:
    """What each prompt adds to the log of the pooled ratio, to first order."""
    if not denominator.sum() or not numerator.sum():
        raise HSpecError("no step was measured, so there is no ratio to compare")
    ratio = numerator.sum() / denominator.sum()
    return (numerator - ratio * denominator) / (ratio * denominator.mean())

"""Fewer drafts where many requests run at once: a target that is busy with them pays for every row that it verifies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hspec.errors import UsageError

OPTION = "--drafts-at"
EXAMPLE = f"{OPTION} 3:2,5:0 (two drafts from 3 requests on, none from 5 on)"


@dataclass(frozen=True)
class Schedule:
    """From so many requests in a step on, so many drafts for each; ascending. Below the first: the server's k."""

    points: tuple[tuple[int, int], ...]

    @staticmethod
    def of(text: str) -> Schedule:
        """``requests:drafts``, separated by commas.

        Raises:
            UsageError: it is not of this form, or its numbers of requests do not rise.
        """
        points: list[tuple[int, int]] = []
        for part in text.split(","):
            requests, colon, drafts = part.strip().partition(":")
            if not (colon and requests.isdecimal() and drafts.isdecimal()):
                raise UsageError(f"{OPTION} {text}: {part.strip()!r} is not REQUESTS:DRAFTS, as in {EXAMPLE}")
            points.append((int(requests), int(drafts)))
        counts = [requests for requests, _ in points]
        if counts[0] < 1 or any(a >= b for a, b in pairwise(counts)):
            raise UsageError(f"{OPTION} {text}: numbers of requests must rise from 1 or more, as in {EXAMPLE}")
        return Schedule(tuple(points))

    def ranges(self, k: int) -> list[list[int]]:
        """As vLLM's ``num_speculative_tokens_per_batch_size`` has it: first and last number of requests, and drafts. What is behind the
        last range is as there.

        Args:
            k: drafts of a step with few requests.

        Raises:
            UsageError: more drafts than k.
        """
        most = max(drafts for _, drafts in self.points)
        if most > k:
            raise UsageError(f"{OPTION}: {most} drafts are more than -k {k}, the most that there are")
        points = list(self.points) if self.points[0][0] == 1 else [(1, k), *self.points]
        ends = [first - 1 for first, _ in points[1:]] + [points[-1][0]]
        return [[first, end, drafts] for (first, drafts), end in zip(points, ends, strict=True)]

"""From the records of an evaluation to what is said of it: every number with its interval, every comparison paired."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from hspec.evaluation.bins import INPUTS, ORIGINS, POSITIONS, Cut, by_input, by_origin, by_position
from hspec.evaluation.harness import AR
from hspec.evaluation.records import Record
from hspec.evaluation.statistics import Estimate, Floats, Resampling, prompts_needed, verdict

FEWEST = 5
"""Prompts in a bin below which no interval is given: resampling so few tells little, and what it tells is too narrow."""


@dataclass(frozen=True)
class Entrant:
    """A row of the tables: one contender, or those of one method that differ in the seed of their training."""

    name: str
    contenders: tuple[str, ...]
    method: str
    k: int


def entrants(contenders: Mapping[str, Mapping[str, Any]]) -> list[Entrant]:
    """Rows from what ``evaluation.json`` says of the contenders: those of one method and k with different seeds are one row."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, about in contenders.items():
        groups.setdefault((about["method"], about["k"]), []).append(name)
    rows = []
    for (method, k), names in groups.items():
        seeds = {contenders[name]["seed"] for name in names}
        if len(names) > 1 and len(seeds) == len(names):
            rows.append(Entrant(f"{method} (k {k}, {len(names)} seeds)", tuple(names), method, k))
        else:
            rows += [Entrant(name, (name,), method, k) for name in names]
    return rows


Times = dict[str, dict[str, Estimate]]
"""Of every row by task."""


class Measured:
    """The sums of one setting as arrays ``[seeds, prompts]``, prompts in one order for all."""

    def __init__(self, records: Sequence[Record], rows: Sequence[Entrant], resampling: Resampling):
        self.rows, self.resampling = rows, resampling
        self._records = {(r.contender, r.task, r.id): r for r in records}
        self.prompts: dict[str, list[str]] = {}
        for record in records:
            ids = self.prompts.setdefault(record.task, [])
            if record.id not in ids:
                ids.append(record.id)
        for ids in self.prompts.values():
            ids.sort()

    @property
    def timed(self) -> bool:
        """Whether all answers were."""
        return not any(math.isnan(record.seconds) for record in self._records.values())

    @property
    def tasks(self) -> list[str]:
        return list(self.prompts)

    def of(self, row: Entrant, task: str) -> list[Record]:
        return [self._records[name, task, id] for name in row.contenders for id in self.prompts[task]]

    def all_of(self, row: Entrant) -> list[Record]:
        return [record for task in self.tasks for record in self.of(row, task)]

    def table(self, row: Entrant, task: str, value: Callable[[Record], float]) -> Floats:
        return np.array([[value(self._records[name, task, id]) for id in self.prompts[task]] for name in row.contenders])

    # -- ratios ----------------------------------------------------------------------------------------------------

    def tau(self, row: Entrant, task: str) -> Estimate:
        return self._ratio(row, task, _emitted, _steps)

    def latency(self, row: Entrant, task: str) -> Estimate:
        """Seconds a token, of the decoding steps."""
        return self._ratio(row, task, _seconds, _emitted)

    def acceptance(self, row: Entrant, position: int) -> Estimate | None:
        """Conditional acceptance at a draft position, pooled over tasks; None if it was never reached."""
        reached = np.concatenate([self.table(row, t, lambda r: _at(r.counters.reached, position)) for t in self.tasks], axis=1)
        accepted = np.concatenate(
            [self.table(row, t, lambda r: _at(r.counters.accepted, position)) for t in self.tasks], axis=1
        )
        return self.resampling.ratio("all tasks", _key(row), accepted, reached) if reached.sum() else None

    def tau_in(self, row: Entrant, cut: Cut, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Pooled over tasks, for each bin in which there is a step: ``bin``, ``prompts``, ``steps`` and ``tau``."""
        records = [[self._records[name, t, id] for t in self.tasks for id in self.prompts[t]] for name in row.contenders]
        sums = np.array([[cut(record) for record in of_seed] for of_seed in records])  # [seeds, prompts, bins, 2]
        found = []
        for index, label in enumerate(labels):
            emitted, steps = sums[:, :, index, 0], sums[:, :, index, 1]
            if not steps.any():
                continue
            prompts = int(steps.any(axis=0).sum())
            tau = {"value": float(emitted.sum() / steps.sum()), "low": None, "high": None}
            if prompts >= FEWEST:
                tau = self.resampling.ratio("all tasks", _key(row), emitted, steps).as_dict()
            found.append({"bin": label, "prompts": prompts, "steps": int(steps.sum()), "tau": tau})
        return found

    def _ratio(self, row: Entrant, task: str, above: Callable[[Record], float], below: Callable[[Record], float]) -> Estimate:
        return self.resampling.ratio(task, _key(row), self.table(row, task, above), self.table(row, task, below))


def _key(row: Entrant) -> str:
    """Seeds are drawn by method, so that one method's are the same whatever it is compared with."""
    return f"{row.method}/{row.k}/{row.name}"


def _emitted(record: Record) -> float:
    return record.counters.emitted


def _steps(record: Record) -> float:
    return record.counters.steps


def _seconds(record: Record) -> float:
    return record.seconds


def _at(values: Sequence[int], position: int) -> int:
    return values[position] if position < len(values) else 0


def summarise(records: Sequence[Record], contenders: Mapping[str, Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """By setting: every entrant by task and as the unweighted mean over tasks, and every pair of drafters.

    Args:
        contenders: as in ``evaluation.json``. seed: of the bootstrap.

    What is of time is None where answers were not timed, and speedups where nobody was without a drafter.

    Raises:
        HSpecError: nothing was measured.
    """
    rows = entrants(contenders)
    settings = dict.fromkeys(r.setting for r in records)
    return {s: _of_setting(Measured([r for r in records if r.setting == s], rows, Resampling(seed=seed))) for s in settings}


def _of_setting(measured: Measured) -> dict[str, Any]:
    taus = {row.name: {t: measured.tau(row, t) for t in measured.tasks} for row in measured.rows}
    plain = next((row for row in measured.rows if row.method == AR), None)
    times: Times = {}
    speed: Times = {}
    if measured.timed:
        times = {row.name: {t: measured.latency(row, t) for t in measured.tasks} for row in measured.rows}
    if plain is not None:
        speed = {name: {t: times[plain.name][t] / own[t] for t in measured.tasks} for name, own in times.items()}
    drafters = [row for row in measured.rows if row.method != AR]
    return {
        "prompts": {task: len(ids) for task, ids in measured.prompts.items()},
        "entrants": {row.name: _of_entrant(measured, row, taus[row.name], speed.get(row.name)) for row in measured.rows},
        "pairs": [_pair(measured, a, b, taus, times) for a, b in combinations(drafters, 2)],
    }


def _of_entrant(
    measured: Measured, row: Entrant, taus: dict[str, Estimate], speed: dict[str, Estimate] | None
) -> dict[str, Any]:  # fmt: skip
    records = measured.all_of(row)
    turns = [turn for record in records for turn in record.turns]
    steps, emitted = sum(len(t.runs) for t in turns), sum(sum(t.runs) for t in turns)
    draft, verify = (1e3 * sum(part) / max(steps, 1) for part in zip(*((r.draft_seconds, r.verify_seconds) for r in records)))
    peaks = [r.peak_bytes for r in records if r.peak_bytes is not None]
    positions = [measured.acceptance(row, i) for i in range(row.k)]
    return {
        "method": row.method,
        "k": row.k,
        "seeds": len(row.contenders),
        "tasks": {t: {"tau": taus[t].as_dict(), "speedup": speed and speed[t].as_dict()} for t in measured.tasks},
        "tau": Estimate.mean(list(taus.values())).as_dict(),
        "speedup": speed and Estimate.mean(list(speed.values())).as_dict(),
        "tau_pooled": emitted / max(steps, 1),
        "tau_by_position": measured.tau_in(row, by_position, POSITIONS.labels),
        "tau_by_input": measured.tau_in(row, by_input, INPUTS.labels),
        "tau_by_origin": measured.tau_in(row, by_origin, list(ORIGINS.values())),
        "acceptance": [p.as_dict() for p in positions if p is not None],
        "draft_ms": draft if measured.timed else None,
        "verify_ms": verify if measured.timed else None,
        "ms_per_token": 1e3 * sum(r.seconds for r in records) / max(emitted, 1) if measured.timed else None,
        "ms_per_token_model": (draft + verify) / (emitted / max(steps, 1)) if emitted and measured.timed else None,
        "peak_mb": max(peaks) / 1e6 if peaks else None,
        "drafter_kv_bytes": max(r.drafter_kv_bytes for r in records),
        "looping": sum(t.looping for t in turns),
        "tokens": emitted,
        "steps": steps,
    }


def _pair(measured: Measured, a: Entrant, b: Entrant, taus: Times, times: Times) -> dict[str, Any]:
    """The first against the second: above 1 it is ahead."""
    by_task = {t: taus[a.name][t] / taus[b.name][t] for t in measured.tasks}
    tau = Estimate.mean(list(taus[a.name].values())) / Estimate.mean(list(taus[b.name].values()))
    faster = Estimate.mean([times[b.name][t] / times[a.name][t] for t in measured.tasks]) if times else None
    return {
        "a": a.name,
        "b": b.name,
        "tau_ratio": {**tau.as_dict(), "verdict": verdict(tau)},
        "speed_ratio": faster and {**faster.as_dict(), "verdict": verdict(faster)},
        "tasks": {t: {**ratio.as_dict(), "verdict": verdict(ratio)} for t, ratio in by_task.items()},
        "prompts_for_5_percent": _needed(measured, a, b),
    }


def _needed(measured: Measured, a: Entrant, b: Entrant) -> int | None:
    """Prompts, of all tasks together, to see a 5 % difference in pooled tau; None from fewer than two."""
    sums = [
        [np.concatenate([measured.table(row, t, value).sum(0) for t in measured.tasks]) for row in (a, b)]
        for value in (_emitted, _steps)
    ]
    if len(sums[0][0]) < 2:
        return None
    return prompts_needed((sums[0][0], sums[0][1]), (sums[1][0], sums[1][1]))

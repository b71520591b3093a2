"""Servers under load, one method after the other, round after round: throughput, latency and KV use over concurrency.

Every round starts each method's server anew and goes through all concurrencies, so that a change in the machine's load meets all
methods alike; ratios are taken within a round, and what is told is the median over rounds.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hspec.drafters.config import Strict
from hspec.errors import HSpecError, UsageError
from hspec.evaluation import plots
from hspec.evaluation.page import render
from hspec.evaluation.setup import machine
from hspec.files import append_line, reason, whole_lines, write_text
from hspec.serving.load import Load, LoadResult
from hspec.serving.versions import installed

RUNS_FILE, SETTINGS_FILE, SUMMARY_FILE, PAGE_FILE = "runs.jsonl", "bench.json", "serving.json", "serving.html"
PROMPTS_FILE = "prompts.jsonl"
NONE = "none"
"""The method that drafts nothing, against which ratios are taken."""


@dataclass(frozen=True)
class Entrant:
    """A method, and what its server is told besides the rest."""

    name: str
    arguments: tuple[str, ...]
    drafter: str = ""
    """Where its drafter is, for the report."""


class Plan(Strict):
    """What all methods are asked alike."""

    target: str
    concurrency: list[int]
    requests: int
    rounds: int
    max_tokens: int
    temperature: float
    k: int
    drafts_at: str | None = None
    """Fewer drafts where many requests run at once (see :class:`hspec.serving.schedule.Schedule`)."""
    seed: int
    prompts: str
    """Where they come from ..."""
    prompts_hash: str
    """... and which they are."""
    input_tokens: float
    """Of a prompt, the mean."""
    server: list[str]
    """Arguments that every server has."""

    def load(self, prompts: Path, concurrency: int) -> Load:
        return Load(prompts, self.requests, concurrency, self.max_tokens, self.temperature, self.seed)


@dataclass(frozen=True)
class Run:
    """One load on one server."""

    round: int
    method: str
    concurrency: int
    busy: float | None
    """The machine's load average over the minute before, the server's start included; None where the system does not tell."""
    result: LoadResult


Drive = Callable[[Load, Path], LoadResult]
"""Puts a server under load; the folder is for what that writes."""

Start = Callable[[Entrant], AbstractContextManager[Drive]]
"""Starts a server, gives what puts it under load, and stops it at the end."""


def bench(
    entrants: Sequence[Entrant], plan: Plan, prompts: Sequence[str], out: Path, start: Start, say: Callable[[str], None] = print
) -> list[Run]:
    """Run what is not in ``out`` yet; returns all runs.

    Args:
        prompts: what is sent to every server, in this order.

    Raises:
        UsageError: ``out`` has runs of another plan or of other drafters.
        HSpecError: a server does not start or does not answer; what was measured before is kept.
    """
    _check_settings(entrants, plan, out)
    file = out / PROMPTS_FILE
    write_text(file, "".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    done = read_runs(out)
    known = {(run.round, run.method, run.concurrency) for run in done}
    for round in range(plan.rounds):
        for entrant in entrants:
            missing = [c for c in plan.concurrency if (round, entrant.name, c) not in known]
            if not missing:
                continue
            say(f"round {round + 1} of {plan.rounds}: starting a server for {entrant.name}")
            with start(entrant) as drive:
                for concurrency in missing:
                    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
                    run = Run(round, entrant.name, concurrency, busy, drive(plan.load(file, concurrency), out / "work"))
                    _append(out / RUNS_FILE, run)
                    done.append(run)
                    say(_line(run))
    return done


def _line(run: Run) -> str:
    r = run.result
    tau = "" if r.tau is None else f", tau {r.tau:.2f}"
    return (
        f"  {run.method} at {run.concurrency}: {r.throughput:.1f} tok/s, KV {100 * r.kv_peak:.0f} % of {r.kv_tokens:,} tokens, "
        f"{r.preemptions} preemptions{tau}"
    )


def _check_settings(entrants: Sequence[Entrant], plan: Plan, out: Path) -> None:
    path = out / SETTINGS_FILE
    drafters = {e.name: {"arguments": list(e.arguments), "drafter": e.drafter} for e in entrants}
    now = {"plan": plan.model_dump(mode="json"), "entrants": drafters}
    if not path.exists():
        write_text(path, json.dumps(now, indent=1) + "\n")
        return
    before = _read_settings(out)
    if before != now:
        changed = [
            name
            for part in ("plan", "entrants")
            for name in {**before[part], **now[part]}
            if before[part].get(name) != now[part].get(name)
        ]
        raise UsageError(
            f"{out} has a bench with other settings ({', '.join(changed)}): choose another --out, or the same settings"
        )


def _read_settings(out: Path) -> dict[str, Any]:
    path = out / SETTINGS_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        Plan.model_validate(found["plan"])
        return found
    except OSError as error:
        raise UsageError(f"{out} has no bench: cannot read {path}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HSpecError(f"{path} is not what 'hspec bench serve' writes ({reason(error)}): choose another --out") from error


def _append(path: Path, run: Run) -> None:
    try:
        append_line(path, json.dumps(asdict(run)))
    except OSError as error:
        raise HSpecError(f"cannot write {path}: {reason(error)}; free some space, and the same command goes on") from error


def read_runs(out: Path) -> list[Run]:
    """
    Raises:
        HSpecError: a line is not a run.
    """
    path = out / RUNS_FILE
    found = []
    for number, line in enumerate(whole_lines(path, begins='{"round"'), 1):
        try:
            record = json.loads(line)
            found.append(Run(**{**record, "result": LoadResult(**record["result"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise HSpecError(
                f"{path}: line {number} is not a run ({reason(error)}): remove it, and it is measured again"
            ) from error
    return found


# -- what comes of it ----------------------------------------------------------------------------------------------


def summarise(runs: Iterable[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """By method and concurrency the medians over rounds, and the median over rounds of the throughput by that without drafts.

    Counts of preemptions are the most of any round, KV peaks the highest; acceptance is the mean over rounds.
    """
    grouped: dict[str, dict[int, dict[int, LoadResult]]] = {}
    for run in runs:
        grouped.setdefault(run.method, {}).setdefault(run.concurrency, {})[run.round] = run.result
    plain = grouped.get(NONE, {})
    return {
        method: {str(c): _cell(rounds, plain.get(c, {})) for c, rounds in sorted(by_concurrency.items())}
        for method, by_concurrency in grouped.items()
    }


def _cell(rounds: Mapping[int, LoadResult], plain: Mapping[int, LoadResult]) -> dict[str, Any]:
    results = list(rounds.values())
    ratios = [r.throughput / plain[n].throughput for n, r in rounds.items() if n in plain]

    def median(name: str) -> float:
        return statistics.median(getattr(r, name) for r in results)

    return {
        "rounds": len(results),
        **{name: median(name) for name in ("throughput", "ttft", "itl", "tpot", "kv_mean")},
        "throughput_all": [r.throughput for r in results],
        "ratio": statistics.median(ratios) if ratios else None,
        "ratios": ratios,
        "kv_peak": max(r.kv_peak for r in results),
        "kv_tokens": results[0].kv_tokens,
        "preemptions": max(r.preemptions for r in results),
        "tau": None if results[0].tau is None else statistics.mean(r.tau for r in results if r.tau is not None),
        "acceptance": [_mean(column) for column in zip(*(r.acceptance for r in results), strict=True)],
    }


def _mean(column: Sequence[float | None]) -> float | None:
    known = [value for value in column if value is not None]
    return statistics.mean(known) if known else None


def sentences(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """What the numbers say, in words."""
    said = []
    plain = summary.get(NONE, {})
    for method, cells in summary.items():
        if method == NONE:
            continue
        ratios = {c: cell["ratio"] for c, cell in cells.items() if cell["ratio"] is not None}
        if ratios:
            best, worst = max(ratios, key=lambda c: ratios[c]), min(ratios, key=lambda c: ratios[c])
            said.append(
                f"{method}: {ratios[best]:.2f} times the throughput without drafts at concurrency {best}, {ratios[worst]:.2f} at {worst}."
            )
        room = [(cell["kv_tokens"], plain[c]["kv_tokens"]) for c, cell in cells.items() if c in plain]
        if room and room[0][1]:
            own, full = room[0]
            same = "as many as" if own == full else f"{100 * (own / full - 1):+.1f} % against"
            said.append(f"{method}: the KV blocks have room for {own:,} tokens, {same} without drafts.")
    return said


def drawn(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Throughput, KV use, latency and preemptions over concurrency, and acceptance by position."""

    def over(name: str, factor: float = 1.0) -> dict[str, list[tuple[float, float]]]:
        return {m: [(int(c), factor * cell[name]) for c, cell in cells.items()] for m, cells in summary.items()}

    held = {m: [(int(c), cell["kv_peak"] * cell["kv_tokens"]) for c, cell in cells.items()] for m, cells in summary.items()}
    at = "concurrency"
    accepted = {m: _acceptance(cells) for m, cells in summary.items() if m != NONE and _acceptance(cells)}
    found = [
        plots.curves("throughput", over("throughput"), at, "output tokens a second", log_x=True),
        plots.curves("KV use", over("kv_peak", 100.0), at, "highest share of the KV blocks, %", log_x=True),
        plots.curves("KV tokens held", held, at, "highest count of tokens held", log_x=True),
        plots.curves("time a token", over("tpot"), at, "ms a token, median", log_x=True),
        plots.curves("time to the first token", over("ttft"), at, "ms, median", log_x=True),
        plots.curves("preemptions", over("preemptions"), at, "preemptions", log_x=True),
    ]
    return [*found, plots.curves("acceptance", accepted, "draft position", "conditional acceptance")] if accepted else found


def _acceptance(cells: Mapping[str, Mapping[str, Any]]) -> list[tuple[float, float]]:
    """At the highest concurrency."""
    last = list(cells.values())[-1]
    return [(i, value) for i, value in enumerate(last["acceptance"], 1) if value is not None]


def write_bench(out: Path) -> dict[str, Any]:
    """Write ``serving.json`` and the page of what is in a folder so far; returns the former.

    Raises:
        UsageError: no bench there. HSpecError: what is there cannot be read, or nothing can be written.
    """
    settings, runs = _read_settings(out), read_runs(out)
    if not runs:
        raise UsageError(f"{out} has no run of a bench yet: start 'hspec bench serve' again")
    summary = summarise(runs)
    busy = [run.busy for run in runs if run.busy is not None]
    found = {
        **settings,
        "machine": machine("cpu"),
        "vllm": installed(),
        "load_average": [min(busy), max(busy)] if busy else None,
        "methods": summary,
    }
    write_text(out / SUMMARY_FILE, json.dumps(found, indent=1) + "\n")
    page = render(
        "serving.html.j2",
        plan=settings["plan"],
        machine=found["machine"],
        vllm=found["vllm"],
        busy=found["load_average"],
        sentences=sentences(summary),
        plots=drawn(summary),
        summary=summary,
        drafters={name: e["drafter"] for name, e in settings["entrants"].items()},
    )
    write_text(out / PAGE_FILE, page)
    return found

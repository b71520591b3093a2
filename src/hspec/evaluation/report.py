"""One HTML file that shows an evaluation: it needs no network, and is readable in light, in dark and on paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspec.errors import HSpecError, UsageError
from hspec.evaluation import plots
from hspec.evaluation.bins import INPUTS, ORIGINS, POSITIONS
from hspec.evaluation.harness import AR, RECORDS_FILE
from hspec.evaluation.page import render
from hspec.evaluation.records import Record, RecordFile, TurnRecord
from hspec.evaluation.setup import write_summary
from hspec.evaluation.statistics import in_words
from hspec.evaluation.summary import FEWEST
from hspec.files import reason, write_text

REPORT_FILE = "report.html"
TEXTS = 1
"""Prompts of each task whose answers are shown, unless others are chosen."""

CUTS = (
    ("tau_by_position", POSITIONS.labels, "tau by response position", "tokens of the answer", True),
    ("tau_by_input", INPUTS.labels, "tau by input length", "tokens of the prompt", True),
    ("tau_by_origin", tuple(ORIGINS.values()), "tau by origin", "the next token is", False),
)
"""What else tau is shown by: the key in the summary, labels of its bins, a title, what is counted, and whether bins have an order."""


@dataclass(frozen=True)
class Span:
    """A piece of an answer: the drafts of one step that stood, or the target's own token behind them."""

    text: str
    drafted: bool
    refused: str = ""
    """What was drafted behind it and did not stand."""


def spans(turn: TurnRecord) -> list[Span]:
    """An answer cut where the drafted tokens of a step end."""
    found = [Span(turn.pieces[0], False)] if turn.pieces else []
    at = 1
    for run, refused in zip(turn.runs, turn.refused_text, strict=True):
        drafted = turn.drafted[at : at + run].count("1")
        if drafted:
            found.append(Span("".join(turn.pieces[at : at + drafted]), True, "" if drafted < run else refused))
        if drafted < run:
            found.append(Span("".join(turn.pieces[at + drafted : at + run]), False, refused))
        at += run
    return found


def write_report(
    folder: Path,
    out: Path | None = None,
    texts: int = TEXTS,
    ids: Sequence[str] = (),
    training: Sequence[Path] = (),
    costs: Path | None = None,
) -> Path:
    """Write the report of an evaluation; returns where it is.

    Args:
        folder: of ``hspec eval``. out: a file; by default ``report.html`` in the folder.
        texts: so many prompts of each task are shown with their answers. ids: or those with these ids.
        training: folders of training runs, whose curves are shown. costs: what ``hspec costs --json`` printed.

    Raises:
        UsageError: no evaluation in the folder, an unknown id, or files that are not what they should be.
        HSpecError: something cannot be read or written.
    """
    path = out or folder / REPORT_FILE
    _check_free(path)
    summary = write_summary(folder)
    records = RecordFile(folder / RECORDS_FILE).read()
    unknown = set(ids) - {r.id for r in records}
    if unknown:
        raise UsageError(f"no answer to a prompt with id {', '.join(sorted(unknown))} in {folder}")
    page = render(
        "report.html.j2",
        summary=summary,
        fewest=FEWEST,
        about=json.loads((folder / "evaluation.json").read_text(encoding="utf-8")),
        settings=[_setting(name, found) for name, found in summary["settings"].items()],
        curves=[*training_curves(training), *cost_curves(costs)],
        answers=_answers(records, texts, ids),
    )
    write_text(path, page)
    return path


def _check_free(path: Path) -> None:
    """
    Raises:
        UsageError: a file that is no page, so that it would be lost.
    """
    if path.is_file() and not path.read_bytes()[:100].lstrip().lower().startswith(b"<!doctype html"):
        raise UsageError(f"{path} is there already and is no report: choose another --out")


def _setting(name: str, found: dict[str, Any]) -> dict[str, Any]:
    drafters = {n: e for n, e in found["entrants"].items() if e["method"] != AR}
    tested = {n: e for n, e in drafters.items() if e["acceptance"]}
    drawn = [plots.tau_by_task(name, drafters, list(found["prompts"]))] if drafters else []
    drawn += [plots.acceptance_by_position(name, tested)] if tested else []
    sped = {n: e for n, e in drafters.items() if e["speedup"] is not None}
    drawn += [plots.speed_against_memory(name, sped)] if sped else []
    cuts = [cut for cut in (_cut(drafters, *cut) for cut in CUTS) if cut["rows"]] if drafters else []
    drawn += [
        plots.tau_by_bin(f"{name}: {cut['title']}", drafters, cut["key"], list(cut["rows"]), cut["tokens"], cut["ordered"])
        for cut in cuts
        if len(cut["rows"]) > 1  # one point is no curve
    ]
    return {"name": name, "found": found, "plots": drawn, "cuts": cuts, "sentences": sentences(found)}


def _cut(drafters: dict[str, Any], key: str, bins: Sequence[str], title: str, tokens: str, ordered: bool) -> dict[str, Any]:
    """The table of tau by bin: ``rows`` by label, in each row what is known of every drafter, in their order, or None."""
    known = [{b["bin"]: b for b in e[key]} for e in drafters.values()]
    labels = [label for label in bins if any(label in own for own in known)]
    rows = {label: [own.get(label) for own in known] for label in labels}
    return {"key": key, "title": title, "tokens": tokens, "ordered": ordered, "names": list(drafters), "rows": rows}


def sentences(found: dict[str, Any]) -> list[str]:
    """What the numbers say, in words."""
    drafters = {n: e for n, e in found["entrants"].items() if e["method"] != AR}
    if not drafters:
        return ["Nothing was drafted here."]
    best = max(drafters, key=lambda n: drafters[n]["tau"]["value"])
    tau, speed = drafters[best]["tau"], drafters[best]["speedup"]
    fast = "; speed was not measured" if speed is None else f", and is {in_words(speed)} times as fast as no drafting"
    said = [f"{best} has the largest mean accepted length, {in_words(tau)}{fast}."]
    words = {"ahead": "ahead of", "behind": "behind", "level": "not to be told from"}
    for pair in found["pairs"]:
        ratio = pair["tau_ratio"]
        said.append(f"In tau {pair['a']} is {words[ratio['verdict']]} {pair['b']}: {in_words(ratio, 3)} times as much.")
    return said


def _answers(records: Sequence[Record], texts: int, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Of each task the first prompts, or the chosen ones, with every drafter's answers under every setting."""
    shown: dict[tuple[str, str], list[dict[str, Any]]] = {}
    met: dict[str, set[str]] = {}
    for record in records:
        own = met.setdefault(record.task, set())
        if record.contender == AR or (record.id not in ids if ids else record.id not in own and len(own) >= texts):
            continue
        own.add(record.id)
        turns = [{"question": t.question, "spans": spans(t)} for t in record.turns]
        answer = {"contender": record.contender, "setting": record.setting, "tau": record.counters.tau, "turns": turns}
        shown.setdefault((record.task, record.id), []).append(answer)
    return [{"task": task, "id": id, "answers": answers} for (task, id), answers in shown.items()]


def training_curves(folders: Sequence[Path]) -> list[str]:
    """Held-out loss and estimated tau over blocks, a line for each run.

    Raises:
        UsageError: a folder without a training log.
    """
    losses, taus = dict[str, list[tuple[float, float]]](), dict[str, list[tuple[float, float]]]()
    for folder in folders:
        path = folder / "log.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            found = [r for r in map(json.loads, lines) if r["kind"] == "held-out"]
            losses[folder.name] = [(r["blocks"], r["loss"]) for r in found]
            taus[folder.name] = [(r["blocks"], r["tau_sampling"]) for r in found]
        except OSError as error:
            raise UsageError(f"--training {folder}: cannot read {path}: {reason(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--training {folder}: {path} is not the log of a training ({error!r})") from error
    if not losses:
        return []
    return [
        plots.curves("held-out loss", losses, "blocks", "held-out loss"),
        plots.curves("estimated tau in training", taus, "blocks", "estimated tau, T = 1"),
    ]


def cost_curves(path: Path | None) -> list[str]:
    """Milliseconds of drafting over concurrency, at the longest context, and of verification over rows.

    Raises:
        UsageError: the file is not what ``hspec costs --json`` prints.
        HSpecError: it cannot be read.
    """
    if path is None:
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        longest = max(c["length"] for c in found["drafting"])
        drafting: dict[str, list[tuple[float, float]]] = {}
        for c in found["drafting"]:
            if c["length"] == longest:
                drafting.setdefault(c["method"], []).append((c["concurrency"], c["total_ms"]))
        verification: dict[str, list[tuple[float, float]]] = {}
        for v in found["verification"]:
            verification.setdefault(f"{v['length']:,} tokens", []).append((v["rows"], v["ms"]))
    except OSError as error:
        raise HSpecError(f"--costs {path}: cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--costs {path}: not what 'hspec costs --json' prints ({error!r})") from error
    title = f"drafting at {longest:,} tokens, random weights"
    return [
        plots.curves(title, drafting, "sequences", "ms a step, injection included", log_x=True),
        plots.curves("verification", verification, "rows", "ms a forward"),
    ]

"""The trainings of a study by entry, best first: what they came to on the held-out answers, in which blocks and time, and over the cycle.

    python benchmarks/recipe_table.py STUDY                          # as soon as its trainings are done; answers are not needed
    python benchmarks/recipe_table.py STUDY --cycles EVALUATION      # ... of `hspec eval` with drafters that are called as entries

A cycle is drafting and verifying in steps without drafts (docs/evaluation.md). Entries that EVALUATION does not have are of the shape of
the first one, and take its cycle.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from hspec.evaluation.harness import AR
from hspec.evaluation.study import STUDY_FILE, Piece, read_study
from hspec.training.log import measured_at_end
from hspec.training.trackers import LOG_FILE


def last_held_out(folder: Path) -> dict[str, Any]:
    """What a training that came to its end was found to be."""
    records = [json.loads(line) for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()]
    return next(record for record in reversed(records) if record["kind"] == "held-out")


def cycles(summary: Mapping[str, Any]) -> dict[str, float]:
    """By entrant, under the first setting, in steps without drafts."""
    entrants = next(iter(summary["settings"].values()))["entrants"]
    step = entrants[AR]["ms_per_token"]
    return {name: (e["draft_ms"] + e["verify_ms"]) / step for name, e in entrants.items() if name != AR}


def row(label: str, found: Sequence[Mapping[str, Any]], cycle: float | None) -> list[str]:
    taus = [one["tau_sampling"] for one in found]
    cells = [label, f"{found[0]['steps']:,}", f"{found[0]['blocks']:,}", f"{mean(one['core_seconds'] for one in found):.0f}"]
    cells += [f"{mean(taus):.3f}", " ".join(f"{tau:.3f}" for tau in taus), f"{mean(one['tau_greedy'] for one in found):.3f}"]
    return cells if cycle is None else [*cells, f"{cycle:.2f}", f"{mean(taus) / cycle:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--cycles", type=Path)
    asked = parser.parse_args()
    by_entry: dict[str, list[Piece]] = defaultdict(list)
    for piece in read_study(asked.study / STUDY_FILE).pieces():
        if measured_at_end(piece.folder(asked.study)) is not None:
            by_entry[piece.label].append(piece)
    known = cycles(json.loads((asked.cycles / "summary.json").read_text(encoding="utf-8"))) if asked.cycles else {}
    first = next(iter(by_entry))
    rows = {}
    for label, pieces in by_entry.items():
        found = [last_held_out(piece.folder(asked.study)) for piece in pieces]
        rows[label] = row(label, found, known.get(label, known.get(first)))
    titles = ["entry", "steps", "blocks", "core-seconds", "tau, T = 1", "by seed", "tau, greedy"]
    titles += ["cycle", "tau / cycle"] if known else []
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for cells in sorted(rows.values(), key=lambda cells: -float(cells[4])):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

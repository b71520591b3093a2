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
from statistics import mean, median
from typing import Any

from hspec.evaluation.harness import AR
from hspec.evaluation.study import STUDY_FILE, Piece, read_study
from hspec.evaluation.study_run import validations
from hspec.training.log import measured_at_end


def cycles(summary: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Milliseconds of drafting, and the cycle in steps without drafts, by entrant under the first setting. Verification is the same work
    for all (but for a row): what differs there is noise, so that all have the median."""
    entrants = next(iter(summary["settings"].values()))["entrants"]
    step = entrants[AR]["ms_per_token"]
    drafters = {name: e for name, e in entrants.items() if name != AR}
    verifying = median(e["verify_ms"] for e in drafters.values())
    return {name: (e["draft_ms"], (e["draft_ms"] + verifying) / step) for name, e in drafters.items()}


def row(label: str, found: Sequence[Mapping[str, Any]], cycle: tuple[float, float] | None) -> list[str]:
    taus = [one["tau_sampling"] for one in found]
    cells = [label, f"{found[0]['steps']:,}", f"{found[0]['blocks']:,}", f"{mean(one['core_seconds'] for one in found):.0f}"]
    cells += [f"{mean(taus):.3f}", " ".join(f"{tau:.3f}" for tau in taus), f"{mean(one['tau_greedy'] for one in found):.3f}"]
    return cells if cycle is None else [*cells, f"{cycle[0]:.1f}", f"{cycle[1]:.2f}", f"{mean(taus) / cycle[1]:.3f}"]


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
        found = [validations(piece.folder(asked.study), "core_seconds")[-1] for piece in pieces]
        rows[label] = row(label, found, known.get(label, known.get(first)))
    titles = ["entry", "steps", "blocks", "core-seconds", "tau, T = 1", "by seed", "tau, greedy"]
    titles += ["drafting, ms", "cycle", "tau / cycle"] if known else []
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for cells in sorted(rows.values(), key=lambda cells: -float(cells[4])):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

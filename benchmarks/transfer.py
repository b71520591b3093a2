"""What drafters are worth on targets that they were not trained on: tau by target, and over that on the first one.

Folders of ``hspec eval``, of the same drafters and prompts on different targets; the first is of the target that the drafters were trained
for. Only prompts that all targets have answered under a setting count. Tau is pooled over them; intervals are 95 %, by 10,000
resamples of the prompts, the same ones for all targets, so that ratios are of pairs.

    python benchmarks/transfer.py results/original results/code results/qa
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.harness import AR, IDENTITY_FILE, RECORDS_FILE
from hspec.evaluation.records import Record, RecordFile, whole_groups
from hspec.evaluation.statistics import Resampling, in_words, verdict

Prompt = tuple[str, str]
"""Task and id."""


class Answers:
    """What one folder has, by setting, contender and prompt."""

    def __init__(self, folder: Path):
        path = folder / IDENTITY_FILE
        if not path.is_file():
            raise UsageError(f"{folder} holds no evaluation: {IDENTITY_FILE} is not there; make one with 'hspec eval --out'")
        self.name, about = folder.name, json.loads(path.read_text(encoding="utf-8"))
        self.target: dict[str, str] = about["target"]
        self.contenders = [c for c in about["contenders"] if about["contenders"][c]["method"] != AR]
        self.found: dict[tuple[str, str], dict[Prompt, Record]] = {}
        for record in whole_groups(RecordFile(folder / RECORDS_FILE).read(), list(about["contenders"])):
            self.found.setdefault((record.setting, record.contender), {})[record.task, record.id] = record

    def of(self, setting: str, contender: str) -> Mapping[Prompt, Record]:
        return self.found.get((setting, contender), {})


def compare(targets: Sequence[Answers], setting: str, contender: str) -> list[dict[str, Any]]:
    """A row for each target; none if they have no prompt in common.

    Raises:
        HSpecError: an answer without a step on one of the targets, so that there is no tau.
    """
    own = [target.of(setting, contender) for target in targets]
    prompts = sorted(set.intersection(*(set(records) for records in own)))
    if not prompts:
        return []
    rows, resampling, first = [], Resampling(), None
    for target, records in zip(targets, own, strict=True):
        counters = [records[prompt].counters for prompt in prompts]
        emitted, steps = (np.array([getattr(c, name) for c in counters], dtype=float) for name in ("emitted", "steps"))
        tau = resampling.ratio("all tasks", contender, emitted, steps)
        first = first or tau
        ratio = tau / first
        rows.append(
            {
                "target": target.name,
                **target.target,
                "setting": setting,
                "drafter": contender,
                "prompts": len(prompts),
                "tokens": int(emitted.sum()),
                "steps": int(steps.sum()),
                "looping": sum(turn.looping for prompt in prompts for turn in records[prompt].turns),
                "tau": tau.as_dict(),
                "over_first": {**ratio.as_dict(), "verdict": verdict(ratio)},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    given = parser.parse_args()
    try:
        targets = [Answers(folder) for folder in given.folders]
        settings = dict.fromkeys(setting for setting, _ in targets[0].found)
        rows = [row for s in settings for c in targets[0].contenders for row in compare(targets, s, c)]
        if not rows:
            raise UsageError(
                "the folders have no prompt, setting and drafter in common: run 'hspec eval' with the same options"
            )
    except HSpecError as error:
        sys.exit(f"transfer: {error}")
    for row in rows:
        said = (
            f"{row['setting']:8} {row['drafter']:8} {row['target']:12} {row['prompts']:4} prompts {row['tokens']:6} tokens "
            f"tau {in_words(row['tau'])}, over the first {in_words(row['over_first'], 3)} {row['over_first']['verdict']}"
        )
        print(json.dumps(row) if given.json else said)


if __name__ == "__main__":
    main()

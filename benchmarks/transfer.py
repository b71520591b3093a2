"""What drafters are worth on targets that they were not trained on: tau by target, and over that on the first one.

Of folders of ``hspec eval``, with the same drafters and prompts on different targets; the first is of the target that the drafters were
trained for. Only prompts that all targets have answered under a setting count. Tau is pooled over them; intervals are 95 %, by 10,000
resamples of the prompts, the same ones for all targets, so that ratios are of pairs.

    python benchmarks/transfer.py results/original results/code results/qa
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.harness import AR, IDENTITY_FILE, RECORDS_FILE
from hspec.evaluation.records import RecordFile, whole_groups
from hspec.evaluation.statistics import Resampling, in_words, verdict

Prompt = tuple[str, str]
"""Task and id."""


@dataclass(frozen=True)
class Sums:
    """Of one answered prompt."""

    emitted: int
    steps: int
    looping: int


class Answers:
    """What one folder has, by setting, drafter and prompt.

    Raises:
        UsageError: it holds no evaluation.
    """

    def __init__(self, folder: Path):
        self.name = folder.stem
        file = folder / IDENTITY_FILE
        if not file.is_file():
            raise UsageError(f"{folder} holds no evaluation: {IDENTITY_FILE} is not there; make one with 'hspec eval --out'")
        about = json.loads(file.read_text(encoding="utf-8"))
        self.target: dict[str, str] = about["target"]
        self.drafters = [name for name, contender in about["contenders"].items() if contender["method"] != AR]
        self.found: dict[tuple[str, str], dict[Prompt, Sums]] = {}
        for record in whole_groups(RecordFile(folder / RECORDS_FILE).read(), list(about["contenders"])):
            counters, looping = record.counters, sum(turn.looping for turn in record.turns)
            own = self.found.setdefault((record.setting, record.contender), {})
            own[record.task, record.id] = Sums(counters.emitted, counters.steps, looping)

    def of(self, setting: str, drafter: str) -> Mapping[Prompt, Sums]:
        return self.found.get((setting, drafter), {})


def compare(targets: Sequence[Answers], setting: str, drafter: str) -> list[dict[str, Any]]:
    """A row for each target; none if they have no prompt in common.

    Raises:
        HSpecError: an answer without a step on one of the targets, so that there is no tau.
    """
    own = [target.of(setting, drafter) for target in targets]
    prompts = sorted(set.intersection(*(set(answers) for answers in own)))
    if not prompts:
        return []
    rows, resampling, first = [], Resampling(), None
    for target, answers in zip(targets, own, strict=True):
        emitted = np.array([answers[prompt].emitted for prompt in prompts], dtype=float)
        steps = np.array([answers[prompt].steps for prompt in prompts], dtype=float)
        tau = resampling.ratio("all tasks", drafter, emitted, steps)
        first = first or tau
        ratio = tau / first
        rows.append(
            {
                "target": target.name,
                **target.target,
                "setting": setting,
                "drafter": drafter,
                "prompts": len(prompts),
                "tokens": int(emitted.sum()),
                "steps": int(steps.sum()),
                "looping": sum(answers[prompt].looping for prompt in prompts),
                "tau": tau.as_dict(),
                "over_first": {**ratio.as_dict(), "verdict": verdict(ratio)},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    given = parser.parse_args()
    try:
        targets = [Answers(folder) for folder in given.results]
        settings = dict.fromkeys(setting for setting, _ in targets[0].found)
        rows = [row for s in settings for c in targets[0].drafters for row in compare(targets, s, c)]
        if not rows:
            raise UsageError("they have no prompt, setting and drafter in common: run them with the same options")
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

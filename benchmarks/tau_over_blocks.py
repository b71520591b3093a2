"""Estimated tau of a series of drafters, one trained on from the other, over the blocks they have seen; what ten times more would give.

Every drafter is measured on the same blocks of the same held-out answers, as validation measures it (docs/training.md), so that logs of
different days and definitions are not compared. tau = a + b log10(blocks) is fitted by least squares; the span of its predictions with each
drafter left out in turn tells how much hangs on one of them. It is a line through a few points, of runs that differ in more than their
length: take it for a guess.

    python benchmarks/tau_over_blocks.py --run RUN 0.9e6=first 1.7e6=second 2.5e6=third

RUN is the folder of a training, whose run.yaml says what the target is and which documents are held out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hspec.drafters.checkpoint import load_drafter
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.data import prepare_data
from hspec.training.features import FeatureSource
from hspec.training.job import read_job
from hspec.training.loss import BlockLoss
from hspec.training.plan import RUN_FILE
from hspec.training.validation import Validation


def estimates(target: Target, folder: Path, held_out: Sequence[Any], config: Any) -> dict[str, float]:
    """Of one drafter: sampling, greedy, and how many blocks that rests on."""
    drafter = load_drafter(folder, target)
    validation = Validation(held_out, config, FeatureSource(target, drafter.config), drafter.max_draft)
    meter = validation(BlockLoss(drafter, target, config.for_block(drafter.max_draft)))
    found = meter.report()
    return {
        "k": drafter.max_draft,
        "sampling": found["tau_sampling"],
        "greedy": found["tau_greedy"],
        "held_out_blocks": meter.blocks,
    }


def fitted(blocks: Sequence[float], taus: Sequence[float]) -> dict[str, float]:
    """The line, what it says of ten times the most blocks, and the same without each point in turn."""
    x, y = np.log10(blocks), np.asarray(taus)
    slope, intercept = np.polyfit(x, y, 1)
    ahead = x.max() + 1
    without = [np.polyval(np.polyfit(np.delete(x, i), np.delete(y, i), 1), ahead) for i in range(len(x))] if len(x) > 2 else []
    return {
        "intercept": float(intercept),
        "tau_a_decade": float(slope),
        "residual": float(math.sqrt(np.mean((np.polyval([slope, intercept], x) - y) ** 2))),
        "at_ten_times": float(np.polyval([slope, intercept], ahead)),
        "at_ten_times_least": float(min(without, default=math.nan)),
        "at_ten_times_most": float(max(without, default=math.nan)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("drafters", nargs="+", metavar="BLOCKS=FOLDER")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    job = read_job(arguments.run / RUN_FILE)
    target = load_target(job.target)
    held_out = prepare_data(job, target, lambda _: None).held_out
    series = {}
    for source in arguments.drafters:
        blocks, _, folder = source.partition("=")
        series[float(blocks)] = {"folder": folder, **estimates(target, Path(folder), held_out, job.train)}
        print(json.dumps({"blocks": float(blocks), **series[float(blocks)]}), flush=True)
    for kind in ("sampling", "greedy"):
        print(json.dumps({"fit": kind, **fitted(list(series), [found[kind] for found in series.values()])}))


if __name__ == "__main__":
    main()

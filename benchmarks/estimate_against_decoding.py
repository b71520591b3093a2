"""How far the tau that validation estimates is from the tau that decoding reaches, and why.

The drafter that ships decodes held-out prompts. Then the text that came out is looked at as validation looks at it, with true tokens
before every slot:

    product       1 + a_1 + a_1 a_2 + ... of mean acceptances by slot, at every token of the answers
    estimate      the same with conditional acceptances, as hspec.training.validation does it, at every token
    own anchors   the same, but only at the anchors where decoding stood

From product to estimate slots of a block are no longer taken for independent; from estimate to own anchors easy text, which
decoding passes with few anchors, no longer counts for more than it does there. What is left is where answers end, and at T = 1
the luck of the draws. Intervals are 95 %, by resampling prompts, of the estimate over the decoded tau.

    python benchmarks/estimate_against_decoding.py --prompts 16 --max-tokens 96
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hspec.api import drafter_folder, load_drafter, make_request
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request, Result
from hspec.drafters.checkpoint import load_drafter as load_checkpoint
from hspec.targets.sources import load_target
from hspec.training.blocks import Anchors, cut_blocks
from hspec.training.config import TrainConfig
from hspec.training.data import held_out_prompts
from hspec.training.examples import Example, collate
from hspec.training.features import FeatureSource
from hspec.training.loss import BlockLoss
from hspec.training.validation import Meter, estimated_tau

RESAMPLES = 2000


@dataclass(frozen=True)
class Compared:
    """One answer: what decoding did, and what validation sees in it."""

    steps: int
    emitted: int
    everywhere: Meter
    own: Meter


def compare(loss: BlockLoss, source: FeatureSource, request: Request, result: Result, k: int) -> Compared | None:
    """None for an answer without a step."""
    if not result.runs:
        return None
    first = len(request.prompt)  # the answer's first token came with the prefill, and is the first anchor
    tokens = [*request.prompt, *result.tokens]
    stood = first + np.concatenate(([0], np.cumsum(result.runs)[:-1]))
    example = Example("", tokens, [j > first for j in range(len(tokens))])
    everywhere = measured(loss, source, example, range(first, len(tokens) - 1), k)
    return Compared(len(result.runs), sum(result.runs), everywhere, measured(loss, source, example, stood.tolist(), k))


def measured(loss: BlockLoss, source: FeatureSource, example: Example, anchors: Sequence[int], k: int) -> Meter:
    """Validation's numbers of one document at these anchors."""
    batch, positions, meter = collate([example]), torch.tensor(anchors)[None], Meter()
    with torch.no_grad():
        blocks = cut_blocks(source(batch), batch, Anchors(positions, torch.ones_like(positions, dtype=torch.bool)), k)
        meter.add(loss(blocks, loss.config.weights(loss.config.steps), 1.0), len(anchors))
    return meter


def summary(answers: Sequence[Compared], greedy: bool) -> dict[str, Any]:
    """Decoded tau, the three estimates, and each estimate over the decoded tau with its interval."""
    k = max(a.everywhere.slots.shape[1] for a in answers)

    def stacked(meters: Sequence[Meter]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(m.slots, (0, k - m.slots.shape[1])) for m in meters])

    steps, emitted = (np.array([getattr(a, name) for a in answers], dtype=float) for name in ("steps", "emitted"))
    everywhere, own = stacked([a.everywhere for a in answers]), stacked([a.own for a in answers])
    product, conditional = ((2, 0), (6, 5)) if greedy else ((1, 0), (4, 3))  # rows of Meter.slots
    kinds = {"product": (everywhere, product), "estimate": (everywhere, conditional), "own anchors": (own, conditional)}

    def taus(picked: np.ndarray) -> dict[str, float]:
        rows = {name: slots[picked].sum(0) for name, (slots, _) in kinds.items()}
        return {
            name: estimated_tau((rows[name][part] / rows[name][whole].clamp_min(1e-9)).tolist())
            for name, (_, (part, whole)) in kinds.items()
        }

    rng, all_of_them = np.random.default_rng(0), np.arange(len(answers))
    decoded = emitted.sum() / steps.sum()
    picks = rng.integers(0, len(answers), (RESAMPLES, len(answers)))
    resampled = [{name: tau / (emitted[p].sum() / steps[p].sum()) for name, tau in taus(p).items()} for p in picks]
    out: dict[str, Any] = {"prompts": len(answers), "steps": int(steps.sum()), "decoded": round(decoded, 4)}
    for name, tau in taus(all_of_them).items():
        low, high = np.percentile([r[name] for r in resampled], [2.5, 97.5])
        out[name] = {"tau": round(tau, 4), "over decoded": round(tau / decoded, 4), "interval": [round(low, 4), round(high, 4)]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", help="a folder; the drafter that ships if left out")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="write the results there as JSON too")
    given = parser.parse_args()
    target = load_target(given.target)
    drafter, learner = load_drafter(given.drafter, target), load_checkpoint(drafter_folder(given.drafter, target.name), target)
    k = learner.max_draft
    loss, source = BlockLoss(learner, target, TrainConfig()), FeatureSource(target, learner.config)
    prompts = held_out_prompts(target, ["sharegpt"], given.prompts)
    results: dict[str, Any] = {"target": target.name, "k": k, "max_tokens": given.max_tokens, "load": os.getloadavg()}
    for name, temperature in (("greedy", 0.0), ("T = 1", 1.0)):
        params = SamplingParams(temperature=temperature, max_tokens=given.max_tokens)
        requests = [
            make_request(target, p.text, params.model_copy(update={"seed": int(p.id[:8], 16)})) for p in prompts
        ]  # fmt: skip
        pairs = zip(requests, Engine(target, drafter, k).generate(requests), strict=True)
        answers = [c for request, result in pairs if (c := compare(loss, source, request, result, k)) is not None]
        results[name] = summary(answers, greedy=temperature == 0)
    text = json.dumps(results, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

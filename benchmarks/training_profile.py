"""Where a training step's time goes: parts of the step, matrix products against all else, and the products' speed against their best.

    python benchmarks/training_profile.py [--config JOB.yaml] [--steps 10] [--threads 1]

Seconds of parts and products are the processor's, not the clock's, so that other work on the machine hardly changes shares. The
profiler slows small operations down a little: parts are timed without it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hspec.cli.options import prefer_large_pages
from hspec.evaluation.study import read_study
from hspec.training.build import new_drafter, training_target
from hspec.training.data import prepare_data
from hspec.training.estimate import product_speed
from hspec.training.job import Job, read_job
from hspec.training.trainer import Trainer

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu")
"""Attention's kernel is one too: two products with a softmax between."""
WARM_UP, PROFILED = 3, 4
FORWARD = "drafter, forward, and objective"


class Clock:
    """Processor seconds spent in calls, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent[name] += time.process_time() - began

        setattr(owner, method, timed)


def flops(event: Any) -> float:
    """Of products of two matrices, or of batches of them."""
    shapes = event.input_shapes[:2]
    if event.key not in PRODUCTS[:2]:
        return 0.0
    (*batch, n, k), m = shapes[0], shapes[1][-1]
    return 2.0 * n * k * m * (batch[0] if batch else 1) * event.count


def descending(values: dict[str, float], count: int | None = None) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1])[:count])


def usual_job() -> Job:
    """The comparison's, on the answers of the data: what the text says makes no difference to time."""
    return read_study(None).job.model_copy(update={"own_answers": False, "max_prompts": 500})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    job = usual_job() if asked.config is None else read_job(asked.config)
    target = training_target(job)
    data = prepare_data(job, target, lambda line: None)
    drafter = new_drafter(job, target, data)
    trainer = Trainer(job.train, target, drafter, data.train, data.held_out, Path(tempfile.mkdtemp()))
    # As if the run were far enough for whole blocks: its dearest steps, and most of its time.
    trainer.step = int(job.train.steps * 0.9)
    clock = Clock()
    clock.around(trainer, "_blocks", "target and blocks")
    clock.around(drafter, "predict", "drafter, forward")
    clock.around(trainer.learner, "loss", FORWARD)
    clock.around(trainer.learner, "gradients", "backward")
    clock.around(trainer.learner, "update", "optimiser")
    for _ in range(WARM_UP):
        trainer.train_step()
    clock.spent.clear()
    before, began = trainer.blocks_seen, time.process_time()
    for _ in range(asked.steps):
        trainer.train_step()
    spent = time.process_time() - began
    blocks = trainer.blocks_seen - before
    parts = clock.spent.copy()
    parts["objective"] = parts.pop(FORWARD) - parts["drafter, forward"]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(PROFILED):
            trainer.train_step()
    events = found.key_averages(group_by_input_shape=True)
    total = sum(e.self_cpu_time_total for e in events)
    products = [e for e in events if e.key in PRODUCTS]
    plain = [e for e in products if flops(e)]
    reached = sum(map(flops, plain)) / (1e-6 * sum(e.self_cpu_time_total for e in plain))
    best = product_speed(job.train.precision, seconds=1.0)
    others: dict[str, float] = defaultdict(float)
    for e in events:
        if e.key not in PRODUCTS:
            others[e.key] += e.self_cpu_time_total / total
    report = {
        "core_seconds_a_step": spent / asked.steps,
        "blocks_a_core_second": blocks / spent,
        "parts": descending({name: seconds / spent for name, seconds in parts.items()}),
        "products_share": sum(e.self_cpu_time_total for e in products) / total,
        "products_gflops": reached / 1e9,
        "best_gflops": best / 1e9,
        "other_operations": descending(others, 12),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    prefer_large_pages()
    main()

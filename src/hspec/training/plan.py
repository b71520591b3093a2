"""What a run would take, from its settings alone, before it is started."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from hspec.drafters.checkpoint import read_config
from hspec.drafters.config import DrafterConfig
from hspec.drafters.parameters import layout, parameters_by_part
from hspec.drafters.presets import PRESETS
from hspec.errors import HSpecError, UsageError
from hspec.remote.vllm import vllm_options
from hspec.targets.sources import ALIASES, describe
from hspec.training.checkpoints import check_resumable, holds_run
from hspec.training.config import TrainConfig
from hspec.training.estimate import (
    ANSWER_TOKENS,
    ANSWERING_SHARE,
    TRAINING_SHARE,
    TargetSize,
    block_flops,
    duration,
    product_speed,
    total_blocks,
    total_flops,
)
from hspec.training.feature_server import needed_streams
from hspec.training.features import feature_bytes
from hspec.training.job import Job, check_answerer, shape
from hspec.training.objective import chunk_bytes
from hspec.training.shape import preset_for
from hspec.training.sources import check_source, describe_sources
from hspec.training.trackers import check_trackers

RUN_FILE = "run.yaml"
"""The settings of a run, in its folder."""


@dataclass
class Plan:
    """What a run would take, before it is started."""

    lines: dict[str, str] = field(default_factory=dict)


def plan(job: Job, folder: Path, resume: bool = False) -> Plan:
    """Parameters, memory, disk and time of a run, from its settings alone.

    Raises:
        UsageError: something that the run needs is not there.
        HSpecError: the disk is too small.
    """
    check_run(folder, resume)
    check_answerer(job)
    check_trackers(job.train.trackers)
    for source in job.data:
        check_source(source)
    config = read_config(folder) if resume else shape(job)
    parts = parameters_by_part(config)
    parameters = sum(parts.values())
    c = job.train.for_block(config.max_draft)
    slots = [s.slots for s in c.growth]
    frozen = config.target.vocab_size * config.hidden_size + config.draft_vocab_size * config.hidden_size
    objective = chunk_bytes(c.objective_chunk, config.target.vocab_size, config.draft_vocab_size)
    memory = parameters * 4 * 5 + frozen * 4 + objective
    # Weights, average and two moments in each state, and one more while it is written; the average at the top, the best one, and
    # one of them while it is written.
    disk = parameters * 4 * (4 * (c.keep + 1) + 3)
    kept = "" if c.features == "stream" else f"; features take {feature_bytes(config) / 1e3:.1f} KB a token, in {c.features}"
    free = shutil.disk_usage(_existing(folder)).free
    if disk > free:
        raise HSpecError(
            f"the run keeps about {disk / 1e6:.0f} MB in {folder}, only {free / 1e6:.0f} MB are free there: choose another --out"
        )
    amount = "all prompts" if job.max_prompts is None else f"at most {job.max_prompts:,} prompts"
    if job.own_answers and job.max_prompts is None:
        amount += " (that can take days: --max-prompts sets how many)"
    start = f"drafter {job.init_from}" if job.init_from is not None else f"preset {job.preset}"
    return Plan(
        {
            "method": config.method,
            "target": f"{job.target} ({start}; {layout(config)})" + _where(job, config),
            "trainable parameters": f"{parameters / 1e6:.1f} M: "
            + ", ".join(f"{n} {v / 1e6:.2f}" for n, v in parts.items() if v),
            "data": describe_sources(job.data)
            + f"; {amount}; "
            + ("the target writes the answers" if job.own_answers else "answers as in the data"),
            "steps": f"{c.steps:,} of {c.batch_tokens:,} tokens; blocks grow {' -> '.join(map(str, slots))} slots",
            "compute": f"{block_flops(config, max(slots)) / 1e9:.2f} GFLOP a block of {max(slots)} slots; {c.precision} products",
            "time": _time(job, c, config),
            "memory": f"about {memory / 1e6:.0f} MB beside the target, {objective / 1e6:.0f} MB of it logits",
            "disk": f"about {disk / 1e6:.0f} MB in {folder} ({free / 1e9:.0f} GB free){kept}",
            "checkpoints": f"every {c.save_minutes:g} minutes, the last {c.keep} and the best are kept; validation every "
            f"{c.validate_minutes:g}",
        }
    )


def _where(job: Job, config: DrafterConfig) -> str:
    """Where the target's layers run, if not here, and what vLLM must be told for it."""
    server = job.feature_server
    if server is None:
        return ""
    options = f", started with {vllm_options(needed_streams(config))}" if server.vllm else ""
    return f"; its layers run at {', '.join(server.at)}{options}"


def run_flops(job: Job) -> float:
    """Floating-point operations of a whole run, by count.

    Raises:
        UsageError: target or drafter are not there, or do not fit together.
    """
    config = shape(job)
    return total_flops(config, _target_size(job, config), job.train.for_block(config.max_draft))


def _target_size(job: Job, config: DrafterConfig) -> TargetSize:
    name = ALIASES.get(job.target, job.target)
    known = next((p for p in PRESETS.values() if p.target.name in (name, config.target.name)), None)
    return TargetSize.of(known or preset_for(describe(job.target), name))


def _time(job: Job, train: TrainConfig, config: DrafterConfig) -> str:
    """Hours of training, and of answering if all is to be answered; see :mod:`hspec.training.estimate`."""
    size = _target_size(job, config)
    speed = product_speed(train.precision)
    seconds = total_flops(config, size, train) / (speed * TRAINING_SHARE)
    blocks = total_blocks(train)
    line = f"about {duration(seconds)} for {blocks:,.0f} blocks, {blocks / seconds:,.0f} a second"
    if job.own_answers:
        rate = speed * ANSWERING_SHARE / (2 * (size.layers + size.head))
        line += f"; answers at about {rate:,.0f} tokens a second"
        if job.max_prompts is not None:
            line += f", {duration(job.max_prompts * ANSWER_TOKENS / rate)} if none is there yet"
    return line + f" (this machine's products: {speed / 1e9:,.0f} GFLOP a second)"


def check_run(folder: Path, resume: bool) -> None:
    """Whether a run can be started, or resumed, in a folder.

    Raises:
        UsageError: nothing can be written there, it holds another run, or none to resume.
    """
    place = _existing(folder)
    if not place.is_dir():
        raise UsageError(f"--out {folder}: {place} is a file, a folder is needed")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--out {folder}: no permission to write in {place}: choose another folder")
    if resume:
        check_resumable(folder)
    elif holds_run(folder):
        raise UsageError(f"{folder} already holds a run: go on with --resume, or choose another --out")
    elif not (folder / RUN_FILE).exists() and [*folder.glob("config.json"), *folder.glob("*.safetensors")]:
        raise UsageError(f"{folder} holds a model, which the run would overwrite: choose another --out")


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path

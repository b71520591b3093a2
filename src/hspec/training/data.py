"""From the sources of a job to training and held-out documents; the target answers if it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hspec.cache_folder import cache_folder
from hspec.errors import HSpecError
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from hspec.training.answers import Answerer, AnswerSettings, thinking_template, write_answers
from hspec.training.conversations import Conversation
from hspec.training.corpus import Corpus
from hspec.training.documents import check_template, from_answers, from_conversations
from hspec.training.engine_answers import EngineAnswers
from hspec.training.job import TEMPLATE_TOKENS, AnswerConfig, Job
from hspec.training.prompts import Prompt, choose, clean_prompts, prompt_id
from hspec.training.server_answers import Server, ServerAnswers
from hspec.training.sources import Say, SourceConfig, describe_sources, stream_sources

HELD_OUT = 128
"""Documents of validation, at most."""


@dataclass
class Data:
    """Training and held-out documents."""

    train: Corpus
    held_out: Corpus


def prepare_data(job: Job, target: Target, say: Say) -> Data:
    """Read, clean, split by hash and, if asked, let the target answer.

    Raises:
        UsageError: a source or a server is not there, a package is missing, or the chat template cannot do what is asked.
        HSpecError: nothing usable is left, or the server's answers are not usable.
    """
    template = thinking_template(target.template, job.answers.thinking)
    check_template(template, job.own_answers)
    limit = job.answers.max_prompt_tokens - TEMPLATE_TOKENS if job.own_answers else 512
    prompts, cleaned = clean_prompts(
        stream_sources(job.data, say), lambda text: len(target.tokenizer(text).input_ids), max_tokens=limit
    )
    say(
        f"{cleaned.kept:,} prompts kept of {cleaned.seen:,} ({cleaned.not_english:,} not English, {cleaned.length:,} too short or "
        f"long, {cleaned.duplicate:,} duplicates, {cleaned.no_prompt:,} empty)"
    )
    if not prompts:
        raise HSpecError(
            f"no prompt is left after cleaning: {describe_sources(job.data)} has no English first user turn of 8 to {limit} tokens"
        )
    training = choose([p for p in prompts if not p.held_out], job.max_prompts, job.weights)
    held_out = choose([p for p in prompts if p.held_out], HELD_OUT, job.weights)
    if len(job.data) > 1:
        say(_by_source(job, training))
    if job.own_answers:
        return _answered(job, target, _answerer(job.answers, target, template), training, held_out, say)
    longest = min(job.train.max_tokens, target.max_positions)
    return _as_written(job, template, longest, training, held_out, say)


def _by_source(job: Job, prompts: Sequence[Prompt]) -> str:
    """How many prompts each source gives."""
    counts = [sum(prompt.source == number for prompt in prompts) for number in range(len(job.data))]
    if job.weights and 0 in counts:
        none = job.data[counts.index(0)].label
        raise HSpecError(f"{none} has a weight but no prompt to train on: leave it out of data, or raise max_prompts")
    given = (f"{count:,} of {source.label}" for count, source in zip(counts, job.data, strict=True))
    return f"prompts for training: {', '.join(given)}"


def _answerer(config: AnswerConfig, target: Target, template: ChatTemplate) -> Answerer:
    if config.server is None:
        return EngineAnswers(target, template)
    server = Server(config.server, config.concurrency, config.api_key_env, config.timeout)
    return ServerAnswers(target, server, template)


def _answered(
    job: Job, target: Target, answerer: Answerer, training: Sequence[Prompt], held_out: Sequence[Prompt], say: Say
) -> Data:
    settings = job.answers.settings()
    if isinstance(answerer, ServerAnswers) and settings.model is None:
        settings = replace(settings, model=answerer.only_model())
    # The held-out answers are drawn alike whatever the settings, so that runs can be compared by them.
    plain = AnswerSettings()
    held_settings = replace(settings, temperatures=(1.0,), max_tokens=plain.max_tokens, seed=plain.seed)
    longest, folder = job.train.max_tokens, cache_folder() / "answers" / f"{target.weight_hash()}-{target.template.hash}"

    def answers(prompts: Sequence[Prompt], name: str, settings: AnswerSettings) -> Corpus:
        """Kept by target and settings, and only those that are missing are drawn."""
        if not prompts:
            return Corpus(job.weights)
        path = folder / f"{name}-{settings.key}.jsonl"
        say(f"letting the target answer {len(prompts):,} {name} prompts (kept in {path}) ...")
        written = write_answers(
            answerer, prompts, path, settings, _every(50, say), lambda: say(f"waiting: another process writes to {path}")
        )
        say(f"{written:,} answers written now")
        return from_answers(path, longest, {p.id: p.source for p in prompts}, job.weights)

    data = Data(answers(training, "train", settings), answers(held_out, "held-out", held_settings))
    if isinstance(answerer, ServerAnswers) and answerer.left_out:
        (reason, _), *_ = answerer.left_out.most_common(1)
        say(f"{answerer.left_out.total():,} prompts have no usable answer by the server, most often because {reason}")
    return data


def _as_written(
    job: Job, template: ChatTemplate, longest: int, training: Sequence[Prompt], held_out: Sequence[Prompt], say: Say
) -> Data:
    """The sources are read once more, and only what is wanted is kept, as tokens."""
    say("turning conversations into tokens ...")
    refused: list[str] = []

    def note(conversation: Conversation, error: HSpecError) -> None:
        refused.append(f"{conversation.id}: {error}")

    data, held = Data(Corpus(job.weights), Corpus(job.weights)), {p.id for p in held_out}
    wanted = _those_of(job.data, [*training, *held_out])
    for conversation, example in from_conversations(wanted, template, longest, note):
        corpus = data.held_out if prompt_id(conversation.first_user_turn or "") in held else data.train
        corpus.append(example, conversation.source)
    if refused:
        say(f"{len(refused):,} conversations left out, first {refused[0]}")
    if not data.train:
        why = f"; first refused: {refused[0]}" if refused else ""
        raise HSpecError(
            f"none of the {len(training):,} conversations for training has an answer by the assistant{why}: give data with answers, "
            f"or let the target answer (--own-answers)"
        )
    return data


def _those_of(sources: Sequence[SourceConfig], prompts: Sequence[Prompt]) -> Iterator[Conversation]:
    """The first conversation that begins with each of the prompts."""
    wanted = {p.id for p in prompts}
    for conversation in stream_sources(sources):
        if not wanted:
            return
        id = prompt_id(conversation.first_user_turn or "")
        if id in wanted:
            wanted.remove(id)
            yield conversation


def _every(count: int, say: Say) -> Callable[[int, int], None]:
    def on_answer(answers: int, tokens: int) -> None:
        if answers % count == 0:
            say(f"  {answers:,} answers, {tokens:,} tokens")

    return on_answer


def held_out_prompts(target: Target, sources: Sequence[str | SourceConfig], limit: int) -> list[Prompt]:
    """The first ``limit`` prompts that training never sees, by hash.

    Raises:
        HSpecError: there is none.
    """
    configs = [SourceConfig(source=s) if isinstance(s, str) else s for s in sources]
    prompts, report = clean_prompts(stream_sources(configs), lambda text: len(target.tokenizer(text).input_ids))
    held_out = [p for p in prompts if p.held_out][:limit]
    if not held_out:
        raise HSpecError(
            f"{describe_sources(configs)}: none of the {report.kept:,} usable prompts is held out (3 % are, by hash): give more prompts"
        )
    return held_out

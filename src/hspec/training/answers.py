"""Answers of the target to prompts, in a file that grows: who wrote them, how, and which are missing.

A drafter is to guess what the target says, so it is trained on what the target says. Every finished answer is appended to a JSONL
file at once, so an interrupted run goes on where it was; a JSON file beside it tells how all of them were drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from hspec.errors import HSpecError, UsageError
from hspec.files import append_line, reason, whole_lines, write_text
from hspec.locks import alone
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from hspec.training.prompts import Prompt

Thinking = Literal["default", "on", "off"]


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are drawn. ``temperatures`` are dealt to prompts by their hash; 0 is greedy."""

    temperatures: tuple[float, ...] = (1.0, 0.8, 1.0, 0.5)
    max_tokens: int = 256
    max_prompt_tokens: int = 320
    seed: int = 0
    batch: int = 128
    """How many the embedded engine draws at once."""
    thinking: Thinking = "default"
    """What the chat template is told (see :func:`thinking_template`)."""
    model: str | None = None
    """The name that a server has for the target; None if it is run here."""

    @property
    def deciding(self) -> dict[str, Any]:
        """What decides an answer besides target and prompt. What is as it was before there was a choice is left out."""
        names = ("temperatures", "max_tokens", "seed")
        return {name: getattr(self, name) for name in names} | {
            name: getattr(self, name) for name in ("thinking", "model") if getattr(self, name) != getattr(AnswerSettings, name)
        }

    @property
    def key(self) -> str:
        """8 hex digits of what decides an answer: answers drawn otherwise are kept apart."""
        return hashlib.sha256(json.dumps(self.deciding).encode()).hexdigest()[:8]

    def temperature(self, prompt: Prompt) -> float:
        return self.temperatures[int(prompt.id[8:16], 16) % len(self.temperatures)]


class Answerer(Protocol):
    """Lets the target answer, here or elsewhere."""

    template: ChatTemplate
    """With which the prompts are rendered."""

    def __call__(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> Iterator[dict[str, Any]]:
        """Records ``id``, ``messages``, ``finish``, ``temperature``, ``prompt_tokens`` and ``tokens``, as they are finished. Prompts
        that are too long have none."""
        ...


def thinking_template(template: ChatTemplate, thinking: Thinking) -> ChatTemplate:
    """The template with its ``enable_thinking`` set, or as it is by default.

    Raises:
        UsageError: the template has no such switch.
    """
    if thinking == "default":
        return template
    if "enable_thinking" not in (template.tokenizer.chat_template or ""):
        raise UsageError(f"answers.thinking: {thinking}, but the target's chat template has no enable_thinking: leave it out")
    return replace(template, options={"enable_thinking": thinking == "on"})


def short_prompts(
    target: Target, template: ChatTemplate, prompts: Sequence[Prompt], longest: int
) -> Iterator[tuple[Prompt, list[int]]]:
    """Those prompts that have ``longest`` tokens at most, and leave room for an answer, with their tokens."""
    longest = min(longest, target.max_positions - 2)
    for prompt in prompts:
        ids = template.encode([{"role": "user", "content": prompt.text}])
        if len(ids) <= longest:
            yield prompt, ids


def write_answers(
    answerer: Answerer,
    prompts: Sequence[Prompt],
    path: Path,
    settings: AnswerSettings,
    on_answer: Callable[[int, int], None] | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> int:
    """Answer every prompt that ``path`` does not hold yet; returns how many were answered now.

    ``on_answer(answers, tokens)`` is called with the running totals. One process at a time writes to a file; another one
    waits, and calls ``on_wait()`` first.

    Raises:
        HSpecError: the file holds answers that were drawn otherwise, is damaged or cannot be written. What was written is kept.
    """
    answers = tokens = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path, wait=True, on_wait=on_wait):
            _note(path.with_suffix(".json"), answerer.template.hash, settings)
            done = answered_ids(path)
            todo = [p for p in prompts if p.id not in done]
            path.touch()
            for record in answerer(todo, settings):
                append_line(path, json.dumps(record))
                answers, tokens = answers + 1, tokens + len(record["tokens"])
                if on_answer is not None:
                    on_answer(answers, tokens)
    except OSError as error:
        raise HSpecError(
            f"cannot write answers to {path}: {reason(error)}. What was written is kept; free some space and go on"
        ) from error
    return answers


def _note(path: Path, template_hash: str, settings: AnswerSettings) -> None:
    """Leave a record of how the answers are drawn, or compare with the one that is there."""
    record = json.loads(json.dumps(asdict(settings) | {"template": template_hash}))
    if not path.exists():
        write_text(path, json.dumps(record, indent=2) + "\n")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        other = [name for name in (*settings.deciding, "thinking", "model", "template") if before.get(name) != record[name]]
    except (OSError, ValueError, AttributeError) as error:
        raise HSpecError(
            f"cannot read how the answers beside {path} were drawn ({reason(error)}): move both files away"
        ) from error
    if other:
        shown = ", ".join(f"{name} {before.get(name)!r}, now {record[name]!r}" for name in dict.fromkeys(other))
        raise HSpecError(
            f"the answers beside {path} were drawn otherwise ({shown}): move both files away, or take the same settings"
        )


def answered_ids(path: Path) -> set[str]:
    """Ids of the answers a file holds; a last line that an interruption cut short is left out.

    Raises:
        UsageError: it is the file of something else.
        HSpecError: the file cannot be read, or another line is damaged.
    """
    ids: set[str] = set()
    try:
        lines = whole_lines(path, begins="{")
    except OSError as error:
        raise HSpecError(f"cannot read the answers in {path}: {reason(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            ids.add(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise HSpecError(f"{path}, line {number}: not an answer record ({error!r}): remove that line") from error
    return ids

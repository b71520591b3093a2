"""Letting the target write its own answers.

A drafter is to guess what the target says, so it is trained on what the target says. Prompts are answered in one large,
continuously refilled batch; every finished answer is appended to a JSONL file at once, so an interrupted run goes on where
it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hspec.decoding.randomness import Purpose, sample, uniform
from hspec.errors import HSpecError
from hspec.files import drop_cut_line, reason
from hspec.targets.target import Target
from hspec.training.prompts import Prompt


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are drawn. ``temperatures`` are dealt to prompts by their hash; 0 is greedy."""

    temperatures: tuple[float, ...] = (1.0, 0.8, 1.0, 0.5)
    max_tokens: int = 256
    max_prompt_tokens: int = 320
    seed: int = 0
    batch: int = 128

    @property
    def key(self) -> str:
        """What decides an answer besides target and prompt, as 8 hex digits: answers drawn otherwise are kept apart."""
        deciding = {"temperatures": self.temperatures, "max_tokens": self.max_tokens, "seed": self.seed}
        return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:8]

    def temperature(self, prompt: Prompt) -> float:
        return self.temperatures[int(prompt.id[8:16], 16) % len(self.temperatures)]


@dataclass
class _Row:
    prompt: Prompt
    prompt_ids: list[int]
    answer: list[int]
    anchor: int


def write_answers(
    target: Target,
    prompts: Sequence[Prompt],
    path: Path,
    settings: AnswerSettings,
    on_answer: Callable[[int, int], None] | None = None,
) -> int:
    """Answer every prompt that ``path`` does not hold yet; returns how many were answered now.

    ``on_answer(answers, tokens)`` is called with the running totals.
    """
    done = answered_ids(path)
    todo = [p for p in prompts if p.id not in done]
    answers = tokens = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for record in _answer(target, todo, settings):
                file.write(json.dumps(record) + "\n")
                file.flush()
                answers, tokens = answers + 1, tokens + len(record["tokens"])
                if on_answer is not None:
                    on_answer(answers, tokens)
    except OSError as error:
        raise HSpecError(
            f"cannot write answers to {path}: {reason(error)}. What was written is kept; free some space and go on"
        ) from error
    return answers


def answered_ids(path: Path) -> set[str]:
    """Ids of the answers a file holds; a last line that an interruption cut short is dropped from the file.

    Raises:
        HSpecError: the file cannot be read, or another line is damaged.
    """
    ids: set[str] = set()
    try:
        lines = drop_cut_line(path).splitlines()
    except OSError as error:
        raise HSpecError(f"cannot read the answers in {path}: {reason(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            ids.add(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise HSpecError(f"{path}, line {number}: not an answer record ({error!r}): remove that line") from error
    return ids


@torch.no_grad()
def _answer(target: Target, prompts: Sequence[Prompt], settings: AnswerSettings) -> Iterator[dict[str, Any]]:
    """The batch: rows in use are a prefix of the cache's rows; a finished row is refilled, or closed by the last one."""
    queue, batch = _tokenised(target, prompts, settings), min(settings.batch, len(prompts))
    cache = target.new_cache(batch, min(settings.max_prompt_tokens + settings.max_tokens, target.max_positions))
    rows: list[_Row] = []
    while True:
        while len(rows) < batch and (following := next(queue, None)) is not None:
            rows.append(_admit(target, cache.rows(len(rows), len(rows) + 1), *following, settings))
            cache.lengths[len(rows) - 1] = len(rows[-1].prompt_ids)
        if not rows:
            return
        for index in range(len(rows) - 1, -1, -1):
            row = rows[index]
            row.answer.append(row.anchor)
            ended = row.anchor in target.eos_ids
            if ended or len(row.answer) == min(settings.max_tokens, target.max_positions - len(row.prompt_ids)):
                yield _record(target, row, settings, "stop" if ended else "length")
                last = len(rows) - 1
                if index != last:
                    cache.move_row(last, index)
                    rows[index] = rows[last]
                rows.pop()
        if rows:
            _step(target, cache, rows, settings)


def _tokenised(target: Target, prompts: Sequence[Prompt], settings: AnswerSettings) -> Iterator[tuple[Prompt, list[int]]]:
    """Those prompts that are short enough, and leave room for an answer."""
    longest = min(settings.max_prompt_tokens, target.max_positions - 2)
    for prompt in prompts:
        ids = target.template.encode([{"role": "user", "content": prompt.text}])
        if len(ids) <= longest:
            yield prompt, ids


def _admit(target: Target, row_cache: Any, prompt: Prompt, ids: list[int], settings: AnswerSettings) -> _Row:
    row_cache.lengths = [0]
    output = target.prefill(torch.tensor([ids], device=target.device), row_cache)
    row = _Row(prompt, ids, [], 0)
    row.anchor = int(_draw(target.logits(output.hidden[:, -1]), [row], settings)[0])
    return row


def _step(target: Target, cache: Any, rows: list[_Row], settings: AnswerSettings) -> None:
    used = cache.rows(0, len(rows))
    output = target.forward(torch.tensor([[row.anchor] for row in rows], device=target.device), used)
    used.advance([1] * len(rows))
    cache.lengths[: len(rows)] = used.lengths
    for row, token in zip(rows, _draw(target.logits(output.hidden[:, -1]), rows, settings).tolist(), strict=True):
        row.anchor = token


def _draw(logits: Tensor, rows: list[_Row], settings: AnswerSettings) -> Tensor:
    temperatures = torch.tensor([settings.temperature(row.prompt) for row in rows], device=logits.device)
    greedy = temperatures == 0
    scaled = logits / temperatures.masked_fill(greedy, 1.0)[:, None]
    u = torch.tensor(
        [uniform(settings.seed ^ int(row.prompt.id, 16), len(row.answer), Purpose.TARGET) for row in rows],
        dtype=torch.float64,
        device=logits.device,
    )
    return torch.where(greedy, logits.argmax(-1), sample(scaled.softmax(-1), u))


def _record(target: Target, row: _Row, settings: AnswerSettings, finish: str) -> dict[str, Any]:
    answer = row.answer[:-1] if finish == "stop" else row.answer
    return {
        "id": row.prompt.id,
        "messages": [
            {"role": "user", "content": row.prompt.text},
            {"role": "assistant", "content": target.tokenizer.decode(answer)},
        ],
        "finish": finish,
        "temperature": settings.temperature(row.prompt),
        "prompt_tokens": row.prompt_ids,
        "tokens": row.answer,
    }

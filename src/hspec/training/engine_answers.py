"""The target answers here, in one large, continuously refilled batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hspec.decoding.randomness import Purpose, sample, uniform
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from hspec.training.answers import AnswerSettings, short_prompts
from hspec.training.prompts import Prompt


class EngineAnswers:
    """An answerer (see :class:`hspec.training.answers.Answerer`) that runs the target itself: the tokens are those that it drew."""

    def __init__(self, target: Target, template: ChatTemplate | None = None):
        self.target, self.template = target, template or target.template

    def __call__(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> Iterator[dict[str, Any]]:
        return _answer(self.target, self.template, prompts, settings)


@dataclass
class _Row:
    prompt: Prompt
    prompt_ids: list[int]
    answer: list[int]
    anchor: int


@torch.no_grad()
def _answer(
    target: Target, template: ChatTemplate, prompts: Sequence[Prompt], settings: AnswerSettings
) -> Iterator[dict[str, Any]]:
    """The batch: rows in use are a prefix of the cache's rows; a finished row is refilled, or closed by the last one."""
    queue = short_prompts(target, template, prompts, settings.max_prompt_tokens)
    batch = min(settings.batch, len(prompts))
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

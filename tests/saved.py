"""Tiny targets, drafters and data as files, for what reads them from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from hspec.drafters.checkpoint import save_drafter
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.conversations import Conversation
from hspec.training.prompts import clean_prompts
from tests.tiny import tiny_drafter, tiny_target


def save_target(folder: Path, chat_template: bool = True, **settings: Any) -> Path:
    """A tiny target as transformers saves a model; ``settings`` go to :func:`tests.tiny.tiny_target`."""
    target = tiny_target(**{"layers": 3, "hidden": 48, "linears": "plain", **settings})
    transformers_logging.disable_progress_bar()
    target.model.save_pretrained(folder)
    if not chat_template:
        target.tokenizer.chat_template = None
    target.tokenizer.save_pretrained(folder)
    return folder


def save_drafter_for(target: Target, folder: Path, **settings: Any) -> Path:
    save_drafter(tiny_drafter(target, **settings), folder)
    return folder


def loaded(folder: Path) -> Target:
    return load_target(str(folder))


def question(number: int) -> str:
    """An English prompt of some 50 tiny tokens, different from the first character on."""
    return f"{number}: what is the name of number {number}?"


def held_out_numbers(count: int) -> set[int]:
    """Which of the first questions are held out."""
    prompts, _ = clean_prompts([Conversation.of([{"role": "user", "content": question(n)}]) for n in range(count)], len)
    return {int(p.text.split(":")[0]) for p in prompts if p.held_out}


def exchange(number: int) -> dict[str, Any]:
    answer = f"the name is {'abc'[number % 3] * (number % 7 + 1)} and that is all"
    return {"messages": [{"role": "user", "content": question(number)}, {"role": "assistant", "content": answer}]}


def write_exchanges(path: Path, count: int, start: int = 0) -> Path:
    """JSONL of short conversations with answers."""
    path.write_text("".join(json.dumps(exchange(n)) + "\n" for n in range(start, start + count)), encoding="utf-8")
    return path

"""Reading prompts from JSONL: ``{"id", "turns", "tools"?}`` a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.tasks.task import Task, TaskPrompt
from hspec.files import reason

_SHOWN = 20
"""Bad lines that a message names."""


def read_task(path: Path, name: str | None = None, skip_bad: bool = False, source: str | None = None) -> Task:
    """A task from a file; its name is the file's.

    Args:
        skip_bad: leave bad lines out, and say so in the task, instead of refusing the file.

    Raises:
        UsageError: no such file, no prompt in it, or bad lines; all of them are named.
        HSpecError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise UsageError(f"no task file at {path}") from error
    except UnicodeDecodeError as error:
        raise HSpecError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise HSpecError(f"cannot read {path}: {reason(error)}") from error
    prompts, bad, met = list[TaskPrompt](), list[str](), dict[str, int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = parse_prompt(json.loads(line))
            if prompt.id in met:
                raise ValueError(f"its id {prompt.id!r} is that of line {met[prompt.id]}")
        except ValueError as error:
            bad.append(f"line {number}: {_said(error)}")
            continue
        met[prompt.id] = number
        prompts.append(prompt)
    if bad and not skip_bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise UsageError(
            f"{path} has {len(bad)} bad lines ({'; '.join(bad[:_SHOWN])}{more}): mend them, or leave them out with --skip-bad"
        )
    if not prompts:
        raise UsageError(f'{path} has no prompt: give lines like {{"id": "1", "turns": ["..."]}}')
    return Task(name or path.stem, tuple(prompts), source or str(path), tuple(bad))


def parse_prompt(record: Any) -> TaskPrompt:
    """Raises:
    ValueError: the record is not a prompt; the message says why.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, this is {type(record).__name__}")
    id, turns, tools = record.get("id"), record.get("turns"), record.get("tools") or []
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise ValueError('"id" must be a string or a number')
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError('"turns" must be a list of texts, none of them empty')
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise ValueError('"tools" must be a list of function schemas')
    return TaskPrompt(str(id), tuple(turns), tuple(tools))


def _said(error: ValueError) -> str:
    return f"not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else str(error)

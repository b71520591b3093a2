"""Tasks from JSONL files, ``{"id", "turns", "tools"?}`` a line, and folders of them."""

from __future__ import annotations

import json
from pathlib import Path

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.tasks.rows import gather, parse_prompt
from hspec.evaluation.tasks.task import Task
from hspec.files import reason


def read_task(path: Path, name: str | None = None, skip_bad: bool = False, source: str | None = None) -> Task:
    """A task from a file; its name is the file's.

    Args:
        skip_bad: leave bad lines out, and say so in the task, instead of refusing the file.

    Raises:
        UsageError: no such file, no prompt in it, or bad lines; all of them are named.
        HSpecError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(f"no task file at {path}") from error
    except UnicodeDecodeError as error:
        raise HSpecError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise HSpecError(f"cannot read {path}: {reason(error)}") from error
    # Not splitlines(): it also breaks at U+2028 and the like, which JSON strings may have as they are.
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    prompts, bad = gather(str(path), "line", lines, lambda _, line: parse_prompt(json.loads(line)), skip_bad)
    return Task(name or path.stem, prompts, source or str(path), bad)


def tasks_in(data: Path) -> dict[str, Path]:
    """The task files of a folder and of the folders in it, by name.

    Raises:
        UsageError: no folder, no task in it, or one name twice.
    """
    if not data.is_dir():
        raise UsageError(f"--data {data}: not a folder")
    found: dict[str, Path] = {}
    for path in sorted([*data.glob("*.jsonl"), *data.glob("*/*.jsonl")]):
        if path.stem in found:
            raise UsageError(f"--data {data}: two tasks are called {path.stem!r}: {found[path.stem]} and {path}")
        found[path.stem] = path
    if not found:
        raise UsageError(f"--data {data}: no .jsonl file in it, nor in its folders")
    return found

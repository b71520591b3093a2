"""Which tasks there are, and choosing prompts of them.

A name is looked for in this order: the folder of ``--data``; ``long-cite`` and ``long-qa``, which are made to a length; the prompts
that ship; a JSONL file; a hub dataset. The eight families of the paper ship as small sets of prompts of our own; DeepSpec's nine are
read from ``--data`` or a hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from hspec.errors import UsageError
from hspec.evaluation.tasks.files import parse_prompt, read_task
from hspec.evaluation.tasks.long_context import LONG_TASKS, long_task
from hspec.evaluation.tasks.task import Task, TaskPrompt

FAMILIES = ("math", "qa", "chat", "rag", "summarization", "translation", "code", "tool_calling")
"""The paper's eight task families, by Spec-Bench's names."""
DEEPSPEC = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca", "arena-hard-v2")
"""DeepSpec's nine tasks. Its Alpaca is by hub id or file only."""
GROUPS = {"families": FAMILIES, "deepspec": DEEPSPEC, "long": LONG_TASKS}
"""Names that stand for several."""


def load_tasks(
    names: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_bad: bool = False,
    count_tokens: Callable[[str], int] | None = None,
    lengths: Sequence[int] = (1024,),
) -> list[Task]:
    """Tasks by name, each with at most ``limit`` prompts.

    Which prompts a limit leaves is decided by their ids and the seed, so that a larger limit has those of a smaller one first.

    Args:
        data: a folder with JSONL files, or with folders of them; a file's name is its task's.
        count_tokens: for tasks that are made to a length; ``lengths`` are those lengths, in tokens.

    Raises:
        UsageError: an unknown task (the known ones are listed), a bad file, or nothing to do.
        HSpecError: a file cannot be read.
    """
    folder = {} if data is None else tasks_in(data)
    wanted = list(dict.fromkeys(name for given in names for name in _expanded(given, folder)))
    if not wanted:
        raise UsageError("no task is asked for: see 'hspec eval --help'")
    tasks: list[Task] = []
    for name in wanted:
        if name in LONG_TASKS and name not in folder:
            if count_tokens is None:
                raise AssertionError("a task that is made to a length needs a tokenizer")
            tasks += [long_task(name, n, count_tokens, limit or 8, seed) for n in lengths]
        else:
            tasks.append(chosen(_one(name, folder, data, skip_bad), limit, seed))
    return tasks


def _expanded(name: str, folder: dict[str, Path]) -> Iterable[str]:
    """A group's names, but for those of its tasks that are nowhere to be had when the group is asked for."""
    if name not in GROUPS or name in folder:
        return [name]
    if name == "deepspec":
        there = [n for n in DEEPSPEC if n in folder]
        if not there:
            raise UsageError("the tasks of DeepSpec do not ship: name the folder that has them as JSONL with --data")
        return there
    return GROUPS[name]


def _one(name: str, folder: dict[str, Path], data: Path | None, skip_bad: bool) -> Task:
    if name in folder:
        return read_task(folder[name], name, skip_bad)
    if name in FAMILIES:
        return built_in(name)
    path = Path(name).expanduser()
    if path.suffix == ".jsonl" or path.is_file():
        return read_task(path, path.stem, skip_bad)
    if name.count("/") == 1:
        return _from_hub(name)
    where = "" if data is None else f"; in {data}: {', '.join(folder)}"
    raise UsageError(
        f"no task {name!r}: there are {', '.join((*FAMILIES, *LONG_TASKS))}, any .jsonl file or hub dataset{where}"
    )


def built_in(name: str) -> Task:
    """One of the eight families, prompts of our own."""
    return read_task(Path(str(files("hspec"))) / "assets" / "tasks" / f"{name}.jsonl", name, source="built in")


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


def chosen(task: Task, limit: int | None, seed: int) -> Task:
    """At most ``limit`` prompts, in the order of the hash of their ids and the seed."""

    def key(prompt: TaskPrompt) -> bytes:
        return hashlib.sha256(f"{seed}/{task.name}/{prompt.id}".encode()).digest()

    return replace(task, prompts=tuple(sorted(task.prompts, key=key)[:limit]))


def _from_hub(name: str) -> Task:
    """A hub dataset whose rows are prompts as in a file, or have a ``prompt``, ``question`` or ``instruction``."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(
            f"task {name!r} looks like a hub dataset, which needs the package datasets: pip install datasets"
        ) from error
    try:
        rows = load_dataset(name, split="test")
    except Exception as error:  # the library raises many types
        raise UsageError(f"no dataset {name!r}: {str(error).strip().splitlines()[0]}") from error
    return Task(name.rsplit("/", 1)[-1], tuple(_row(i, row) for i, row in enumerate(rows)), name)


def _row(index: int, row: dict[str, Any]) -> TaskPrompt:
    if "turns" in row:
        return parse_prompt({"id": index, **row})
    text = next((row[key] for key in ("prompt", "question", "instruction") if isinstance(row.get(key), str)), None)
    if text is None:
        raise UsageError(f"row {index} of the dataset has none of turns, prompt, question, instruction: {', '.join(row)}")
    return TaskPrompt(str(row.get("id", index)), (text,))

"""Which tasks there are, and choosing prompts of them.

A name is looked for in this order: the folder of ``--data``; ``long-cite`` and ``long-qa``, which are made to a length; the prompts
that ship; those in Python packages; a JSONL file; a hub dataset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hspec.errors import UsageError
from hspec.evaluation.tasks.built_in import built_in
from hspec.evaluation.tasks.families import DEEPSPEC, FAMILIES
from hspec.evaluation.tasks.files import read_task, tasks_in
from hspec.evaluation.tasks.hub import ALIASES, HUB_NAME, hub_task
from hspec.evaluation.tasks.long_context import DEFAULT_PROMPTS, LONG_TASKS, lengths_up_to, long_task
from hspec.evaluation.tasks.packages import PACKAGED, packaged_task
from hspec.evaluation.tasks.task import Task, TaskPrompt

GROUPS = {
    "families": FAMILIES,
    "deepspec": DEEPSPEC,
    "long": LONG_TASKS,
    "bfcl": tuple(name for name in PACKAGED if name.startswith("bfcl-")),
    "mmath": tuple(name for name in PACKAGED if name.startswith("mmath-")),
}
"""Names that stand for several."""


def load_tasks(
    names: Sequence[str],
    data: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_bad: bool = False,
    count_tokens: Callable[[str], int] | None = None,
    lengths: Sequence[int] | None = (1024,),
    longest: int | None = None,
) -> list[Task]:
    """Tasks by name, each with at most ``limit`` prompts.

    Which prompts a limit leaves is decided by their ids and the seed, so that a larger limit has those of a smaller one first.

    Args:
        data: a folder with JSONL files, or with folders of them; a file's name is its task's.
        skip_bad: leave bad lines of files out; each task tells which (``bad_lines``).
        count_tokens: how many tokens a text has for the target; needed for the other two.
        lengths: of the prompts that are made to a length, in tokens; None: 1,024, its doublings, and ``longest``.
        longest: the most tokens that a prompt may have; longer ones are left out, and the task says so.

    Raises:
        UsageError: an unknown task (the known ones are listed), a bad file, or nothing to do.
        HSpecError: a file cannot be read or fetched.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} prompts a task: give 1 at least")
    folder = {} if data is None else tasks_in(data)
    tasks: list[Task] = []
    for name in _wanted(names, folder):
        if name in LONG_TASKS and name not in folder:
            tasks += _made(name, count_tokens, lengths, longest, limit or DEFAULT_PROMPTS, seed)
        else:
            tasks.append(chosen(_one(name, folder, data, skip_bad), limit, seed, count_tokens, longest))
    _check_names(tasks)
    return tasks


def check_tasks(names: Sequence[str], data: Path | None = None) -> None:
    """Whether every task is one that there may be, before anything is loaded; files and datasets are not opened.

    Raises:
        UsageError: an unknown task, or none.
    """
    folder = {} if data is None else tasks_in(data)
    for name in _wanted(names, folder):
        path = Path(name).expanduser()
        known = (*folder, *FAMILIES, *LONG_TASKS, *PACKAGED, *ALIASES)
        if name not in known and path.suffix != ".jsonl" and not path.exists() and not HUB_NAME.fullmatch(name):
            raise UsageError(_unknown(name, folder, data))


def _wanted(names: Sequence[str], folder: dict[str, Path]) -> list[str]:
    """Groups taken apart, each name once."""
    wanted = list(dict.fromkeys(name for given in names for name in _expanded(given, folder)))
    if not wanted:
        raise UsageError("no task is asked for: see 'hspec eval --help'")
    return wanted


def _expanded(name: str, folder: dict[str, Path]) -> Sequence[str]:
    """A group's names; of DeepSpec's those that the folder has."""
    if name not in GROUPS or name in folder:
        return [name]
    if name == "deepspec":
        there = [n for n in DEEPSPEC if n in folder]
        if not there:
            raise UsageError(
                "the tasks of DeepSpec do not ship: name the folder that has them as JSONL with --data; "
                f"without one there are {', '.join(n for n in DEEPSPEC if n in PACKAGED or n in ALIASES)}"
            )
        return there
    return GROUPS[name]


def _one(name: str, folder: dict[str, Path], data: Path | None, skip_bad: bool) -> Task:
    if name in folder:
        return read_task(folder[name], name, skip_bad)
    if name in FAMILIES:
        return built_in(name)
    if name in PACKAGED:
        return packaged_task(name)
    path = Path(name).expanduser()
    if path.suffix == ".jsonl" or path.is_file():
        return read_task(path, path.stem, skip_bad)
    if path.is_dir():
        raise UsageError(f"task {name!r} is a folder: give it with --data, and name tasks in it")
    if name in ALIASES or HUB_NAME.fullmatch(name):
        return hub_task(ALIASES.get(name, name), name if name in ALIASES else None, skip_bad)
    raise UsageError(_unknown(name, folder, data))


def _unknown(name: str, folder: dict[str, Path], data: Path | None) -> str:
    if name in DEEPSPEC:
        return f"task {name!r} of DeepSpec comes in no package: name the folder that has {name}.jsonl with --data"
    where = "" if data is None else f"; in {data}: {', '.join(folder)}"
    known = ", ".join((*FAMILIES, *LONG_TASKS, *PACKAGED, *ALIASES))
    return f"no task {name!r}: there are {known}, the groups {', '.join(GROUPS)}, any .jsonl file or hub dataset{where}"


def _made(
    name: str,
    count_tokens: Callable[[str], int] | None,
    lengths: Sequence[int] | None,
    longest: int | None,
    prompts: int,
    seed: int,
) -> list[Task]:
    if count_tokens is None:
        raise UsageError(f"{name} is made to a length in tokens: give count_tokens, a function that counts them")
    if lengths is None:
        if longest is None:
            raise UsageError(f"{name}: give its lengths, or the longest")
        lengths = lengths_up_to(longest)
    for length in lengths:
        if longest is not None and length > longest:
            raise UsageError(f"{name}: prompts of {length:,} tokens are asked for, but there is room for {longest:,}")
    return [long_task(name, length, count_tokens, prompts, seed) for length in dict.fromkeys(lengths)]


def chosen(
    task: Task, limit: int | None, seed: int, count_tokens: Callable[[str], int] | None = None, longest: int | None = None
) -> Task:
    """At most ``limit`` prompts, in the order of the hash of their ids and the seed; those of more than ``longest`` tokens are
    left out, which the task says.

    Raises:
        UsageError: none is left.
    """

    def key(prompt: TaskPrompt) -> bytes:
        return hashlib.sha256(f"{seed}/{task.name}/{prompt.id}".encode()).digest()

    too_long: list[str] = []

    def fits(prompt: TaskPrompt) -> bool:
        if count_tokens is None or longest is None or count_tokens(prompt.text) <= longest:
            return True
        too_long.append(prompt.id)
        return False

    # Counting stops with the limit: a set of thousands of long prompts need not be counted for the first ten.
    prompts = tuple(islice(filter(fits, sorted(task.prompts, key=key)), limit))
    if not too_long:
        return replace(task, prompts=prompts)
    said = f"prompts of more than {longest:,} tokens: {', '.join(too_long)}"
    if not prompts:
        raise UsageError(f"task {task.name}: no prompt has room in the target's context ({said})")
    return replace(task, prompts=prompts, bad_lines=(*task.bad_lines, said))


def _check_names(tasks: Sequence[Task]) -> None:
    """Answers are kept by the task's name.

    Raises:
        UsageError: two tasks have one.
    """
    seen: dict[str, Task] = {}
    for task in tasks:
        if other := seen.get(task.name):
            raise UsageError(f"two tasks are called {task.name!r}: {other.source} and {task.source}; rename a file")
        seen[task.name] = task

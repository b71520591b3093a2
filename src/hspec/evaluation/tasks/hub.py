"""Tasks from hub datasets, through the package ``datasets`` where it is installed."""

from __future__ import annotations

import re
from typing import Any

from hspec.errors import UsageError
from hspec.evaluation.tasks.rows import gather, parse_prompt
from hspec.evaluation.tasks.task import Task, TaskPrompt

HUB_NAME = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.-]+))?")
"""``owner/name``, ``owner/name:split``, ``owner/name/configuration:split``."""
ALIASES = {"alpaca": "tatsu-lab/alpaca"}
"""Known tasks that no package carries."""

_SPLITS = ("test", "validation", "train")
"""Looked for in this order where none is named; else the first that there is."""
_QUESTIONS = ("prompt", "question", "instruction")


def hub_task(where: str, name: str | None = None, skip_bad: bool = False) -> Task:
    """A dataset whose rows are prompts as in a file, have ``messages``, or a ``prompt``, ``question`` or ``instruction``
    (with an ``input``).

    Args:
        where: see :data:`HUB_NAME`. name: of the task; the dataset's own by default.

    Raises:
        UsageError: ``datasets`` is not installed, there is no such dataset, or its rows are no prompts.
    """
    match = HUB_NAME.fullmatch(where)
    if match is None:
        raise UsageError(f"{where!r} is no hub dataset: give owner/name, owner/name:split or owner/name/configuration:split")
    try:
        from datasets import get_dataset_split_names, load_dataset
    except ImportError as error:
        raise UsageError(
            f"task {where!r} looks like a hub dataset, which needs the package datasets: pip install datasets"
        ) from error
    id, config, split = match["id"], match["config"], match["split"]
    try:
        split = split or _best(get_dataset_split_names(id, config))
        rows = load_dataset(id, config, split=split)
    except Exception as error:  # the library raises many types
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"no dataset {where!r}: {said}") from error
    source = f"{id}{f'/{config}' if config else ''}:{split}"
    prompts, bad = gather(source, "row", enumerate(rows), _parse, skip_bad)
    return Task(name or id.rsplit("/", 1)[-1], prompts, source, bad)


def _best(splits: list[str]) -> str:
    return next((split for split in _SPLITS if split in splits), splits[0])


def _parse(index: int, row: dict[str, Any]) -> TaskPrompt:
    known = {"id": row.get("id", index), "tools": row.get("tools"), "system": row.get("system")}
    if "turns" in row:
        return parse_prompt({**known, "turns": row["turns"]})
    messages = row.get("messages") or row.get("prompt")
    if isinstance(messages, list):
        return parse_prompt({**known, **_of_messages(messages)})
    text = next((row[key] for key in _QUESTIONS if isinstance(row.get(key), str)), None)
    if text is None:
        raise ValueError(f"none of turns, messages, {', '.join(_QUESTIONS)} in it, only {', '.join(row)}")
    return parse_prompt({**known, "turns": [f"{text}\n\n{row['input']}" if row.get("input") else text]})


def _of_messages(messages: list[Any]) -> dict[str, Any]:
    """The user's turns; answers of another model are left out, since the target gives its own."""
    if not all(isinstance(m, dict) for m in messages):
        raise ValueError('"messages" must be a list of {"role", "content"}')
    found: dict[str, Any] = {"turns": [m.get("content") for m in messages if m.get("role") == "user"]}
    systems = [m.get("content") for m in messages if m.get("role") == "system"]
    return {**found, "system": systems[0]} if systems else found

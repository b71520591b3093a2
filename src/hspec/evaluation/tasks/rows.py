"""From rows of whatever origin to prompts; what is wrong is gathered, so that all of it can be said at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from hspec.errors import UsageError
from hspec.evaluation.tasks.task import TaskPrompt

_JSON_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Berkeley's function schemas name types as Python does."""


def gather(
    source: str, unit: str, rows: Iterable[tuple[int, Any]], parse: Callable[[int, Any], TaskPrompt], skip_bad: bool
) -> tuple[tuple[TaskPrompt, ...], tuple[str, ...]]:
    """Prompts of rows, and what was left out.

    Args:
        source: where the rows come from, for messages. unit: what a row is there (``line``).
        rows: numbered as a user would count them.
        parse: row to prompt; raises ValueError for a bad one.
        skip_bad: leave bad rows out instead of refusing them all.

    Raises:
        UsageError: bad rows, all of which are named, or no good one.
    """
    prompts: dict[str, TaskPrompt] = {}
    first: dict[str, int] = {}
    bad: dict[str, list[int]] = {}
    for number, row in rows:
        try:
            prompt = parse(number, row)
            if prompt.id in prompts:
                raise ValueError(f"its id {prompt.id!r} is that of {unit} {first[prompt.id]}")
        except (ValueError, RecursionError) as error:
            bad.setdefault(_said(error), []).append(number)
            continue
        prompts[prompt.id], first[prompt.id] = prompt, number
    said = tuple(f"{_places(unit, numbers)}: {why}" for why, numbers in bad.items())
    if bad and not skip_bad:
        count = sum(map(len, bad.values()))
        raise UsageError(
            f"{source} has {count} bad {unit}{'s' * (count > 1)} ({'; '.join(said)}): mend them, or leave them out with --skip-bad"
        )
    if not prompts:
        why = f"; left out: {'; '.join(said)}" if said else ""
        raise UsageError(f'{source} has no prompt{why}: give lines like {{"id": "1", "turns": ["..."]}}')
    return tuple(prompts.values()), said


def parse_prompt(record: Any) -> TaskPrompt:
    """``{"id", "turns", "tools"?, "system"?}``; other keys are a data set's own and are not looked at.

    Raises:
        ValueError: the record is not a prompt; the message says why.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, this is {type(record).__name__}")
    id, turns, tools, system = record.get("id"), record.get("turns"), record.get("tools") or [], record.get("system")
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise ValueError('"id" must be a string or a number')
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError('"turns" must be a list of texts, none of them empty')
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise ValueError('"tools" must be a list of function schemas')
    if system is not None and not isinstance(system, str):
        raise ValueError('"system" must be a text')
    prompt = TaskPrompt(str(id), tuple(turns), tuple(map(json_schema, tools)), system)
    try:
        "\n".join([prompt.id, prompt.system or "", *prompt.turns, json.dumps(tools, ensure_ascii=False)]).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair in a text") from error
    return prompt


def json_schema(schema: Any) -> Any:
    """A function schema with its types named as JSON Schema names them."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: json_schema(value) for key, value in schema.items()}
    if isinstance(kind := out.get("type"), str):
        out["type"] = _JSON_SCHEMA_TYPES.get(kind, kind)
    return out


def _said(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _places(unit: str, numbers: list[int]) -> str:
    """``lines 3, 7-9``: neighbours share a dash, so that every number is named in little room."""
    runs = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"{unit}{'s' * (len(numbers) > 1)} {', '.join(runs)}"

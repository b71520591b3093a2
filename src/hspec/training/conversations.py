"""Reading conversations from the files that people have.

Three layouts, told apart by what is in them, never by the file's name alone:

- JSONL with ``messages`` (``[{"role": ..., "content": ...}, ...]``);
- ShareGPT JSON, one array of ``{"id", "conversations": [{"from", "value"}, ...]}``, whole or cut off mid-record;
- plain prompts: JSONL with ``prompt`` or ``turns``, or a text file with one prompt a line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hspec.errors import HSpecError, UsageError
from hspec.files import reason

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}
_ROLES = ("system", "user", "assistant", "tool")
_ARRAY = re.compile(r"\s*\[\s*(\{|\]|$)")
_RECORD_START = re.compile(r'\{\s*"(id|conversations|messages|prompt|turns)"\s*:')


@dataclass(frozen=True)
class Conversation:
    """Messages in chat-template form; ``id`` is stable over runs (given, or a hash of the messages)."""

    id: str
    messages: tuple[dict[str, str], ...]

    @staticmethod
    def of(messages: list[dict[str, str]], id: str | None = None) -> Conversation:
        if id is None:
            id = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
        return Conversation(str(id), tuple(messages))

    @property
    def first_user_turn(self) -> str | None:
        return next((m["content"] for m in self.messages if m["role"] == "user"), None)

    @property
    def has_answer(self) -> bool:
        return any(m["role"] == "assistant" and m["content"].strip() for m in self.messages)


@dataclass
class ReadReport:
    """What a file gave, and what it did not."""

    path: str
    conversations: int = 0
    bad: list[str] = field(default_factory=list)
    """One line for each record that was left out: where it stands and why."""
    cut_at: int | None = None
    """Character offset of the record that the file's end cuts off, if it does."""

    def summary(self) -> str:
        text = f"{self.path}: {self.conversations:,} conversations"
        if self.bad:
            text += f", {len(self.bad):,} bad records left out (first: {self.bad[0]})"
        if self.cut_at is not None:
            text += f"; the file ends in the middle of a record (character {self.cut_at:,}), what came before is kept"
        return text


def read_conversations(path: str | Path, max_bad_fraction: float = 0.5) -> tuple[list[Conversation], ReadReport]:
    """Read every whole conversation of a file.

    Bad records are left out and reported, not fatal, unless they are more than ``max_bad_fraction`` of the file.

    Raises:
        UsageError: there is no such file.
        HSpecError: it cannot be read, is not text, or gives nothing usable.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(f"no data file at {path}: check the path given to --data") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise HSpecError(f"{path} is not a UTF-8 text file ({error}): give JSONL, ShareGPT JSON or plain text") from error
    except OSError as error:
        raise HSpecError(f"cannot read the data file {path}: {reason(error)}") from error
    report = ReadReport(str(path))
    found: list[Conversation] = []
    for where, record in _records(text, path.suffix, report):
        try:
            found.append(_conversation(record))
        except ValueError as error:
            report.bad.append(f"{where}: {error}")
    report.conversations = len(found)
    if not found or len(report.bad) > max_bad_fraction * (len(found) + len(report.bad)):
        why = f"; first: {report.bad[0]}" if report.bad else ""
        raise HSpecError(
            f"{path} has {len(found)} usable conversations and {len(report.bad)} bad records{why}. Expected JSONL with "
            f'"messages", "prompt" or "turns", a ShareGPT array, or text with one prompt a line'
        )
    return found, report


def _records(text: str, suffix: str, report: ReadReport) -> Iterator[tuple[str, Any]]:
    head = text.lstrip()[:1]
    if _ARRAY.match(text):
        yield from _array_records(text, report)
    elif head == "{" or suffix in (".jsonl", ".ndjson"):
        # Not splitlines(): it also breaks at U+2028 and the like, which JSON strings may have as they are.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                report.bad.append(f"line {number}: not JSON ({error.msg} at column {error.colno})")
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"line {number}", {"prompt": line.strip()}


def _array_records(text: str, report: ReadReport) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array one by one, so that a damaged or cut file still gives its whole ones."""
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        if position >= len(text):
            report.cut_at = position  # the closing bracket is missing: the file was cut between two records
            return
        if text[position] == "]":
            return
        try:
            record, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            following = _RECORD_START.search(text, position + 1)
            if following is None:
                report.cut_at = position
                return
            report.bad.append(f"character {position:,}: {error.msg}")
            position = following.start()
            continue
        yield f"character {position:,}", record
        position = end


def _conversation(record: Any) -> Conversation:
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, this is {type(record).__name__}")
    id = record.get("id")
    if "messages" in record:
        return Conversation.of([_message(m, "role", "content") for m in _list(record, "messages")], id)
    if "conversations" in record:
        turns = [_message(m, "from", "value") for m in _list(record, "conversations")]
        return Conversation.of([{**m, "role": _SHAREGPT_ROLES.get(m["role"], m["role"])} for m in turns], id)
    if "turns" in record:
        turns = [{"role": "user", "content": t} for t in _list(record, "turns")]
        return Conversation.of([_message(m, "role", "content") for m in turns], id)
    if isinstance(record.get("prompt"), str):
        return Conversation.of([_message({"role": "user", "content": record["prompt"]}, "role", "content")], id)
    raise ValueError('none of "messages", "conversations", "turns", "prompt" in it')


def _list(record: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(record[key], list) or not record[key]:
        raise ValueError(f'"{key}" must be a list that is not empty')
    return record[key]


def _message(message: Any, role: str, content: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get(content), str) or not isinstance(message.get(role), str):
        raise ValueError(f'a message needs the strings "{role}" and "{content}"')
    known = message[role] in (_ROLES if role == "role" else _SHAREGPT_ROLES)
    if not known:
        raise ValueError(f"unknown role {message[role]!r}")
    try:
        message[content].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair at character {error.start} of a message") from error
    return {"role": message[role], "content": message[content]}

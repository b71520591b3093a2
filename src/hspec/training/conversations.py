"""Reading conversations from the files that people have, one by one: only those that are kept take memory.

Three layouts, told apart by what is in them, never by the file's name alone:

- JSONL with ``messages`` (``[{"role": ..., "content": ...}, ...]``);
- ShareGPT JSON, one array of ``{"id", "conversations": [{"from", "value"}, ...]}``, whole or cut off mid-record;
- plain prompts: JSONL with ``prompt`` or ``turns``, or a text file with one prompt a line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

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
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_RECORD_START = re.compile(r'\{\s*"(id|conversations|messages|prompt|turns)"\s*:')


_CHUNK = 1 << 20
"""Characters that are read at once."""
_HOPELESS = 1000
"""After so many bad records without a good one, a file is not read to its end."""


@dataclass(frozen=True)
class Conversation:
    """Messages in chat-template form; ``id`` is stable over runs (given, or a hash of the messages)."""

    id: str
    messages: tuple[dict[str, str], ...]
    source: int = 0
    """Which of a job's sources it comes from."""

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
    """What a file gave, and what it did not; complete when it has been read to its end."""

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
    """Every whole conversation of a file, all at once; see :func:`stream_conversations`."""
    report = ReadReport(str(path))
    return list(stream_conversations(path, report, max_bad_fraction)), report


def stream_conversations(path: str | Path, report: ReadReport, max_bad_fraction: float = 0.5) -> Iterator[Conversation]:
    """Every whole conversation of a file, one by one.

    Bad records are left out and reported, not fatal, unless they are more than ``max_bad_fraction`` of the file.

    Raises:
        UsageError: there is no such file.
        HSpecError: it cannot be read, is not text, or gives nothing usable; the last is known at the end.
    """
    expected = 'JSONL with "messages", "prompt" or "turns", a ShareGPT array, or text with one prompt a line'
    return usable(_file_records(Path(path), report), report, expected, max_bad_fraction)


def usable(
    records: Iterable[tuple[str, Any]], report: ReadReport, expected: str, max_bad_fraction: float = 0.5
) -> Iterator[Conversation]:
    """The conversations of records ``(where, record)``; what is wrong with others goes into the report.

    Args:
        expected: what the records should be, for messages.

    Raises:
        HSpecError: there is none, or more than ``max_bad_fraction`` of the records are bad.
    """
    for where, record in records:
        try:
            conversation = _conversation(record)
        except ValueError as error:
            report.bad.append(f"{where}: {error}")
            if not report.conversations and len(report.bad) >= _HOPELESS:
                break
            continue
        report.conversations += 1
        yield conversation
    bad = len(report.bad)
    if not report.conversations or bad > max_bad_fraction * (report.conversations + bad):
        why = f"; first: {report.bad[0]}" if bad else ""
        raise HSpecError(
            f"{report.path} has {report.conversations} usable conversations and {bad} bad records{why}. Expected {expected}"
        )


def _file_records(path: Path, report: ReadReport) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _records(file, path.suffix, report)
    except FileNotFoundError as error:
        raise UsageError(f"no data file at {path}: check the path given to --data") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise HSpecError(f"{path} is not a UTF-8 text file ({error}): give JSONL, ShareGPT JSON or plain text") from error
    except OSError as error:
        raise HSpecError(f"cannot read the data file {path}: {reason(error)}") from error


def _records(file: TextIO, suffix: str, report: ReadReport) -> Iterator[tuple[str, Any]]:
    window = _Window(file)
    head = window.text.lstrip()[:1]
    if _ARRAY.match(window.text):
        yield from _array_records(window, report)
        return
    file.seek(0)
    in_json = head == "{" or suffix in (".jsonl", ".ndjson")
    # A file's lines end at line feeds, not at U+2028 and the like, which JSON strings may have as they are.
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        if not in_json:
            yield f"line {number}", {"prompt": line.strip()}
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            report.bad.append(f"line {number}: not JSON ({error.msg} at column {error.colno})")
        except RecursionError:
            report.bad.append(f"line {number}: nested too deeply")


class _Window:
    """The part of a long text that is looked at."""

    def __init__(self, file: TextIO):
        self._file = file
        self.text = file.read(_CHUNK)
        self.start = 0
        """Character of the file at which ``text`` begins."""

    def more(self) -> bool:
        """Look further; False at the file's end."""
        chunk = self._file.read(_CHUNK)
        self.text += chunk
        return bool(chunk)

    def drop(self, count: int) -> None:
        """Forget the first ``count`` characters."""
        self.text = self.text[count:]
        self.start += count


def _array_records(window: _Window, report: ReadReport) -> Iterator[tuple[str, Any]]:
    """Records of a JSON array one by one, so that a damaged or cut file still gives its whole ones."""
    decoder = json.JSONDecoder()
    window.drop(window.text.index("[") + 1)
    position = 0
    while True:
        position = _BETWEEN.match(window.text, position).end()  # type: ignore[union-attr]  # the pattern matches anywhere
        if position >= len(window.text):
            if window.more():
                continue
            report.cut_at = window.start + position  # the closing bracket is missing: the file was cut between two records
            return
        if window.text[position] == "]":
            return
        where = f"character {window.start + position:,}"
        try:
            record, end = decoder.raw_decode(window.text, position)
        except (json.JSONDecodeError, RecursionError) as error:
            if _may_go_on(error, window.text) and window.more():
                continue
            following = _next_record(window, position + 1)
            if following is None:
                report.cut_at = window.start + position
                return
            report.bad.append(f"{where}: {getattr(error, 'msg', 'nested too deeply')}")
            position = following
            continue
        yield where, record
        position = end
        if position > _CHUNK:
            window.drop(position)
            position = 0


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether it may be only the end of what was read so far: an open string, or an error at its very end (the longest thing that can
    be cut there is an escaped surrogate pair)."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - len(r"\ud83d\ude42")


def _next_record(window: _Window, position: int) -> int | None:
    """Where the next record may begin."""
    while True:
        found = _RECORD_START.search(window.text, position)
        if found is not None:
            return found.start()
        if not window.more():
            return None


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

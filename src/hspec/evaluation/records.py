"""What is kept of every answer of an evaluation: one line of JSON, enough for every table, plot and coloured text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from hspec.decoding.sequence import Counters
from hspec.drafters.config import Strict
from hspec.errors import HSpecError, UsageError
from hspec.files import append_line, beside, reason, whole_lines


class TurnRecord(Strict):
    """One answer. Seconds are of the decoding steps; the prefill, which every contender does alike, is apart. None where answers ran in
    a batch, whose time is nobody's alone."""

    question: str
    """The user's turn."""
    text: str
    pieces: list[str]
    """What each token adds to the text."""
    tokens: list[int]
    """Emitted tokens; the first is the prefill's."""
    drafted: str
    """A character a token: 1 if it was a draft that the target accepted, else 0."""
    origins: str = ""
    """A character a token, see :mod:`hspec.evaluation.origin`; empty in records of before this was kept."""
    runs: list[int]
    """Tokens emitted by each verification step."""
    refused: list[list[int]]
    """Drafts that did not stand, of each verification step, ..."""
    refused_text: list[str]
    """... and what they would have said."""
    prompt_tokens: int
    finish_reason: str
    looping: bool
    prefill_seconds: float | None
    draft_seconds: float | None
    verify_seconds: float | None
    reached: list[int]
    accepted: list[int]


class Record(Strict):
    """All turns of one prompt, answered by one contender under one setting."""

    task: str
    id: str
    contender: str
    setting: str
    k: int
    """Drafted tokens a step; 0 without a drafter."""
    turns: list[TurnRecord]
    peak_bytes: int | None
    """How far the memory in use rose while answering; None where the system does not tell."""
    drafter_kv_bytes: int
    """What the drafter kept of the context at the end of the last turn, in the data type that ran."""

    @property
    def counters(self) -> Counters:
        """Steps, tokens and acceptance of all turns, as sums."""
        total = Counters()
        for turn in self.turns:
            total.add(Counters(len(turn.runs), sum(turn.runs), list(turn.reached), list(turn.accepted)))
        return total

    @property
    def seconds(self) -> float:
        """Of the decoding steps of all turns; not a number where they were not timed."""
        return self.draft_seconds + self.verify_seconds

    @property
    def draft_seconds(self) -> float:
        return sum(math.nan if turn.draft_seconds is None else turn.draft_seconds for turn in self.turns)

    @property
    def verify_seconds(self) -> float:
        return sum(math.nan if turn.verify_seconds is None else turn.verify_seconds for turn in self.turns)


class RecordFile:
    """A JSONL file of records that grows as answers come, and is gone on with after an interruption.

    Answers of one prompt under one setting form a group: all contenders, one after the other. A group that an interruption cut
    short is dropped when the file is opened, so that what is compared was always measured within one stretch of time.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[Record]:
        """All records; a last line that was cut short is left out.

        Raises:
            HSpecError: the file cannot be read.
            UsageError: a line is no record.
        """
        try:
            lines = whole_lines(self.path, begins='{"task"')
        except OSError as error:
            raise HSpecError(f"cannot read {self.path}: {reason(error)}") from error
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(Record.model_validate_json(line))
            except ValidationError as error:
                raise UsageError(
                    f"{self.path}, line {number}: not an answer of an evaluation, or damaged: remove that line, and its prompt is answered "
                    f"again; or choose another folder"
                ) from error
        return records

    def append(self, record: Record) -> None:
        """Raises:
        HSpecError: the file cannot be written; what is there stays.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, record.model_dump_json())
        except OSError as error:
            raise HSpecError(
                f"cannot write {self.path}: {reason(error)}; what was measured is kept, the same command goes on from it"
            ) from error

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the file's content, whole or not at all."""
        temporary = beside(self.path)
        try:
            temporary.write_text("".join(r.model_dump_json() + "\n" for r in records), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise HSpecError(f"cannot write {self.path}: {reason(error)}; what was there is kept") from error


Group = tuple[str, str, str]
"""Task, prompt id, setting."""


def group_of(record: Record) -> Group:
    return record.task, record.id, record.setting


def whole_groups(records: Sequence[Record], contenders: Sequence[str]) -> list[Record]:
    """Those records whose group has every one of these contenders, in their order; others' records of such groups are left out."""
    present: dict[Group, set[str]] = {}
    for record in records:
        present.setdefault(group_of(record), set()).add(record.contender)
    wanted = set(contenders)
    return [r for r in records if wanted <= present[group_of(r)] and r.contender in wanted]

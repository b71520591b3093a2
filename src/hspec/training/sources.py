"""Where conversations come from: files, the packaged ones, and data sets of the hub, one or several with weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, SerializerFunctionWrapHandler, model_serializer, model_validator

from hspec.drafters.config import Strict
from hspec.errors import HSpecError, UsageError
from hspec.targets.packaged import SHAREGPT, fetch
from hspec.training.conversations import Conversation, ReadReport, stream_conversations, usable

PACKAGED_DATA = "sharegpt"

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".txt", ".md", ".csv", ".gz", ".parquet")
_COLUMNS = ("id", "messages", "conversations", "turns", "prompt")
"""Of a table only these are read."""
_TABLE = 'a table with a column "messages", "conversations", "turns" or "prompt"'

Say = Callable[[str], None]


class SourceConfig(Strict):
    """One source of conversations. A name alone stands for a source with nothing else said."""

    source: str = Field(min_length=1)
    """A file (JSONL, ShareGPT JSON, text, Parquet), ``sharegpt`` for the packaged conversations, a data set's id at the hub, or the
    folder of one."""
    weight: PositiveFloat | None = None
    """Share of the documents that an epoch draws from it, in relation to the other sources'. For all of them or for none: without
    weights each document is drawn once."""
    split: str | None = None
    """Of a data set; ``train`` by default."""
    subset: str | None = None
    """Of a data set that has several."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> Any:
        values = {name: value for name, value in handler(self).items() if value is not None}
        return self.source if values.keys() == {"source"} else values

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return ":".join(part for part in (self.source, self.subset, self.split) if part)

    @property
    def path(self) -> Path:
        return Path(self.source).expanduser()

    @property
    def is_data_set(self) -> bool:
        """Whether the package ``datasets`` is to read it: a folder, or what looks like a hub id and is no file."""
        if self.source == PACKAGED_DATA or self.path.is_file():
            return False
        return self.path.is_dir() or (_HUB_ID.fullmatch(self.source) is not None and self.path.suffix not in _FILE_SUFFIXES)


def check_source(source: SourceConfig) -> None:
    """Whether there is such a source, as far as that can be said without a network.

    Raises:
        UsageError: no such file, or a split of something that has none.
    """
    if source.is_data_set:
        return
    if source.source != PACKAGED_DATA and not source.path.is_file():
        raise UsageError(
            f"no data file at {source.source}: check the path given to --data, or take '{PACKAGED_DATA}' or a data set's id (owner/name)"
        )
    if source.split is not None or source.subset is not None:
        raise UsageError(f"{source.source} is a file and has no split or subset: leave them out of data")


def describe_sources(sources: Sequence[SourceConfig]) -> str:
    """One line: names, shares, and what is missing to read them."""
    total = sum(s.weight or 0.0 for s in sources)
    parts = [s.label + (f" ({100 * s.weight / total:.0f} %)" if s.weight is not None else "") for s in sources]
    missing = any(s.is_data_set for s in sources) and find_spec("datasets") is None
    return ", ".join(parts) + (" (needs pip install 'hspec[data]')" if missing else "")


def stream_sources(sources: Sequence[SourceConfig], say: Say = lambda _: None) -> Iterator[Conversation]:
    """The conversations of all sources, one by one, each with the number of its source.

    Raises:
        UsageError: a source is not there, or a package is needed to read it.
        HSpecError: it cannot be read, or has no usable conversation.
    """
    for source in sources:
        check_source(source)
    for number, source in enumerate(sources):
        report = ReadReport(source.label)
        for conversation in _stream(source, report):
            yield replace(conversation, source=number)
        say(report.summary())


def _stream(source: SourceConfig, report: ReadReport) -> Iterator[Conversation]:
    if source.source == PACKAGED_DATA:
        return stream_conversations(fetch(SHAREGPT), report)
    if source.is_data_set:
        return usable(_data_set_rows(source), report, _TABLE)
    if source.path.suffix == ".parquet":
        return usable(_parquet_rows(source.path), report, _TABLE)
    return stream_conversations(source.path, report)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UsageError(f"{path} needs the package pyarrow to be read: pip install 'hspec[data]', or give JSONL") from error
    number = 0
    try:
        with ParquetFile(path) as table:
            columns = [name for name in table.schema_arrow.names if name in _COLUMNS]
            if not set(columns) - {"id"}:
                raise HSpecError(f"{path} has the columns {', '.join(table.schema_arrow.names)}. Expected {_TABLE}")
            for batch in table.iter_batches(256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _filled(row)
    except (ArrowException, OSError) as error:
        raise HSpecError(f"cannot read {path} as Parquet, after {number} rows: {_first_line(error)}") from error


def _data_set_rows(source: SourceConfig) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(
            f"no file at {source.source}, and the package datasets is needed to read it as a data set: pip install 'hspec[data]'"
        ) from error
    where = str(source.path) if source.path.is_dir() else source.source
    try:
        rows = load_dataset(where, source.subset, split=source.split or "train")
        # Columns that are not wanted are not decoded.
        rows = rows.select_columns([name for name in rows.column_names if name in _COLUMNS])
    except Exception as error:  # the library raises many types
        raise UsageError(f"cannot load the data set {source.label}: {_first_line(error)}") from error
    if not set(rows.column_names) - {"id"}:
        raise HSpecError(f"the data set {source.label} has none of the columns that are read. Expected {_TABLE}")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", _filled(row)


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """A row without its empty cells: tables have every column in every row."""
    return {name: value for name, value in row.items() if value is not None}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

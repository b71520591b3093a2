"""The log of a run after it was ended by force: it may know more than the state that the run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

from hspec.errors import HSpecError
from hspec.files import write_text
from hspec.training.trackers import LOG_FILE


def cut_log(folder: Path, step: int) -> None:
    """Take out what was logged after ``step`` optimiser steps: the resumed run will say it again.

    Raises:
        HSpecError: it cannot be read or written.
    """
    path = folder / LOG_FILE
    if not path.exists():
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a last line without its end was cut short
    except (OSError, UnicodeDecodeError) as error:
        raise HSpecError(f"cannot read {path}: {error}: move it away") from error
    kept = [line for line in lines if _step(line) <= step]
    if kept != lines or not path.read_bytes().endswith(b"\n"):
        write_text(path, "".join(line + "\n" for line in kept))


def measured_at_end(folder: Path) -> int | None:
    """The number of steps of a run whose averaged weights were measured behind the last one, by its log; None if they were not, or nothing
    is known."""
    try:
        last = json.loads((folder / LOG_FILE).read_text(encoding="utf-8").splitlines()[-1])
        return int(last["steps"]) if last["kind"] == "held-out" and last["step"] == last["steps"] else None
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None


def _step(line: str) -> int:
    """Of a record; a line that is none belongs to no run that can be resumed, and stays."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0

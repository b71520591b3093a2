"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hspec.errors import HSpecError


def write_text(path: Path, text: str) -> None:
    """Write a small file under a temporary name, then rename it.

    Raises:
        HSpecError: the disk or its permissions do not allow it; what was there before stays.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder is a file, say
            temporary.unlink(missing_ok=True)
        raise HSpecError(f"cannot write {path}: {reason(error)}; free some space or choose another place") from error


def drop_cut_line(path: Path) -> bytes:
    """The whole lines of a JSONL file; a last line that an interruption cut short is removed from the file, so that
    what is appended starts a line of its own."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    return data[:whole]


def reason(error: BaseException) -> str:
    """An operating-system error without its number and its path, which the message around it names."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__

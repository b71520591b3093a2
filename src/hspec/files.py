"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hspec.errors import HSpecError, UsageError


def write_text(path: Path, text: str) -> None:
    """Write a small file under a temporary name, then rename it.

    Raises:
        HSpecError: the disk or its permissions do not allow it; what was there before stays.
    """
    temporary = beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where the folder is a file, say
            temporary.unlink(missing_ok=True)
        raise HSpecError(f"cannot write {path}: {reason(error)}; free some space or choose another place") from error


def whole_lines(path: Path, begins: str) -> list[bytes]:
    """The whole lines of a JSONL file, none where there is no file. A last line that an interruption cut short is left out; it stays in the
    file until something is appended, for whoever reads need not be the one who writes.

    Args:
        begins: how a record begins.

    Raises:
        UsageError: what stands behind the last whole line is no record that was cut short: the file is something else.
        OSError: it cannot be read.
    """
    data = path.read_bytes() if path.exists() else b""
    whole, start = data.rfind(b"\n") + 1, begins.encode()
    rest = data[whole:]
    if not (rest.startswith(start) or start.startswith(rest)):
        raise UsageError(f"{path} does not end in a record, so it is another program's, or damaged: choose another file")
    return data[:whole].splitlines()


def append_line(path: Path, line: str) -> None:
    """Write a line behind the last whole one of a file that was read by :func:`whole_lines`.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read(1) not in (b"", b"\n"):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")


def beside(path: Path) -> Path:
    """Where a file or folder is written before it is renamed to ``path``: a hidden name, so that it is nobody else's."""
    path = path.absolute()  # "." has no name to derive another from
    return path.with_name(f".{path.name}.partial")


def reason(error: BaseException) -> str:
    """An operating-system error without its number and its path, which the message around it names."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__

"""The command line: parse, call, print. One file a group of commands."""

from __future__ import annotations

import errno
import sys
import traceback
import warnings

import typer

from hspec.cli import bench, costs, decode, drafters, evaluate, features, kv, serve, study, training
from hspec.cli.app import app
from hspec.errors import HSpecError
from hspec.files import reason

COMMANDS = (decode, drafters, training, features, evaluate, study, costs, kv, serve, bench)
"""Importing a file registers its commands; help lists them in this order."""


def main() -> None:
    """Entry point: one clear message and an exit code (2: the request, 1: a failure); a traceback only with --debug."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"] or ["--help"]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"hspec: warning: {message}", file=sys.stderr)
        try:
            code = app(arguments, standalone_mode=False) or 0
        except Exception as error:
            if debug:
                traceback.print_exc()
            message, code = _explain(error)
            print(f"hspec: {' '.join(message.split())}", file=sys.stderr)
        except KeyboardInterrupt:
            code = 130
    sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    """A message for the user, and the exit code."""
    if isinstance(error, HSpecError):
        return str(error), error.exit_code
    if isinstance(error, _COMMAND_LINE_ERROR):
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "hspec"
        return f"{error.format_message()} ('{command} --help' shows the options)", 2  # type: ignore[attr-defined]
    if isinstance(error, typer.Abort):
        return "aborted", 1
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return f"out of memory: {_first_line(error)}; take a smaller batch or model, or a machine with more", 1
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = "; free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{where}{reason(error)}{advice}", 1
    return f"unexpected {type(error).__name__}: {_first_line(error)} (--debug shows where; please report it)", 1


_COMMAND_LINE_ERROR = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""Typer brings its own copy of click, or uses the one that is installed, by version."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]

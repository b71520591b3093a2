"""The application that every command registers with."""

from __future__ import annotations

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Parallel speculative decoding without a drafter-side KV cache.",
)  # fmt: skip


def make_console(quiet: bool) -> Console:
    """Where people read: standard error if standard output is for a program."""
    return Console(stderr=quiet, highlight=False)

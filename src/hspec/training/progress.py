"""A training run on the terminal: a progress bar, a line for every report, and Ctrl-C that saves."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hspec.training.trainer import Trainer


@contextmanager
def until_interrupted(on_first: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C raises nothing: the function that is given says whether it was pressed."""
    pressed = False

    def press(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        on_first()

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def run_with_progress(trainer: Trainer, console: Console) -> None:
    """Run to the end or to the first Ctrl-C; either way the state is saved."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with until_interrupted(lambda: console.print("[dim]stopping after this step, then saving ...[/dim]")) as stop:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=trainer.config.steps, completed=trainer.step)

            def report(record: dict[str, Any]) -> None:
                progress.update(task, completed=record["step"])
                progress.console.print(_line(record))

            trainer.run(report, stop)
        stopped = stop()
    where = f"step {trainer.step} of {trainer.config.steps}"
    console.print(f"{'stopped at' if stopped else 'done,'} {where}; the drafter is in {trainer.folder}")


def _line(record: dict[str, Any]) -> str:
    rates = " ".join(f"{a:.3f}" for a in record["acceptance"])
    speed = f"{record['blocks_per_second']:.0f} blocks/s" if record["kind"] == "train" else "averaged weights"
    return (
        f"[dim]{record['kind']:>8}[/dim] step {record['step']:>6} loss {record['loss']:.3f} acceptance {rates} "
        f"tau (estimate) T=1 {record['tau_sampling']:.3f} greedy {record['tau_greedy']:.3f} {speed}"
    )

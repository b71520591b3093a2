"""A training run on the terminal: a progress bar, a line for every report, and an end on request that saves."""

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
    """Within, Ctrl-C and SIGTERM (by which schedulers and launchers end a run) raise nothing: the function that is given says whether
    one came."""
    asked = False

    def ask(*_: Any) -> None:
        nonlocal asked
        if not asked:
            on_first()
        asked = True

    previous = {kind: signal.signal(kind, ask) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def run_with_progress(trainer: Trainer, console: Console) -> bool:
    """Run to the end, or until any of its processes is asked to stop; either way the state is saved. False if it was stopped."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    interruptible = until_interrupted(lambda: console.print("[dim]stopping after this step, then saving ...[/dim]"))
    with interruptible as stop, Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=trainer.config.steps, completed=trainer.step)

        def report(record: dict[str, Any]) -> None:
            progress.update(task, completed=record["step"])
            progress.console.print(_line(record))

        trainer.run(report, stop)
    finished = trainer.step == trainer.config.steps
    how = "done," if finished else "stopped at"
    console.print(f"{how} step {trainer.step} of {trainer.config.steps}; the drafter is in {trainer.folder}")
    return finished


def _line(record: dict[str, Any]) -> str:
    rates = " ".join(f"{a:.3f}" for a in record["acceptance"])
    speed = f"{record['blocks_per_second']:.0f} blocks/s" if record["kind"] == "train" else "averaged weights"
    return (
        f"[dim]{record['kind']:>8}[/dim] step {record['step']:>6} loss {record['loss']:.3f} acceptance {rates} "
        f"tau (estimate) T=1 {record['tau_sampling']:.3f} greedy {record['tau_greedy']:.3f} {speed}"
    )

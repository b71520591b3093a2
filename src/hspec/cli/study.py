"""``hspec study``: methods trained alike and measured beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hspec.cli.app import app, make_console
from hspec.cli.options import JsonOption, ThreadsOption, prefer_large_pages


@app.command()
def study(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="A YAML file, or recipe: what makes a block count. By default the paper's comparison at a laptop's size.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Drafters, answers and the report; the same command goes on.")
    ] = Path("study"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be trained, and stop.")] = False,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Train several methods with one recipe and several seeds, measure all of them on the same prompts, and write a report.

    Ctrl-C saves; the same command goes on. Started several times, the processes share the trainings out.

    Example:  hspec study --out study --dry-run
    """
    prefer_large_pages()
    import torch

    from hspec.evaluation.study import read_study
    from hspec.evaluation.study_run import is_done, run_study
    from hspec.training.progress import until_interrupted

    if threads:
        torch.set_num_threads(threads)
    settings = read_study(config)
    console = make_console(as_json)
    table = Table("training", "state", title=f"{len(settings.pieces())} trainings, {settings.job.train.steps:,} steps each")
    for piece in settings.pieces():
        folder = piece.folder(out)
        table.add_row(piece.name, "done" if is_done(folder) else "begun" if folder.exists() else "to do")
    console.print(table)
    if dry_run:
        return
    stopped = False

    @contextmanager
    def interruptible() -> Iterator[Callable[[], bool]]:
        nonlocal stopped
        with until_interrupted(lambda: console.print("[dim]stopping after this step, then saving ...[/dim]")) as stop:
            yield stop
            stopped = stop()

    try:
        result = run_study(
            settings, out,
            say=lambda line: console.print(f"[dim]{escape(line)}[/dim]"),
            report=lambda piece, record: console.print(
                f"  {piece.name:20} {record['kind']:8} step {record['step']:,} loss {record['loss']:.3f} tau (estimate) "
                f"{record['tau_sampling']:.3f}"
            ),
            on_answer=lambda done, total, last: None if done % 50 else console.print(f"[dim]answers {done:,} of {total:,}[/dim]"),
            interruptible=interruptible,
        )  # fmt: skip
    except KeyboardInterrupt:
        result, stopped = None, True
    if result is None and not stopped:
        return
    if result is None:
        console.print(f"stopped; 'hspec study --out {out}' with the same settings goes on")
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(result))
    else:
        _print(result, out)


def _print(result: dict[str, Any], out: Path) -> None:
    from hspec.evaluation.statistics import in_words

    console = make_console(False)
    about = result["trainings"]
    table = Table(title=f"trainings; at equal time: {about['equal_time_seconds']:.0f} {about['clock'].replace('_', ' ')}")
    for column in (
        "training",
        "M parameters",
        "blocks",
        "blocks/s",
        "held-out loss",
        "tau (estimate)",
        "at equal time",
        "by cycle",
    ):
        table.add_column(column, justify="left" if column == "training" else "right")
    for name, r in about["runs"].items():
        table.add_row(
            name, f"{r['parameters'] / 1e6:.1f}", f"{r['blocks']:,}", f"{r['blocks_per_second']:.0f}", f"{r['held_out_loss']:.3f}",
            f"{r['estimated_tau']:.3f}", f"{r['estimated_tau_at_equal_time']:.3f}",
            "-" if r["estimated_tau_by_cycle"] is None else f"{r['estimated_tau_by_cycle']:.3f}",
        )  # fmt: skip
    console.print(table)
    for setting, found in result["evaluation"]["settings"].items():
        table = Table("drafter", "tau (95 %)", title=setting)
        for name, e in found["entrants"].items():
            table.add_row(name, in_words(e["tau"], 3))
        console.print(table)
    for setting, found in result["timing"]["settings"].items():
        table = Table("drafter", "speedup (95 %)", title=f"{setting}, {sum(found['prompts'].values())} prompts one at a time")
        for name, e in found["entrants"].items():
            table.add_row(name, in_words(e["speedup"], 3))
        console.print(table)
    console.print(
        f"{out / 'report.html'} shows all of it{', timing.html the speeds' if (out / 'timing.html').exists() else ''}"
    )

"""``hspec train`` and ``measure``: a drafter of one's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hspec.cli.app import app, make_console
from hspec.cli.options import (
    DEFAULT_TARGET,
    DeviceOption,
    DrafterOption,
    JsonOption,
    KOption,
    MaxTokens,
    TargetArgument,
    ThreadsOption,
    check_device,
    load,
    prefer_large_pages,
    sampling_params,
)
from hspec.errors import UsageError


@app.command()
def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for checkpoints, log and settings.")] = Path("drafter"),
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML settings, or a recipe's name; options override them.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="The model to draft for.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="auto (fits any target), a preset's name (see 'hspec info PRESET') or a YAML or JSON file."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="hspec, or another drafter of 'hspec methods'.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="JSONL, ShareGPT JSON or text; 'sharegpt' is packaged.")] = None,
    own_answers: Annotated[bool | None, typer.Option("--own-answers/--given-answers", help="Who answers the prompts.")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Use at most so many prompts.")] = None,
    init_from: Annotated[str | None, typer.Option(help="Start from this drafter instead of the target's layers.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, or bf16 where the processor has bf16 products.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initialisation, order and anchors.")] = None,
    feature_server: Annotated[
        list[str] | None,
        typer.Option(help="host:port of 'hspec serve-features', which runs the target's layers; may be given several times."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, exactly where it stopped.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    shard: Annotated[
        bool,
        typer.Option("--shard", help="Of several processes each keeps a share of the drafter (FSDP2), not all of it (DDP)."),
    ] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Train a drafter, H-Spec or another method. Ctrl-C saves; --resume goes on. Under accelerate launch or torchrun: docs/distributed.md.

    Examples:  hspec train --out my-drafter --steps 2000   |   hspec train --config first-run.yaml --dry-run
    |   hspec train --out my-drafter --resume   |   accelerate launch -m hspec.cli train --device cuda --out my-drafter
    """
    prefer_large_pages()
    import torch

    from hspec.training.build import build
    from hspec.training.plan import plan as plan_of
    from hspec.training.processes import Processes
    from hspec.training.progress import run_with_progress

    processes = Processes.launched(device)
    if shard and processes.count == 1:
        raise UsageError("--shard: there is one process, which has all of the drafter: start several (docs/distributed.md)")
    if threads:
        torch.set_num_threads(threads)
    processes.together(lambda: check_device(str(processes.device)))
    given = {
        "config": config, "target": target, "preset": preset, "method": method, "data": data, "own_answers": own_answers,
        "max_prompts": max_prompts, "init_from": init_from, "steps": steps, "precision": precision, "seed": seed,
    }  # fmt: skip
    settings = processes.together(lambda: _settings(out, resume, given, feature_server))
    console = Console(highlight=False, quiet=not processes.main)
    how = "1" if processes.count == 1 else f"{processes.count}, {'FSDP2' if shard else 'DDP'}, on {processes.device.type}"
    processes.on_main(lambda: _show_plan(plan_of(settings, out, resume).lines | {"processes": how}, console))
    if dry_run:
        return
    processes.on_main(lambda: _check_alone(out))
    try:
        trainer = build(settings, out, resume, lambda line: console.print(f"[dim]{escape(line)}[/dim]"), processes, shard)
    except KeyboardInterrupt:
        if processes.main:
            print(
                "hspec: interrupted before training; answers so far are kept, the same command goes on with them",
                file=sys.stderr,
            )
        raise typer.Exit(130) from None
    with ExitStack() as held:
        processes.on_main(lambda: held.enter_context(_alone_in(out)))
        finished = run_with_progress(trainer, console)
    processes.close()
    if not finished:
        raise typer.Exit(130)


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """
    Raises:
        UsageError: another process trains into that folder.
    """
    from hspec.locks import alone

    with alone(out / "run") as free:
        if not free:
            raise UsageError(f"another process trains in {out}: wait for it, or choose another --out")
        yield


def _check_alone(out: Path) -> None:
    """At once, and not when everything is prepared; what cannot be trained leaves no folder behind.

    Raises:
        UsageError: another process trains into that folder.
    """
    if (out / "run.lock").exists():
        with _alone_in(out):
            pass


def _settings(out: Path, resume: bool, given: dict[str, Any], feature_server: list[str] | None) -> Any:
    """The job: as it was saved if it is resumed, or from a file and the options that were given. Servers may have moved since."""
    from hspec.training.job import Job, override, read_job
    from hspec.training.plan import RUN_FILE, check_run

    if resume:
        names = ", ".join(f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None)
        if names:
            raise UsageError(f"--resume takes the settings saved in {out}: leave out {names}")
        check_run(out, resume)
        return override(read_job(out / RUN_FILE), {}, feature_server=feature_server)
    config = given.pop("config")
    train = {name: given.pop(name) for name in ("steps", "precision", "seed")}
    return override(read_job(config) if config else Job(), train, feature_server=feature_server, **given)


def _show_plan(lines: dict[str, str], console: Console) -> None:
    table = Table(title="plan", show_header=False)
    for name, line in lines.items():
        table.add_row(name, escape(line))
    console.print(table)


@app.command()
def measure(
    target: TargetArgument = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    k: KOption = None,
    data: Annotated[list[str] | None, typer.Option(help="Where held-out prompts come from; 'sharegpt' is packaged.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many held-out prompts.")] = 128,
    max_tokens: MaxTokens = 256,
    out: Annotated[Path, typer.Option("--out", "-o", help="Records go here, and a rerun goes on from them.")] = Path(
        "measured.jsonl"
    ),
    batch: Annotated[int, typer.Option(min=1, help="Prompts that run at once.")] = 8,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure tau on held-out prompts, greedy and at T = 1, with bootstrap intervals.

    Examples:  hspec measure   |   hspec measure -d my-drafter --limit 32 --json
    """
    from hspec.evaluation.held_out import label, read_records, summarise
    from hspec.evaluation.held_out import measure as run
    from hspec.training.data import held_out_prompts
    from hspec.training.job import PACKAGED_DATA

    read_records(out)
    loaded, draft = load(target, drafter, False, "cpu", "float32", threads)
    what = label(loaded, draft, k or draft.max_draft, max_tokens)
    read_records(out, what)
    prompts = held_out_prompts(loaded, data or [PACKAGED_DATA], limit)
    settings = {
        "greedy": sampling_params(max_tokens=max_tokens),
        "T=1": sampling_params(max_tokens=max_tokens, temperature=1.0),
    }
    console = make_console(True)
    with console.status("measuring") as status:
        records = run(
            loaded,
            draft,
            prompts,
            out,
            k or draft.max_draft,
            settings,
            what,
            batch,
            lambda n, m: status.update(f"{n} of {m} answers"),
        )
    summary = {"target": loaded.name, "k": k or draft.max_draft, "max_tokens": max_tokens, **summarise(records)}
    if as_json:
        print(json.dumps(summary))
        return
    table = Table("setting", "prompts", "tau", "95 % interval", "acceptance by position")
    for name in settings:
        s = summary[name]
        rows = [("all", s), ("without looping answers", s["without_looping"]), *s["by_kind"].items()]
        for row, part in rows:
            low, high = part["interval"]
            rates = "  ".join(f"{a:.2f}" for a in part.get("acceptance", []))
            interval = "?" if low is None else f"{low:.2f} .. {high:.2f}"
            table.add_row(f"{name}, {row}", str(part["prompts"]), f"{part['tau']:.2f}", interval, rates)
    Console(highlight=False).print(table)

"""``hspec costs``: what drafting, injection and verification take on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from hspec.cli.app import app, make_console
from hspec.cli.options import DEFAULT_TARGET, DeviceOption, JsonOption, TargetArgument, ThreadsOption, check_device, numbers
from hspec.errors import UsageError


@app.command()
def costs(
    target: TargetArgument = DEFAULT_TARGET,
    methods: Annotated[
        str, typer.Option(help="Which, separated by commas; see 'hspec methods'.")
    ] = "hspec,dspark,dflash,dflash-kv",
    concurrency: Annotated[str, typer.Option(help="Sequences in a batch, separated by commas.")] = "1,4,16",
    lengths: Annotated[str, typer.Option(help="Context tokens of each, separated by commas.")] = "512,1024,2048",
    rows: Annotated[str, typer.Option(help="Rows of a verification, separated by commas.")] = "1,2,4,5,8",
    repeats: Annotated[int, typer.Option(min=1, help="Median of so many.")] = 7,
    memory: Annotated[float, typer.Option(min=0.1, help="Contexts may take so many GB.")] = 8.0,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Time drafting over concurrency and context length, injection into caches, and verification by rows.

    Drafters and contexts are random, of the target's sizes; so is the target's layer, where a preset names a target that is not
    here.   Example:  hspec costs --methods hspec,dspark --concurrency 1,8 --lengths 1024
    """
    import torch

    from hspec.drafters.presets import PRESETS
    from hspec.evaluation.compare import configurations
    from hspec.evaluation.costs import ACCEPTED, drafting_costs, layer_target, verification_costs
    from hspec.targets.sources import load_target

    if threads:
        torch.set_num_threads(threads)
    check_device(device)
    known = {name: config for name, config in configurations(target).items() if config is not None}
    chosen = {}
    for name in (name.strip() for name in methods.split(",")):
        if name not in known:
            raise UsageError(f"--methods: no drafter {name!r} to time; there are {', '.join(known)}")
        chosen[name] = known[name]
    counts, contexts, heights = numbers("--concurrency", concurrency), numbers("--lengths", lengths), numbers("--rows", rows)
    console = make_console(True)
    with console.status("timing"):
        drafting = drafting_costs(chosen, counts, contexts, repeats, device, memory * 1e9)
        whole = target not in PRESETS
        model = load_target(target, device) if whole else layer_target(PRESETS[target], device=device)
        verification = verification_costs(
            model, heights, [n for n in contexts if n + max(heights) < model.max_positions], repeats
        )
    about = {
        "target": model.name,
        "threads": torch.get_num_threads(),
        "device": device,
        "repeats": repeats,
        "drafters": "random weights",
        "injected": ACCEPTED,
    }
    if as_json:
        rows_ = [{**asdict(c), "total_ms": c.total_ms} for c in drafting]
        print(json.dumps({**about, "drafting": rows_, "verification": [asdict(v) for v in verification]}))
        return
    _print(about, drafting, verification)


def _print(about: dict, drafting: list, verification: list) -> None:
    table = Table(title=f"drafting, ms a step (random weights, {about['threads']} threads, median of {about['repeats']})")
    for column in ("method", "sequences", "context", "propose", "inject", "both"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for c in drafting:
        injected = f"{c.inject_ms:.2f}" if c.inject_ms else "-"
        table.add_row(c.method, str(c.concurrency), f"{c.length:,}", f"{c.propose_ms:.2f}", injected, f"{c.total_ms:.2f}")
    make_console(False).print(table)
    table = Table(title=f"verification, ms a forward ({about['target']})")
    for column in ("context", "rows", "ms"):
        table.add_column(column, justify="right")
    for v in verification:
        table.add_row(f"{v.length:,}", str(v.rows), f"{v.ms:.2f}")
    make_console(False).print(table)

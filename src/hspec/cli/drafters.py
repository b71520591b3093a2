"""``hspec info``, ``methods`` and ``convert``: drafters from the outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hspec.cli.app import app
from hspec.cli.options import DEFAULT_TARGET, JsonListOption, JsonOption, TargetArgument
from hspec.errors import UsageError


@app.command()
def info(
    source: Annotated[
        str | None, typer.Argument(help="A target (smollm2, folder, .gguf, hub id), a drafter's folder, or a preset.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Parameters of every method, beside H-Spec's.")] = False,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", help="With --compare: for this target or preset; may be given several times."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Layers, heads, parameters by part and KV bytes a token of a target, a drafter or a preset; or all methods compared.

    Examples:  hspec info smollm2   |   hspec info qwen3-8b   |   hspec info path/to/drafter --json
    |   hspec info --compare --target smollm2
    """
    from hspec.evaluation.compare import PAPER_TARGETS
    from hspec.evaluation.describe import describe

    if compare:
        if source is not None:
            raise UsageError(f"--compare is of all methods: name their target with --target {source}")
        _print_comparison(target or list(PAPER_TARGETS), as_json)
        return
    if target:
        raise UsageError("--target goes with --compare: give what to describe as an argument")
    if source is None:
        raise UsageError("name what to describe: a target, a drafter's folder or a preset (or --compare for all methods)")
    facts = describe(source)
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(title=escape(source), show_header=False)
    for key, value in facts.items():
        shown = ", ".join(f"{n}: {v:,}" for n, v in value.items()) if isinstance(value, dict) else value
        table.add_row(key.replace("_", " "), f"{shown:,}" if isinstance(shown, int) else escape(str(shown)))
    Console(highlight=False).print(table)


def _print_comparison(targets: list[str], as_json: bool) -> None:
    from hspec.evaluation.compare import compare

    found = {target: compare(target) for target in targets}
    if as_json:
        print(json.dumps([row for rows in found.values() for row in rows]))
        return
    console = Console(highlight=False)
    for target, rows in found.items():
        table = Table(title=f"{escape(target)}: trainable parameters, millions")
        table.add_column("method", no_wrap=True)
        for name in ("all", "to hspec"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("by part")
        for row in rows:
            parts = {part.replace("_", " "): n / 1e6 for part, n in row["parameters_by_part"].items() if n}
            by_part = ", ".join(f"{part} {n:.2f}" for part, n in parts.items())
            table.add_row(row["method"], f"{row['parameters'] / 1e6:.2f}", f"{row['difference_percent']:+.2f} %", by_part)
        console.print(table)


@app.command()
def methods(target: TargetArgument = DEFAULT_TARGET, as_json: JsonListOption = False) -> None:
    """All methods: their parts, drafter passes a step, and the bytes that they keep of every context token (bf16).

    Examples:  hspec methods   |   hspec methods --target qwen3-8b --json
    """
    from hspec.evaluation.compare import methods_table

    rows = methods_table(target)
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=f"methods on {escape(target)}")
    table.add_column("method", no_wrap=True)
    for name in ("context", "backbone", "head"):
        table.add_column(name)
    for name in ("passes", "KV bytes a token"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row.values()))
    Console(highlight=False).print(table)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A drafter's folder or hub id, in any layout.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    to: Annotated[str, typer.Option("--to", help="hspec, speculators (DFlash, DSpark, EAGLE ...) or authors (H-Spec).")],
    target: TargetArgument = DEFAULT_TARGET,
    mask_token: Annotated[
        int | None,
        typer.Option(
            "--mask-token", min=0, help="Id of the mask slots' token, one that no text has; by default the one that IN names."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a drafter in another layout; it is read back and its logits are compared before OUT appears.

    Examples:  hspec convert my-dspark exported --to speculators --target Qwen/Qwen3-8B
    |   hspec convert downloaded my-drafter --to hspec   |   hspec convert my-drafter theirs --to authors --mask-token 5
    """
    from dataclasses import asdict

    from hspec.api import drafter_folder
    from hspec.drafters import convert as job
    from hspec.targets.sources import load_target

    folder = drafter_folder(source, target)
    job.check_places(folder, out, to)
    done = job.convert(folder, out, to, load_target(target, linears="plain"), mask_token)
    if as_json:
        print(json.dumps(asdict(done)))
        return
    Console(highlight=False).print(
        f"{escape(str(out))}: {done.method}, {done.parameters:,} parameters, from the layout of {done.source} to that of "
        f"{done.layout}. Read back, the logits of {done.blocks} blocks differ by at most {done.max_difference:.1e} (largest "
        f"logit {done.max_logit:.3g})."
    )

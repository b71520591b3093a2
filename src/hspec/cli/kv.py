"""``hspec kv``: what a token costs in KV cache, and how many requests that leaves room for."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from hspec.cli.app import app, make_console
from hspec.cli.options import DEFAULT_TARGET, TargetArgument
from hspec.errors import UsageError


@app.command()
def kv(
    target: TargetArgument = DEFAULT_TARGET,
    method: Annotated[str | None, typer.Option(help="One of 'hspec methods'; by default all.")] = None,
    drafter: Annotated[str | None, typer.Option("--drafter", "-d", help="A drafter's folder or hub id instead.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")] = "bf16",
    memory: Annotated[str | None, typer.Option(help="Of a GPU, as in 80GB: plan how many requests fit.")] = None,
    weights: Annotated[str | None, typer.Option(help="Of the target; by default its parameters in bf16.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a request.")] = 4096,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share a target (tensor parallel).")] = 1,
    reserve: Annotated[str, typer.Option(help="Left for activations on each GPU.")] = "4GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object, or a list of all methods'.")] = False,
) -> None:
    """KV bytes a token of a target and of drafters beside it, from configurations alone; and how many requests fit.

    Examples:  hspec kv --target qwen3-8b   |   hspec kv --target qwen3-8b --method dflash --memory 80GB --context 8192
    """
    from hspec.api import drafter_folder
    from hspec.drafters.checkpoint import known_config
    from hspec.drafters.config import DrafterConfig
    from hspec.evaluation.compare import configurations
    from hspec.evaluation.kv_budget import drafter_weight_bytes, kv_cost, kv_costs, parse_bytes, plan, weight_bytes

    if method is not None and drafter is not None:
        raise UsageError("--method and --drafter both name a drafter: leave out one of them")
    if drafter is not None:
        config = known_config(drafter_folder(drafter, target))
        costs, configs = [kv_cost(target, config, kv_dtype)], dict[str, DrafterConfig | None]({config.method: config})
    else:
        of_all = kv_costs(target, kv_dtype)
        if method is not None and method not in of_all:
            raise UsageError(f"--method {method}: there is no such method; there are {', '.join(of_all)}")
        costs, configs = [c for name, c in of_all.items() if method in (None, name)], configurations(target)
    rows = [cost.as_dict() for cost in costs]
    if memory is not None:
        own = weight_bytes(target) if weights is None else parse_bytes("--weights", weights)
        each, kept = parse_bytes("--memory", memory), parse_bytes("--reserve", reserve)
        for cost, row in zip(costs, rows, strict=True):
            row["plan"] = plan(cost, each, own, drafter_weight_bytes(configs[cost.method]), context, tp, kept).as_dict()
    if as_json:
        print(json.dumps(rows[0] if method or drafter else rows))
        return
    _print(target, rows, context)


def _print(target: str, rows: list[dict[str, Any]], context: int) -> None:
    console = make_console(False)
    planned = "plan" in rows[0]
    table = Table(title=f"KV cache a token, {target}")
    for column in (
        "method",
        "target",
        "drafter",
        "growth",
        *((f"requests of {context:,}", "without its cache") if planned else ()),
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        cells = [row["method"], f"{row['target_bytes']:,}", f"{row['drafter_bytes']:,}", f"{row['growth']:.3f}"]
        if planned:
            cells += [f"{row['plan']['requests']:,}", f"{row['plan']['requests_without_drafter_cache']:,}"]
        table.add_row(*cells)
    console.print(table)
    for line in rows[0]["arithmetic"]["target"]:
        console.print(f"target: {line}")
    if len(rows) == 1:
        console.print(f"drafter: {rows[0]['arithmetic']['drafter']}")
    for note in rows[0]["notes"]:
        console.print(f"note: {note}")

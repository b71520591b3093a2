"""``hspec kv``: what a token costs in KV cache, and how many requests that leaves room for."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from hspec.cli.app import app, make_console
from hspec.cli.options import DEFAULT_TARGET, TargetArgument
from hspec.errors import UsageError

CONTEXT, RESERVE = 4096, "4GB"


@app.command()
def kv(
    target: TargetArgument = DEFAULT_TARGET,
    method: Annotated[str | None, typer.Option(help="One of 'hspec methods'; by default all.")] = None,
    drafter: Annotated[str | None, typer.Option("--drafter", "-d", help="A drafter's folder or hub id instead.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Of K and V: bf16, fp16, fp32 or fp8.")] = "bf16",
    memory: Annotated[str | None, typer.Option(help="Of a GPU, as in 80GB: plan how many requests fit.")] = None,
    weights: Annotated[str | None, typer.Option(help="Of the target; by default its parameters in bf16.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help=f"Tokens of a request; by default {CONTEXT}.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="GPUs that share a target (tensor parallel); by default 1.")] = None,
    reserve: Annotated[str | None, typer.Option(help=f"For activations, of each GPU; by default {RESERVE}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object, or a list of all methods'.")] = False,
) -> None:
    """KV bytes a token of a target and of drafters beside it, from configurations alone; and how many requests fit.

    Examples:  hspec kv --target qwen3-8b   |   hspec kv --target qwen3-8b --method dflash --memory 80GB --context 8192
    """
    from hspec.api import drafter_folder
    from hspec.drafters.checkpoint import known_config
    from hspec.evaluation.kv_budget import kv_cost, kv_costs
    from hspec.evaluation.kv_plan import parse_bytes, plan, weight_bytes

    if method is not None and drafter is not None:
        raise UsageError("--method and --drafter both name a drafter: leave out one of them")
    of_plan = {"--weights": weights, "--context": context, "--tp": tp, "--reserve": reserve}
    given = [name for name, value in of_plan.items() if value is not None]
    if memory is None and given:
        raise UsageError(f"{given[0]} is for planning, and nothing is planned: give --memory too, as in 80GB")
    if drafter is not None:
        costs = [kv_cost(target, known_config(drafter_folder(drafter, target)), kv_dtype)]
    elif method is not None:
        costs = [*kv_costs(target, kv_dtype, [method]).values()]
    else:
        costs = [*kv_costs(target, kv_dtype).values()]
    rows = [cost.as_dict() for cost in costs]
    if memory is not None:
        each, kept = parse_bytes("--memory", memory), parse_bytes("--reserve", reserve or RESERVE)
        own = weight_bytes(target) if weights is None else parse_bytes("--weights", weights)
        for cost, row in zip(costs, rows, strict=True):
            row["plan"] = plan(cost, each, own, context or CONTEXT, tp or 1, kept).as_dict()
    if as_json:
        print(json.dumps(rows if len(rows) > 1 else rows[0]))
    else:
        _print(target, rows)


def _print(target: str, rows: list[dict[str, Any]]) -> None:
    console = make_console(False)
    planned = "plan" in rows[0]
    table = Table(title=f"KV bytes a token, {target}")
    for column in ("method", "target", "drafter", "growth", *(("requests", "without its cache") if planned else ())):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        cells = [row["method"], f"{row['target_bytes']:,}", f"{row['drafter_bytes']:,}", f"{row['growth']:.3f}"]
        if planned:
            cells += [f"{row['plan']['requests']:,}", f"{row['plan']['requests_without_drafter_cache']:,}"]
        table.add_row(*cells)
    console.print(table)
    sums = rows[0]["arithmetic"]
    for line in sums["target"]:
        console.print(f"target: {line}")
    if rows[0]["state_bytes_a_request"]:
        console.print(f"target: {sums['state']}")
    for row in rows:
        if row["drafter_bytes"] or len(rows) == 1:
            console.print(f"{row['method']}: {row['arithmetic']['drafter']}")
    if planned and len(rows) == 1:
        console.print(f"plan: {rows[0]['plan']['arithmetic']}")
    for note in dict.fromkeys(note for row in rows for note in row["notes"]):
        console.print(f"note: {note}")

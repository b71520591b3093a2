"""``hspec bench serve``: methods behind a server, under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hspec.cli.app import app, make_console
from hspec.cli.options import DEFAULT_TARGET, DraftsAtOption, JsonOption, TargetArgument, numbers

bench = typer.Typer(no_args_is_help=True, help="Measurements that take whole servers.")
app.add_typer(bench, name="bench")


@bench.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    target: TargetArgument = DEFAULT_TARGET,
    methods: Annotated[
        str, typer.Option(help="none, ngram, hspec (what ships), or names of --drafter; separated by commas.")
    ] = ("none,ngram,hspec"),
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="NAME=FOLDER, or NAME=plugin:FOLDER; several times.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests that are under way at once, separated by commas.")] = "1,4,8,16,32",
    requests: Annotated[int, typer.Option(min=1, help="Of each load; at least the highest concurrency.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Every round starts each server once.")] = 3,
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL with "prompt" or "turns"; by default the built-in prompts of the eight families.')
    ] = None,
    input_tokens: Annotated[int | None, typer.Option(min=1, help="Send made prompts of this length instead.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Of every answer; ends are not heeded.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    k: Annotated[int, typer.Option("-k", min=1, help="Drafted tokens a step, of all methods.")] = 4,
    drafts_at: DraftsAtOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and of sampling.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for runs, logs and the page; gone on with if it has some.")
    ] = Path("serving"),
    as_json: JsonOption = False,
) -> None:
    """Start a server for each method in turn, put it under load with 'vllm bench serve', watch its KV cache; several rounds.

    All options that are not below go to every server.   Example:  hspec bench serve --methods none,ngram,hspec
    --concurrency 1,4,16 --requests 32 --kv-cache-memory-bytes 200M
    """
    from hspec.errors import UsageError
    from hspec.evaluation.bench_setup import NO_PREFIX_CACHE, Servers, entrants_of, prompts_of
    from hspec.evaluation.throughput import Plan, write_bench
    from hspec.evaluation.throughput import bench as run_bench
    from hspec.serving import plugin, versions

    if prompts is not None and input_tokens is not None:
        raise UsageError("--prompts has prompts of its own, and --input-tokens makes some: leave out one of them")
    versions.require(plugin.has_native())
    counts = numbers("--concurrency", concurrency)
    if requests < max(counts):
        raise UsageError(f"--requests {requests} never are {max(counts)} at once: ask for as many at least")
    entrants = entrants_of([name.strip() for name in methods.split(",")], drafter or [], k, drafts_at)
    cached = any(option.startswith("--enable-prefix-caching") for option in context.args)
    server = [*context.args, *([] if cached or NO_PREFIX_CACHE in context.args else [NO_PREFIX_CACHE])]
    console = make_console(as_json)
    sent = prompts_of(target, prompts, input_tokens, requests, seed)
    plan = Plan(
        target=target, concurrency=counts, requests=requests, rounds=rounds, max_tokens=max_tokens, temperature=temperature, k=k,
        drafts_at=drafts_at,
        seed=seed, prompts=sent.origin, prompts_hash=sent.hash, input_tokens=sent.mean, server=server,
    )  # fmt: skip
    servers = Servers(plan, out)
    servers.check(entrants)
    run_bench(entrants, plan, sent.texts, out, servers.start, lambda line: console.print(line, markup=False))
    found = write_bench(out)
    if as_json:
        print(json.dumps(found))
        return
    _show(found, console)
    console.print(f"{out / 'serving.html'} shows it with plots", markup=False)


def _show(found: dict[str, Any], console: Console) -> None:
    rounds = found["plan"]["rounds"]
    title = f"{found['plan']['target']}, {'one round' if rounds == 1 else f'medians of {rounds} rounds'}; C requests at once, TTFT in ms"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("method", "C", "tok/s", "ratio", "TTFT", "ms/token", "KV peak", "KV room", "evicted", "tau"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for method, cells in found["methods"].items():
        for concurrency, c in cells.items():
            ratio, tau = ("-" if c[name] is None else f"{c[name]:.2f}" for name in ("ratio", "tau"))
            table.add_row(
                method, concurrency, f"{c['throughput']:.1f}", ratio, f"{c['ttft']:.0f}", f"{c['tpot']:.1f}",
                f"{100 * c['kv_peak']:.0f} %", f"{c['kv_tokens']:,}", str(c["preemptions"]), tau,
            )  # fmt: skip
    console.print(table)

"""``hspec eval``: drafters measured beside each other on the same prompts, with paired statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hspec.cli.app import app, make_console
from hspec.cli.options import (
    DEFAULT_TARGET,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxTokens,
    MinP,
    TargetArgument,
    ThreadsOption,
    TopK,
    TopP,
    load,
    numbers,
    sampling_params,
)  # fmt: skip


@app.command("eval")
def evaluate_(
    target: TargetArgument = DEFAULT_TARGET,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="FOLDER, hub id, smollm2, ngram or FOLDER+ngram; NAME=... names it. Several are compared.",
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks, separated by commas: families, deepspec, long, single ones, .jsonl files.")
    ] = "families",
    data: Annotated[Path | None, typer.Option(help="A folder of task files, which come before those that ship.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy; may be given several times.")] = None,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    k: Annotated[str | None, typer.Option("-k", help="Drafted tokens a step, several separated by commas.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each task.")] = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens of the prompts of long tasks, separated by commas; max: up to the target's limit.")
    ] = "1024",
    seed: Annotated[int, typer.Option(help="Of the choice of prompts, of sampling and of the bootstrap.")] = 0,
    max_tokens: MaxTokens = 256,
    batch: Annotated[
        int, typer.Option(min=1, help="Prompts answered at once; above 1 nothing is timed: for tau alone, and sooner.")
    ] = 1,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines of task files out.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Answers go here, and the same command goes on from them.")] = Path(
        "evaluation"
    ),
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = None,
) -> None:
    """Answer the same prompts with drafters and without one, interleaved, and compare them with paired intervals.

    Examples:  hspec eval --tasks families --limit 2 --out results   |
    hspec eval -d mine=run-1 -d other=run-2 --temperature 0 --temperature 1 --tasks math,code,chat --out both
    """
    from hspec.evaluation.harness import evaluate
    from hspec.evaluation.setup import contenders_of, longest_prompt, machine, settings_of, write_summary
    from hspec.evaluation.tasks.catalogue import check_tasks, load_tasks

    names = [name for name in (part.strip() for part in tasks.split(",")) if name]
    ks = None if k is None else numbers("-k", k)
    truncation = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    settings = settings_of(
        [
            sampling_params(temperature=t, max_tokens=max_tokens, seed=seed, **(truncation if t else {}))
            for t in temperature or [0.0]
        ]
    )
    made_to = None if lengths == "max" else numbers("--lengths", lengths)
    check_tasks(names, data)
    loaded, _ = load(target, None, True, device, dtype, threads)
    chosen = contenders_of(loaded, drafter or [], ks)[batch > 1 :]  # the first is without a drafter, to be timed
    drawn = load_tasks(
        names, data, limit, seed, skip_bad, lambda text: len(loaded.tokenizer(text).input_ids),
        made_to, longest_prompt(loaded, max_tokens),
    )  # fmt: skip
    for task in drawn:
        for line in task.bad_lines:
            make_console(True).print(f"left out of {task.source}: {line}", style="yellow")
    with make_console(True).status("answering") as status:
        evaluate(
            loaded, chosen, drawn, settings, out,
            lambda done, total, last: status.update(f"answers {done:,} of {total:,} ({last.task}, {last.contender})"),
            batch,
        )  # fmt: skip
    here = machine(loaded.device.type)
    summary = write_summary(out, seed, [task.name for task in drawn], [s.name for s in settings], here)
    if as_json:
        print(json.dumps(summary))
        return
    _print(summary, out)


def _print(summary: dict[str, Any], out: Path) -> None:
    from hspec.evaluation.statistics import in_words

    console = make_console(False)
    for setting, found in summary["settings"].items():
        entrants = found["entrants"]
        table = Table("task", "prompts", *entrants, title=f"{setting}: tau (95 % interval)")
        for task, count in found["prompts"].items():
            table.add_row(task, str(count), *(in_words(e["tasks"][task]["tau"]) for e in entrants.values()))
        table.add_section()
        table.add_row("mean", "", *(in_words(e["tau"]) for e in entrants.values()))
        if all(e["draft_ms"] is not None for e in entrants.values()):
            table.add_row("speedup", "", *(in_words(e["speedup"]) for e in entrants.values()))
            table.add_row("ms draft", "", *(f"{e['draft_ms']:.1f}" for e in entrants.values()))
            table.add_row("ms verify", "", *(f"{e['verify_ms']:.1f}" for e in entrants.values()))
            table.add_row("ms a token", "", *(f"{e['ms_per_token']:.1f}" for e in entrants.values()))
        console.print(table)
        for pair in found["pairs"]:
            ratio, speed = pair["tau_ratio"], pair["speed_ratio"]
            faster = "" if speed is None else f", speed {in_words(speed, 3)} {speed['verdict']}"
            console.print(
                f"{pair['a']} against {pair['b']}: tau {in_words(ratio, 3)} {ratio['verdict']}{faster}; "
                f"a 5 % difference needs {pair['prompts_for_5_percent'] or '?'} prompts"
            )
    console.print(f"answers, evaluation.json and summary.json are in {out}; 'hspec report {out}' makes a page of them")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of 'hspec eval'.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file; by default report.html in DIR.")] = None,
    texts: Annotated[int, typer.Option(min=0, help="So many prompts of each task are shown with their answers.")] = 1,
    show: Annotated[list[str] | None, typer.Option(help="Show the answers to the prompt with this id; several times.")] = None,
    training: Annotated[
        list[Path] | None, typer.Option(help="A folder of 'hspec train', for its curves; several times.")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="What 'hspec costs --json' printed.")] = None,
) -> None:
    """One HTML file of an evaluation: tables with intervals, plots, and answers with their drafts marked. It works offline.

    Example:  hspec eval --limit 2 --out results && hspec report results
    """
    from hspec.evaluation.report import write_report

    print(write_report(folder, out, texts, show or [], training or [], costs))

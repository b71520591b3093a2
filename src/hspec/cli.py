"""The command line: parse, call, print."""

from __future__ import annotations

import errno
import json
import math
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hspec.errors import HSpecError, UsageError
from hspec.files import reason

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Parallel speculative decoding without a drafter-side KV cache.",
)  # fmt: skip

DEFAULT_TARGET = "smollm2"

TargetArgument = Annotated[str, typer.Option("--target", "-t", help="smollm2 (packaged), a folder, a .gguf file or a hub id.")]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter", "-d", help="A drafter's folder or hub id, or ngram (prompt lookup); by default the one that ships."
    ),
]
KOption = Annotated[
    int | None, typer.Option("-k", min=1, help="Drafted tokens a step; at most what the drafter was trained for.")
]
NoDraftOption = Annotated[bool, typer.Option("--no-draft", help="Decode without a drafter.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
JsonListOption = Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default torch's choice.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32 (exact), bfloat16 or float16.")]


def _console(quiet: bool) -> Console:
    return Console(stderr=quiet, highlight=False)


def _load(target: str, drafter: str | None, no_draft: bool, device: str, dtype: str, threads: int | None) -> tuple[Any, Any]:
    import torch

    from hspec.api import drafter_folder, load_drafter
    from hspec.targets.sources import ALIASES, load_target

    if no_draft and drafter is not None:
        raise UsageError("--no-draft and --drafter contradict each other: leave out one of them")
    if threads:
        torch.set_num_threads(threads)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise UsageError(f"--dtype {dtype}: choose one of {', '.join(kinds)}")
    _check_device(device)
    if not no_draft:
        drafter_folder(drafter, ALIASES.get(target, target))  # says at once if there is none
    loaded = load_target(target, device, kinds[dtype])
    return loaded, None if no_draft else load_drafter(drafter, loaded)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=torch.device(device)).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error


def _check_k(k: int | None, no_draft: bool) -> None:
    if no_draft and k is not None:
        raise UsageError("-k is the number of drafted tokens, and --no-draft drafts none: leave out one of them")


def _params(**given: Any) -> Any:
    from hspec.decoding.params import SamplingParams

    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')}: a finite number is needed, not {value}")
    try:
        return SamplingParams(**given)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        message = first["msg"].removeprefix("Value error, ").replace("Input should", "it must")
        raise UsageError(f"{option}: {message}, not {first['input']!r}") from error


Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 discourages tokens already seen.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Longest answer.")]
System = Annotated[str | None, typer.Option(help="System message.")]


@app.command()
def demo(
    target: TargetArgument = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    k: KOption = None,
    max_tokens: MaxTokens = 128,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer three prompts with H-Spec, without it, and by transformers' generate; compare texts and times.

    Examples:  hspec demo   |   hspec demo -k 3 --max-tokens 64   |   hspec demo --json
    """
    from hspec.evaluation import demo as job
    from hspec.evaluation.marking import DemoView
    from hspec.targets.sources import load_reference

    console = _console(as_json)
    console.print(f"Loading {escape(target)} (the first time it is fetched and converted) ...")
    loaded, draft = _load(target, drafter, False, "cpu", "float32", threads)
    reference, _ = load_reference(target)
    view = DemoView(console, job.PROMPTS, loaded.tokenizer.decode)
    report = job.run(loaded, draft, reference, k or draft.max_draft, max_tokens, view.show)
    numbers = {"target": loaded.name, "k": k or draft.max_draft, **report.numbers()}
    if as_json:
        print(json.dumps(numbers))
    else:
        console.print("\n")
        console.print(_demo_table(numbers))
    if not numbers["identical"]:
        raise HSpecError("the texts differ: this must not happen in fp32; please report it with the table above")


def _demo_table(numbers: dict[str, Any]) -> Table:
    table = Table(title=f"{numbers['target']}, k = {numbers['k']}, greedy, fp32", show_header=False)
    rows = [
        ("tokens", f"{numbers['tokens']}"),
        ("verification steps", f"{numbers['steps']}"),
        ("tau (tokens a step)", f"{numbers['tau']:.2f}"),
        ("conditional acceptance by position", "  ".join(f"{a:.2f}" for a in numbers["acceptance"])),
        ("ms a token, H-Spec", f"{numbers['ms_per_token']:.1f}"),
        ("ms a token, no drafting", f"{numbers['ms_per_token_ar']:.1f}"),
        ("ms a token, transformers generate", f"{numbers['ms_per_token_transformers']:.1f}"),
        ("cost of a cycle, in plain steps", f"{numbers['cycle']:.2f}"),
        ("speedup over no drafting", f"{numbers['speedup']:.2f}x"),
        ("speedup over transformers", f"{numbers['speedup_transformers']:.2f}x"),
        ("texts identical", "yes, token for token" if numbers["identical"] else "NO"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The user's turn; - or nothing reads it from stdin.")] = None,
    target: TargetArgument = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    k: KOption = None,
    no_draft: NoDraftOption = False,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt, streaming; accepted draft tokens are marked on a terminal.

    Examples:  hspec generate "What is a prime number?"   |   echo "Hello" | hspec generate --temperature 0.8 --seed 1
    """
    from hspec.decoding.engine import Engine
    from hspec.decoding.sequence import Request
    from hspec.evaluation.marking import MarkedStream

    _check_k(k, no_draft)
    if raw and system is not None:
        raise UsageError("--raw continues the prompt as it is, without a template, so there is no place for --system")
    try:
        text = sys.stdin.read() if prompt in (None, "-") else prompt
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not UTF-8 text ({error})") from error
    if not text or not text.strip():
        raise UsageError("the prompt is empty: give it as an argument or on stdin")
    params = _params(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop or ()),
    )  # fmt: skip
    loaded, draft = _load(target, drafter, no_draft, device, dtype, threads)
    if raw:
        ids = loaded.template.encode_plain(text)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        ids = loaded.template.encode([*messages, {"role": "user", "content": text}])
    console = Console(highlight=False)
    stream = MarkedStream(console, mark=console.is_terminal and draft is not None)
    result = None
    for step in Engine(loaded, draft, k).stream([Request(tuple(ids), params)]):
        if not as_json:
            stream.show(step, loaded.tokenizer.decode)
        result = step.result
    if as_json:
        print(json.dumps(_result_json(result)))
    else:
        console.print()


def _result_json(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.tokens,
        "steps": result.counters.steps,
        "tau": result.counters.tau,
        "acceptance": result.counters.acceptance,
        "runs": result.runs,
        "finish_reason": result.finish_reason,
    }


@app.command()
def chat(
    target: TargetArgument = DEFAULT_TARGET,
    drafter: DrafterOption = None,
    k: KOption = None,
    no_draft: NoDraftOption = False,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.1,
    seed: Seed = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = None,
) -> None:
    """Talk in the terminal; the KV cache is kept over turns. Ctrl-C stops an answer, Ctrl-D or /exit ends.

    Examples:  hspec chat   |   hspec chat --system "Answer in one sentence." --temperature 0
    """
    from hspec.decoding.session import Session
    from hspec.evaluation.marking import MarkedStream

    _check_k(k, no_draft)
    params = _params(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    loaded, draft = _load(target, drafter, no_draft, device, dtype, threads)
    session = Session(loaded, draft, k, system)
    console = Console(highlight=False)
    stream = MarkedStream(console, mark=console.is_terminal and draft is not None)
    console.print("[dim]/exit or Ctrl-D ends, Ctrl-C stops an answer[/dim]")
    while True:
        try:
            text = console.input("[bold]you>[/bold] ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text.strip() in ("/exit", "/quit"):
            return
        if not text.strip():
            continue
        result = None
        try:
            for step in session.ask(text, params):
                stream.show(step, loaded.tokenizer.decode)
                result = step.result
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/dim]", end="")
        tau = f"tau {result.counters.tau:.2f}, " if result is not None and draft is not None else ""
        console.print(f"\n[dim]{tau}{len(session.cached)} tokens cached[/dim]")


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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, exactly where it stopped.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Train a drafter, H-Spec or another method. Ctrl-C saves; --resume goes on.

    Examples:  hspec train --out my-drafter --steps 2000   |   hspec train --config first-run.yaml --dry-run
    |   hspec train --out my-drafter --resume
    """
    import torch

    from hspec.training import job as jobs
    from hspec.training.progress import run_with_progress

    if threads:
        torch.set_num_threads(threads)
    _check_device(device)
    if resume:
        given = {
            "--config": config, "--target": target, "--preset": preset, "--method": method, "--data": data, "--own-answers": own_answers,
            "--max-prompts": max_prompts, "--init-from": init_from, "--steps": steps, "--precision": precision, "--seed": seed,
        }  # fmt: skip
        if any(value is not None for value in given.values()):
            names = ", ".join(name for name, value in given.items() if value is not None)
            raise UsageError(f"--resume takes the settings saved in {out}: leave out {names}")
        jobs.check_run(out, resume)
        settings = jobs.read_job(out / jobs.RUN_FILE)
    else:
        settings = jobs.read_job(config) if config else jobs.Job()
        settings = jobs.override(
            settings, target=target, preset=preset, method=method, data=data, own_answers=own_answers, max_prompts=max_prompts,
            init_from=init_from, train={"steps": steps, "precision": precision, "seed": seed},
        )  # fmt: skip
    console = Console(highlight=False)
    table = Table(title="plan", show_header=False)
    for name, line in jobs.plan(settings, out, resume).lines.items():
        table.add_row(name, escape(line))
    console.print(table)
    if dry_run:
        return
    try:
        trainer = jobs.build(settings, out, resume, lambda line: console.print(f"[dim]{escape(line)}[/dim]"), device)
    except KeyboardInterrupt:
        print(
            "hspec: interrupted before training; answers so far are kept, the same command goes on with them", file=sys.stderr
        )
        raise typer.Exit(130) from None
    run_with_progress(trainer, console)


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
    from hspec.training.job import PACKAGED_DATA, held_out_prompts

    read_records(out)
    loaded, draft = _load(target, drafter, False, "cpu", "float32", threads)
    what = label(loaded, draft, k or draft.max_draft, max_tokens)
    read_records(out, what)
    prompts = held_out_prompts(loaded, data or [PACKAGED_DATA], limit)
    settings = {"greedy": _params(max_tokens=max_tokens), "T=1": _params(max_tokens=max_tokens, temperature=1.0)}
    console = _console(True)
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
            table.add_row(f"{name}, {row}", str(part["prompts"]), f"{part['tau']:.2f}", f"{low:.2f} .. {high:.2f}", rates)
    Console(highlight=False).print(table)


def main() -> None:
    """Entry point: one clear message and an exit code (2: the request, 1: a failure); a traceback only with --debug."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"] or ["--help"]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"hspec: warning: {message}", file=sys.stderr)
        try:
            code = app(arguments, standalone_mode=False) or 0
        except Exception as error:
            if debug:
                traceback.print_exc()
            message, code = _explain(error)
            print(f"hspec: {' '.join(message.split())}", file=sys.stderr)
        except KeyboardInterrupt:
            code = 130
    sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    """A message for the user, and the exit code."""
    if isinstance(error, HSpecError):
        return str(error), error.exit_code
    if isinstance(error, _COMMAND_LINE_ERROR):
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "hspec"
        return f"{error.format_message()} ('{command} --help' shows the options)", 2  # type: ignore[attr-defined]
    if isinstance(error, typer.Abort):
        return "aborted", 1
    if isinstance(error, MemoryError) or "memory" in str(error).lower():
        return f"out of memory: {_first_line(error)}; take a smaller batch or model, or a machine with more", 1
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        advice = "; free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{where}{reason(error)}{advice}", 1
    return f"unexpected {type(error).__name__}: {_first_line(error)} (--debug shows where; please report it)", 1


_COMMAND_LINE_ERROR = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""Typer brings its own copy of click, or uses the one that is installed, by version."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


if __name__ == "__main__":
    main()

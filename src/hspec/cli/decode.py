"""``hspec demo``, ``generate`` and ``chat``: text from a target, with a drafter or without."""

from __future__ import annotations

import json
import sys
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
    DtypeOption,
    JsonOption,
    KOption,
    MaxTokens,
    MinP,
    NoDraftOption,
    Penalty,
    Seed,
    Stop,
    System,
    TargetArgument,
    Temperature,
    ThreadsOption,
    TopK,
    TopP,
    check_k,
    load,
    sampling_params,
)
from hspec.errors import HSpecError, UsageError


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

    console = make_console(as_json)
    console.print(f"Loading {escape(target)} (the first time it is fetched and converted) ...")
    loaded, draft = load(target, drafter, False, "cpu", "float32", threads)
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

    check_k(k, no_draft)
    if raw and system is not None:
        raise UsageError("--raw continues the prompt as it is, without a template, so there is no place for --system")
    text = _read_stdin() if prompt in (None, "-") else _utf8(prompt, "the prompt")
    if not text or not text.strip():
        raise UsageError("the prompt is empty: give it as an argument or on stdin")
    params = sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop or ()),
    )  # fmt: skip
    loaded, draft = load(target, drafter, no_draft, device, dtype, threads)
    if raw:
        ids = loaded.template.encode_plain(text)
    else:
        messages = [{"role": "system", "content": _utf8(system, "--system")}] if system else []
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


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("there is no stdin to read the prompt from: give it as an argument")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not UTF-8 text ({error})") from error


def _utf8(text: str | None, what: str) -> str:
    """An argument; the shell may hand over bytes that are no text.

    Raises:
        UsageError: it has such bytes.
    """
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not UTF-8 text ({error.reason} at character {error.start})") from error
    return text or ""


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

    check_k(k, no_draft)
    params = sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )  # fmt: skip
    loaded, draft = load(target, drafter, no_draft, device, dtype, threads)
    session = Session(loaded, draft, k, None if system is None else _utf8(system, "--system"))
    console = Console(highlight=False)
    stream = MarkedStream(console, mark=console.is_terminal and draft is not None)
    console.print("[dim]/exit or Ctrl-D ends, Ctrl-C stops an answer[/dim]")
    while True:
        try:
            text = console.input("[bold]you>[/bold] ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"what stands on stdin is not UTF-8 text ({error})") from error
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
        except UsageError as error:  # too long, say: the conversation so far stays
            console.print(f"[dim]hspec: {escape(str(error))}[/dim]")
            continue
        tau = f"tau {result.counters.tau:.2f}, " if result is not None and draft is not None else ""
        console.print(f"\n[dim]{tau}{len(session.cached)} tokens cached[/dim]")

"""``hspec serve`` and ``doctor``: the target behind an OpenAI-compatible server of vLLM, drafted for by H-Spec."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hspec.cli.app import app
from hspec.cli.options import DrafterOption, DraftsAtOption, KOption, NoDraftOption
from hspec.errors import HSpecError, UsageError


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="smollm2 (packaged), a folder or a hub id; it comes before vLLM's options.")],
    drafter: DrafterOption = None,
    k: KOption = None,
    no_draft: NoDraftOption = False,
    drafts_at: DraftsAtOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print vLLM's command and start nothing.")
    ] = False,
) -> None:
    """Serve a target with vLLM; all options that are not below go to 'vllm serve'.

    Examples:  hspec serve smollm2   |   hspec serve ./my-target --drafter ./my-drafter -k 4 --max-model-len 4096
    |   hspec serve smollm2 --drafter ngram   |   hspec serve smollm2 --drafter plugin:my-dflash (by the plugin, not by vLLM's own method)
    """
    import shlex

    from hspec.serving.command import plan
    from hspec.serving.schedule import Schedule

    if no_draft and (drafter is not None or k is not None or drafts_at is not None):
        raise UsageError("--no-draft leaves nothing for --drafter, -k and --drafts-at to say: leave out the one or the others")
    schedule = None if drafts_at is None else Schedule.of(drafts_at)
    command = plan(target, drafter, k, host, port, context.args, os.environ, not no_draft, schedule)
    if dry_run:
        print(
            " ".join(
                [*(f"{name}={shlex.quote(value)}" for name, value in command.environment.items()), shlex.join(command.argv)]
            )
        )
        return
    os.environ.update(command.environment)
    os.execv(command.argv[0], command.argv)


@app.command()
def doctor() -> None:
    """Say whether this environment can serve: vLLM, the plugin, the backend, the layout of its pages, memory.

    Example:  hspec doctor
    """
    from hspec.serving.doctor import examine

    console = Console(highlight=False)
    findings = examine()
    for finding in findings:
        console.print(
            f"{'[green]ok[/]   ' if finding.fine else '[red]wrong[/]'} {finding.what}: {escape(finding.says)}", soft_wrap=True
        )
    if not all(finding.fine for finding in findings):
        raise HSpecError("this environment cannot serve yet: see what is wrong above")

"""Options that several commands share, and what they mean together."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from hspec.errors import UsageError

DEFAULT_TARGET = "smollm2"

TargetArgument = Annotated[str, typer.Option("--target", "-t", help="smollm2 (packaged), a folder, a .gguf file or a hub id.")]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        help="A drafter's folder or hub id, smollm2 for the one that ships for it, or ngram (prompt lookup); with +ngram behind it, "
        "lookup comes first (smollm2+ngram), with +sure0.4 it drafts while a draft stands with that chance. By default the one that ships.",
    ),
]
KOption = Annotated[
    int | None, typer.Option("-k", min=1, help="Drafted tokens a step; at most what the drafter was trained for.")
]
NoDraftOption = Annotated[bool, typer.Option("--no-draft", help="Decode without a drafter.")]
DraftsAtOption = Annotated[
    str | None,
    typer.Option("--drafts-at", help="Fewer drafts under load: 3:2,5:0 is two from 3 requests on, none from 5 on."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
JsonListOption = Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default torch's choice.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32 (exact), bfloat16 or float16.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set of tokens with this probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 discourages tokens already seen.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Longest answer.")]
System = Annotated[str | None, typer.Option(help="System message.")]


def prefer_large_pages() -> None:
    """Let torch take large tensors from pages of 2 MB where Linux gives them on request: 5 % of a training step's time on the machine
    where it was measured. Torch asks once, at its first large tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def load(target: str, drafter: str | None, no_draft: bool, device: str, dtype: str, threads: int | None) -> tuple[Any, Any]:
    import torch

    from hspec.api import drafter_folder, load_drafter
    from hspec.drafters.source import split
    from hspec.targets.sources import ALIASES, load_target

    if no_draft and drafter is not None:
        raise UsageError("--no-draft and --drafter contradict each other: leave out one of them")
    if threads:
        torch.set_num_threads(threads)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise UsageError(f"--dtype {dtype}: choose one of {', '.join(kinds)}")
    check_device(device)
    if not no_draft:
        drafter_folder(split(drafter)[0], ALIASES.get(target, target))  # says at once if there is none
    loaded = load_target(target, device, kinds[dtype])
    return loaded, None if no_draft else load_drafter(drafter, loaded)


def check_device(device: str) -> None:
    import torch

    try:
        torch.zeros(1, device=torch.device(device)).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error


def check_k(k: int | None, no_draft: bool) -> None:
    if no_draft and k is not None:
        raise UsageError("-k is the number of drafted tokens, and --no-draft drafts none: leave out one of them")


def sampling_params(**given: Any) -> Any:
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


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers above 0, separated by commas.

    Raises:
        UsageError: something else.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise UsageError(f"{option} {text}: give whole numbers above 0, separated by commas, as in 1,4,16")
    return values

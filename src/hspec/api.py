"""The few names that most programs need: load a target, load a drafter, generate, stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from hspec.decoding.engine import Drafter, Engine, Step
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request, Result
from hspec.drafters.checkpoint import load_drafter as load_checkpoint
from hspec.drafters.ngram import NAME as NGRAM
from hspec.drafters.ngram import NgramDrafter
from hspec.drafters.source import NOTHING, split
from hspec.errors import UsageError
from hspec.targets.sources import ALIASES, SMOLLM2_NAME
from hspec.targets.target import Target
from hspec.targets.template import Message

SHIPPED = {SMOLLM2_NAME: "smollm2-135m"}
"""Drafters that come with the package, by the target they were trained for."""
FINE_TUNE_HINT = "smollm2 for the one of that model, if this was fine-tuned from it"

Prompt = str | Sequence[Message]
"""A user turn, or messages; both go through the target's chat template."""


def shipped_drafter(target_name: str) -> Path | None:
    """Folder of the drafter that ships for a target, if one does."""
    name = SHIPPED.get(ALIASES.get(target_name, target_name))
    folder = Path(str(files("hspec"))) / "assets" / name if name else None
    return folder if folder is not None and (folder / "config.json").exists() else None


def drafter_folder(source: str | Path | None, target_name: str) -> Path:
    """Where a drafter lies.

    Args:
        source: a folder, a hub id, the name of a target for which one ships (for a fine-tuned version of it, say), or None for the
            one that ships for ``target_name``.

    Raises:
        UsageError: there is none.
    """
    if source is None:
        folder = shipped_drafter(target_name)
        if folder is None:
            raise UsageError(
                f"no drafter ships for {target_name!r}: name one with --drafter ({FINE_TUNE_HINT}), train one with 'hspec train', or "
                f"go without (--no-draft)"
            )
        return folder
    path = Path(source).expanduser()
    if path.exists():
        return path
    _, around = split(source)
    if around != NOTHING:
        raise UsageError(
            f"{source}: what is put around a drafter is for generate, chat, measure, eval and serve: leave {around.endings} out here"
        )
    shipped = shipped_drafter(str(source))
    if shipped is not None:
        return shipped
    return _from_hub(str(source)) if str(source).count("/") == 1 else path


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.md"]))
    except Exception as error:  # the hub client raises many types
        short = str(error).strip().splitlines()[0]
        raise UsageError(
            f"no drafter {source!r}: no such folder here, and as a hub id it could not be fetched ({short})"
        ) from error


def load_drafter(source: str | Path | None, target: Target) -> Drafter:
    """Load a drafter for inference on ``target``.

    Args:
        source: a folder, a hub id, ``ngram`` for prompt lookup, a target's name for the drafter that ships for it, or None for
            the one that ships for this target. With ``+ngram`` behind it, prompt lookup comes first, and the drafter where the text does
            not repeat itself; with ``+sure0.4`` it drafts as long as a draft stands with a chance of 0.4.

    Raises:
        UsageError: no such drafter, one for another target, or one that cannot say how sure it is.
        HSpecError: its files are damaged.
    """
    if source == NGRAM:
        return NgramDrafter(target.vocab_size, device=target.device)
    base, around = split(source)
    return around.put(load_checkpoint(drafter_folder(base, target.name), target).prepare())


def make_request(target: Target, prompt: Prompt, params: SamplingParams) -> Request:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not messages or not any(m["content"].strip() for m in messages):
        raise UsageError("the prompt is empty: give some text")
    return Request(tuple(target.template.encode(messages)), params)


def generate(
    target: Target, prompts: Prompt | list[str], drafter: Drafter | None = None, k: int | None = None,
    params: SamplingParams | None = None,
) -> list[Result]:  # fmt: skip
    """Answer one prompt or a list of user turns; a list of results in their order."""
    several = isinstance(prompts, list) and all(isinstance(p, str) for p in prompts)
    items = prompts if several else [prompts]
    params = params or SamplingParams()
    return Engine(target, drafter, k).generate([make_request(target, p, params) for p in items])  # type: ignore[arg-type]


def stream(
    target: Target, prompt: Prompt, drafter: Drafter | None = None, k: int | None = None,
    params: SamplingParams | None = None,
) -> Iterator[Step]:  # fmt: skip
    """Answer one prompt step by step; each step has its new text, its tokens, and which of them were drafted."""
    return Engine(target, drafter, k).stream([make_request(target, prompt, params or SamplingParams())])

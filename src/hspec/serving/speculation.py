"""What a server is told of a drafter: one of vLLM's own methods where it has the drafter's, this plugin for the others."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hspec.api import drafter_folder
from hspec.cache_folder import cache_folder
from hspec.drafters import convert as conversion
from hspec.drafters.checkpoint import check_target, known_config
from hspec.drafters.ngram import NAME as NGRAM
from hspec.drafters.source import NOTHING, split
from hspec.drafters.while_sure import no_confidence
from hspec.errors import UsageError
from hspec.serving.ranks import check_ranks
from hspec.serving.schedule import Schedule
from hspec.serving.settings import additional_config, speculative_config
from hspec.serving.targets import ServedTarget, TemplateHash, check_drafts, require_servable
from hspec.targets.sources import load_target, model_folder, read_tokenizer
from hspec.targets.template import ChatTemplate

NGRAM_K = 4
NGRAM_LENGTHS = (2, 4)
"""Suffixes that are looked up, as the embedded engine's prompt lookup has them."""

PLUGIN = "plugin:"
"""Before a drafter's folder: the plugin serves it, also where vLLM would."""

NATIVE = ("dflash", "eagle3", "peagle")
"""Methods that vLLM runs itself, from the speculators layout."""

NATIVE_ON_GPU = ("dspark", "dflash2")
"""And those that only its second model runner has, which needs a GPU."""


@dataclass(frozen=True)
class Speculation:
    """A drafter as vLLM's options."""

    arguments: tuple[str, ...]
    by_plugin: bool = False
    """Whether this plugin serves it, which works with the target's pages."""


NO_SPECULATION = Speculation(())


def speculation(
    source: str | None, target: str, name: str, config: Any, k: int | None, gpu: bool, ranks: int = 1,
    schedule: Schedule | None = None,
) -> Speculation:  # fmt: skip
    """Find out how a drafter is served, before the target is loaded.

    Args:
        source: a folder or hub id, behind ``plugin:`` if the plugin is to serve it; ``ngram``, or None for the one that ships. With
            ``+ngram`` behind it prompt lookup comes first, with ``+sure0.4`` it drafts while a draft stands with that chance.
        target: as the user names it. name: what it stands for. config: transformers' configuration of it.
        k: drafted tokens a step; None takes the drafter's largest. gpu: whether the server will have one.
        ranks: over which the target's heads are spread. schedule: fewer drafts where many requests run at once.

    Raises:
        UsageError: no drafter, one of another target, a k it was not trained for or the schedule exceeds, or a method that cannot be
            served here, or not by so many ranks.
        HSpecError: its files are damaged, or the converted ones cannot be written.
    """
    if source == NGRAM:
        shortest, longest = NGRAM_LENGTHS
        lengths = {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}
        k = NGRAM_K if k is None else k
        return Speculation(_options({"method": NGRAM, "num_speculative_tokens": k, **lengths}, k, schedule))
    asked = source is not None and source.startswith(PLUGIN)
    base, around = split((source or "").removeprefix(PLUGIN) or None)
    folder = drafter_folder(base, name).absolute()
    drafter = known_config(folder)
    k = drafter.max_draft if k is None else k
    native = not asked and around == NOTHING and (drafter.method in NATIVE or (gpu and drafter.method in NATIVE_ON_GPU))
    if around.least is not None and not getattr(drafter, "confidence_head", False):
        raise UsageError(f"{folder}: {no_confidence(drafter.method)}")
    check = check_drafts if native else require_servable
    check(drafter, k, str(folder))
    nothing = torch.empty(0)
    template = TemplateHash(ChatTemplate(read_tokenizer(target)).hash)
    check_target(drafter, ServedTarget(str(model_folder(target)), config, template, nothing, nothing))
    if native:
        converted = str(speculators_folder(folder, target))
        return Speculation(_options({"model": converted, "num_speculative_tokens": k}, k, schedule))
    check_ranks(drafter, ranks, str(folder))
    arguments = (
        *_options(speculative_config(k), k, schedule),
        "--additional-config",
        json.dumps(additional_config(folder, around)),
    )
    return Speculation(arguments, by_plugin=True)


def _options(config: dict[str, Any], k: int, schedule: Schedule | None) -> tuple[str, ...]:
    if schedule is not None:
        config = {**config, "num_speculative_tokens_per_batch_size": schedule.ranges(k)}
    return "--speculative-config", json.dumps(config)


def speculators_folder(folder: Path, target: str) -> Path:
    """A drafter's folder in the layout that vLLM reads: the folder itself, or a converted one in the cache, made once.

    Raises:
        UsageError: that layout has no place for something of this drafter.
        HSpecError: it cannot be written.
    """
    if conversion.layout_name(folder) == "speculators":
        return folder
    out = cache_folder() / "served" / f"{folder.name}-{_fingerprint(folder)}"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        conversion.convert(folder, partial, "speculators", load_target(target, linears="plain"))
        partial.replace(out)
    return out


def _fingerprint(folder: Path) -> str:
    """Of the files' names, sizes and times: a drafter that was trained on is another one."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([str(folder), stamps]).encode()).hexdigest()[:12]

"""From what the command line says to contenders and settings, and from a folder's records to its summary."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hspec.api import FINE_TUNE_HINT, load_drafter, shipped_drafter
from hspec.decoding.engine import Drafter as AnyDrafter
from hspec.decoding.params import SamplingParams
from hspec.drafters.drafter import Drafter
from hspec.drafters.source import unwrapped
from hspec.errors import UsageError
from hspec.evaluation.harness import AR, IDENTITY_FILE, RECORDS_FILE, Contender, Setting, read_identity
from hspec.evaluation.records import RecordFile, whole_groups
from hspec.evaluation.summary import summarise
from hspec.files import write_text
from hspec.targets.target import Target

SUMMARY_FILE = "summary.json"


def contenders_of(target: Target, drafters: Sequence[str], ks: Sequence[int] | None) -> list[Contender]:
    """Every drafter at every k, after the contender without one; all are loaded, so that a misfit is refused before any answer.

    Args:
        drafters: ``FOLDER`` or ``NAME=FOLDER``, as :func:`hspec.api.load_drafter` takes it; none takes the one that ships.
        ks: None takes each drafter's largest.

    Raises:
        UsageError: a drafter that is not there or does not fit, a k it was not trained for, or one name for two.
    """
    sources = list(drafters)
    if not sources:
        if shipped_drafter(target.name) is None:
            raise UsageError(f"no drafter ships for {target.name!r}: name some with --drafter ({FINE_TUNE_HINT})")
        sources = [""]
    found = [Contender(AR)]
    for source in sources:
        name, _, place = source.rpartition("=")
        drafter = load_drafter(place or None, target)
        method = method_of(drafter, place)
        label = name or (method if not place or place == method else Path(place).name)
        for k in ks or [drafter.max_draft]:
            if k > drafter.max_draft:
                raise UsageError(f"-k {k}, but {label} was trained for 1 to {drafter.max_draft}")
            found.append(Contender(label if ks is None or len(ks) == 1 else f"{label} k={k}", drafter, k, method))
    twice = {c.name for c in found if sum(c.name == other.name for other in found) > 1}
    if twice:
        raise UsageError(f"two drafters are called {min(twice)!r}: name them, as in --drafter first={min(twice)}")
    return found


def method_of(drafter: AnyDrafter, source: str) -> str:
    """What a drafter's tables call its method; ``source`` is what was loaded."""
    learnt, around = unwrapped(drafter)
    return learnt.config.method + around.endings if isinstance(learnt, Drafter) else source


TEMPLATE_TOKENS = 64
"""What a chat template and its system message add to a turn, at most."""


def longest_prompt(target: Target, max_tokens: int) -> int:
    """Tokens that a prompt may have, so that an answer of ``max_tokens`` still fits into the target's context."""
    return target.max_positions - max_tokens - TEMPLATE_TOKENS


def settings_of(params: Sequence[SamplingParams]) -> list[Setting]:
    """Named by what sets them apart: ``greedy``, ``T=1``, ``T=0.8 top_p=0.9``."""
    return list({s.name: s for s in (Setting(_name(p), p) for p in params)}.values())


def _name(params: SamplingParams) -> str:
    if params.greedy:
        return "greedy"
    parts = [f"T={params.temperature:g}"]
    parts += [f"top_k={params.top_k}"] if params.top_k else []
    parts += [f"top_p={params.top_p:g}"] if params.top_p < 1 else []
    parts += [f"min_p={params.min_p:g}"] if params.min_p else []
    return " ".join(parts)


def write_summary(
    folder: Path,
    seed: int = 0,
    tasks: Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    measured_on: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Summarise what a folder holds, keep it there, and give it back. Prompts that not all contenders have answered, because
    the evaluation was interrupted, are left out.

    Args:
        measured_on: :func:`machine`, right after measuring; None keeps what the summary before said.
        tasks, settings: only these; None for all there are.

    Raises:
        UsageError: no evaluation in the folder, or nothing of what is asked for.
        HSpecError: it cannot be read or written.
    """
    about = read_identity(folder)
    if about is None:
        raise UsageError(f"{folder} holds no evaluation: {IDENTITY_FILE} is not there; make one with 'hspec eval --out'")
    found = whole_groups(RecordFile(folder / RECORDS_FILE).read(), list(about["contenders"]))
    records = [r for r in found if (tasks is None or r.task in tasks) and (settings is None or r.setting in settings)]
    if not records:
        raise UsageError(f"{folder} holds no answer yet: run 'hspec eval --out {folder}' again")
    summary = {
        "target": about["target"]["name"],
        "dtype": about["dtype"],
        "machine": measured_on or _said_before(folder),
        "settings": summarise(records, about["contenders"], seed),
    }
    write_text(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def _said_before(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["machine"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or no whole one
        return {}
    return said if isinstance(said, dict) else {}


def machine(device: str) -> dict[str, Any]:
    """What a figure of time depends on, as far as the system tells."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hspec": version("hspec"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

"""Measuring a drafter on prompts that it was never trained on: tau, acceptance, intervals, by kind of prompt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hspec.api import make_request
from hspec.decoding.engine import Drafter, Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Counters
from hspec.drafters.source import unwrapped
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.statistics import Resampling
from hspec.files import append_line, reason, whole_lines
from hspec.targets.target import Target
from hspec.training.prompts import Prompt


@dataclass
class Record:
    """One answered prompt."""

    id: str
    kind: str
    setting: str
    steps: int
    emitted: int
    reached: list[int]
    accepted: list[int]
    finish_reason: str
    looping: bool
    of: str
    """What was measured: see :func:`label`."""


def kind_of(prompt: str) -> str:
    """A coarse kind by the prompt's own words: code, writing, list, question or other."""
    text = prompt.lower()
    if re.search(r"```|\b(code|function|python|javascript|html|css|sql|java|c\+\+|script|api|regex|bash|react)\b", text):
        return "code"
    if re.search(r"\b(write|rewrite|essay|story|poem|email|letter|article|blog|draft|song|script)\b", text):
        return "writing"
    if re.search(r"\b(list|ideas|suggest|examples|names|steps|plan|outline|table)\b", text):
        return "list"
    if re.match(r"\s*(what|why|how|who|when|where|which|is|are|can|do|does|explain|tell)\b", text) or text.rstrip().endswith(
        "?"
    ):
        return "question"
    return "other"


def is_looping(tokens: Sequence[int], period: int = 48, repeats: int = 3) -> bool:
    """Whether the text ends in a piece of at most ``period`` tokens, said ``repeats`` times or more."""
    for length in range(1, period + 1):
        tail = list(tokens[-length:])
        span = list(tokens[-length * repeats :])
        if len(span) == length * repeats and span == tail * repeats and length * repeats >= 12:
            return True
    return False


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    path: Path,
    k: int,
    settings: dict[str, SamplingParams],
    of: str,
    batch: int = 8,
    on_done: Callable[[int, int], None] = lambda *_: None,
) -> list[Record]:
    """Answer every prompt under every setting; records are appended to ``path`` as they come, and a rerun goes on from them.

    Args:
        of: what is measured (:func:`label`); records of something else are refused.

    Raises:
        UsageError: ``path`` holds measurements of something else.
        HSpecError: it cannot be read or written.
    """
    asked = {(p.id, setting) for p in prompts for setting in settings}
    records = [r for r in read_records(path, of) if (r.id, r.setting) in asked]
    done = {(r.id, r.setting) for r in records}
    engine = Engine(target, drafter, k, max_batch=batch)
    total = len(asked)
    for setting, params in settings.items():
        todo = [p for p in prompts if (p.id, setting) not in done]
        requests = [make_request(target, p.text, params.model_copy(update={"seed": int(p.id[:8], 16)})) for p in todo]
        for step in engine.stream(requests):
            if step.result is None:
                continue
            result, prompt = step.result, todo[step.index]
            c = result.counters
            record = Record(
                prompt.id, kind_of(prompt.text), setting, c.steps, c.emitted, c.reached, c.accepted, result.finish_reason,
                is_looping(result.tokens), of,
            )  # fmt: skip
            records.append(record)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                append_line(path, json.dumps(asdict(record)))
            except OSError as error:
                raise HSpecError(
                    f"cannot write {path}: {reason(error)}; what was measured is kept, run the same command again"
                ) from error
            on_done(len(records), total)
    return records


def label(target: Target, drafter: Drafter, k: int, max_tokens: int) -> str:
    """Tells one measurement from another: target, drafter, k and length of the answers."""
    return f"target {target.weight_hash()}, drafter {drafter_hash(drafter)}{unwrapped(drafter)[1].endings}, k {k}, {max_tokens} tokens"


def drafter_hash(drafter: Drafter) -> str:
    """SHA-256 (16 hex digits) of everything that a drafter has learnt that is not packed away."""
    digest = hashlib.sha256()
    learnt, _ = unwrapped(drafter)
    state = learnt.state_dict() if isinstance(learnt, nn.Module) else {}
    for name, weight in [*sorted(state.items()), ("draft_ids", drafter.draft_ids)]:
        digest.update(name.encode() + weight.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def read_records(path: Path, of: str | None = None) -> list[Record]:
    """What a file holds so far; a last line that an interruption cut short is left out.

    Raises:
        UsageError: it holds measurements of something else than ``of``, or something else altogether.
        HSpecError: it cannot be read.
    """
    records = []
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no file: choose another --out")
        lines = whole_lines(path, begins='{"id"')
    except OSError as error:
        raise HSpecError(f"cannot read {path}: {reason(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}, line {number}: not a measured answer; choose another --out") from error
        if of is not None and record.of != of:
            raise UsageError(f"{path} holds measurements of something else ({record.of}; now {of}): choose another --out")
        records.append(record)
    return records


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """For each setting pooled tau with its 95 % bootstrap interval over prompts (two None where there are fewer than two prompts),
    acceptance by position, and tau by kind."""
    out: dict[str, Any] = {}
    for setting in dict.fromkeys(r.setting for r in records):
        mine = [r for r in records if r.setting == setting]
        whole = [r for r in mine if not r.looping]
        out[setting] = {
            **_pool(mine),
            "acceptance": _acceptance(mine),
            "looping": sum(r.looping for r in mine),
            "without_looping": _pool(whole),
            "by_kind": {kind: _pool([r for r in mine if r.kind == kind]) for kind in sorted({r.kind for r in mine})},
        }
    return out


def _pool(records: Sequence[Record]) -> dict[str, Any]:
    emitted, steps = [r.emitted for r in records], [r.steps for r in records]
    if not sum(steps):
        return {"prompts": len(records), "tau": 0.0, "interval": [None, None]}
    tau = Resampling().ratio("held-out", "", emitted, steps)
    said = tau.as_dict()
    return {"prompts": len(records), "tau": tau.value, "interval": [said["low"], said["high"]]}


def _acceptance(records: Sequence[Record]) -> list[float]:
    counters = Counters()
    for r in records:
        counters.add(Counters(r.steps, r.emitted, r.reached, r.accepted))
    return counters.acceptance

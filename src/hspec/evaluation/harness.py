"""Answering the same prompts with several drafters and with none, interleaved, so that every comparison is of pairs.

One answer at a time, drafts of a fixed length: what is compared is the drafters, not a scheduler. The contenders answer a prompt
one right after the other, and who begins changes from prompt to prompt, so that a change in the machine's load meets all alike.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspec.decoding.clock import StepClock
from hspec.decoding.engine import Drafter, Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request, Result
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.held_out import drafter_hash, is_looping
from hspec.evaluation.memory import PeakMemory
from hspec.evaluation.records import Record, RecordFile, TurnRecord, whole_groups
from hspec.evaluation.tasks.task import Task, TaskPrompt, as_openai, takes_tools
from hspec.files import reason, write_text
from hspec.targets.target import Target
from hspec.targets.template import Message

AR = "ar"
"""The contender without a drafter, which is always there: speedups are over it."""
RECORDS_FILE = "records.jsonl"
IDENTITY_FILE = "evaluation.json"
WARM_UP = 8
"""Tokens that every contender decodes before anything is measured."""


@dataclass(frozen=True)
class Contender:
    """A drafter and how many tokens it drafts a step."""

    name: str
    drafter: Drafter | None = None
    k: int = 0
    method: str = AR
    seed: int = 0
    """Of its training; contenders of one method with different seeds are pooled as such."""


@dataclass(frozen=True)
class Setting:
    """How tokens are chosen, under a name for the tables. Its seed is mixed with each prompt's id."""

    name: str
    params: SamplingParams


def identity(target: Target, contenders: Sequence[Contender], settings: Sequence[Setting]) -> dict[str, Any]:
    """What decides an answer besides its prompt, as it is kept in the folder of an evaluation."""
    return {
        "target": {"name": target.name, "weights": target.weight_hash(), "template": target.template.hash},
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "contenders": {
            c.name: {
                "method": c.method,
                "k": c.k,
                "seed": c.seed,
                "weights": None if c.drafter is None else drafter_hash(c.drafter),
            }
            for c in contenders
        },
        "settings": {s.name: s.params.model_dump(mode="json") for s in settings},
    }


def evaluate(
    target: Target,
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    settings: Sequence[Setting],
    folder: Path,
    on_answer: Callable[[int, int, Record], None] = lambda *_: None,
) -> list[Record]:
    """Every prompt of every task under every setting, by every contender; goes on from what the folder holds.

    Args:
        contenders: with distinct names; the first is without a drafter.
        on_answer: called with how many answers there are, how many there will be, and the last one.

    Raises:
        UsageError: the folder holds an evaluation of something else, or two contenders have one name.
        HSpecError: it cannot be read or written.
    """
    names = [c.name for c in contenders]
    if len(set(names)) < len(names):
        raise UsageError(f"two contenders have one name ({', '.join(names)}): give each its own, as in --drafter NAME=FOLDER")
    claim(folder, identity(target, contenders, settings))
    file = RecordFile(folder / RECORDS_FILE)
    found = file.read()
    records = whole_groups(found, names)
    if len(records) < len(found):
        file.rewrite(records)
    done = {(r.task, r.id, r.setting) for r in records}
    pending = [(t, s, p, i) for t, s, p, i in _interleaved(tasks, settings) if (t.name, p.id, s.name) not in done]
    total = len(records) + len(pending) * len(contenders)
    clock = StepClock(target.device)
    engines = [Engine(target, c.drafter, c.k or None, max_batch=1, clock=clock) for c in contenders]
    if pending:
        _warm_up(engines, target)
    for task, setting, prompt, index in pending:
        group = []
        for turn in range(len(contenders)):
            which = (index + turn) % len(contenders)
            group.append(_answer(engines[which], contenders[which], task, prompt, setting))
            on_answer(len(records) + len(group), total, group[-1])
        for record in sorted(group, key=lambda r: names.index(r.contender)):
            file.append(record)
        records += group
    return records


def claim(folder: Path, own: dict[str, Any]) -> None:
    """Note in a folder what is evaluated there; more settings may come to those that there are.

    Raises:
        UsageError: it is of something else; the message names the first thing that differs.
    """
    path = folder / IDENTITY_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        raise HSpecError(f"cannot read {path}: {reason(error)}") from error
    if known is not None:
        settings = {**known.get("settings", {}), **own["settings"]}
        for name, (before, now) in _differences({**known, "settings": settings}, {**own, "settings": settings}):
            raise UsageError(
                f"{folder} holds an evaluation of something else ({name}: {before}, now {now}): choose another --out"
            )
        for name, params in known.get("settings", {}).items():
            if own["settings"].get(name, params) != params:
                raise UsageError(f"{folder} holds answers of the setting {name!r} with other values: choose another --out")
        own = {**own, "settings": settings}
    write_text(path, json.dumps(own, indent=2) + "\n")


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in (*before, *(k for k in now if k not in before)):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, (before, now)


def _interleaved(tasks: Sequence[Task], settings: Sequence[Setting]) -> Iterator[tuple[Task, Setting, TaskPrompt, int]]:
    """First prompts of all tasks first, so that a run that is stopped early has some of each."""
    longest = max((len(task.prompts) for task in tasks), default=0)
    number = 0
    for index in range(longest):
        for task in tasks:
            for setting in settings:
                if index < len(task.prompts):
                    yield task, setting, task.prompts[index], number
                    number += 1


def _warm_up(engines: Sequence[Engine], target: Target) -> None:
    prompt = tuple(target.template.encode([{"role": "user", "content": "Hello"}]))
    for engine in engines:
        engine.generate([Request(prompt, SamplingParams(max_tokens=WARM_UP, ignore_eos=True))])


def _answer(engine: Engine, contender: Contender, task: Task, prompt: TaskPrompt, setting: Setting) -> Record:
    """The turns of one prompt; each sees the contender's own answers to those before it."""
    target = engine.target
    seed = hashlib.sha256(f"{setting.params.seed}/{task.name}/{prompt.id}".encode()).digest()
    params = setting.params.model_copy(update={"seed": int.from_bytes(seed[:4], "little")})
    messages: list[Message] = task.opening(prompt, target.template)
    tools = as_openai(prompt.tools) if prompt.tools and takes_tools(target.template) else None
    turns: list[TurnRecord] = []
    with PeakMemory(target.device) as memory:
        for text in prompt.turns:
            messages.append({"role": "user", "content": text})
            tokens = tuple(target.template.encode(messages, tools=tools))
            if turns and len(tokens) + 2 > target.max_positions:
                break  # the conversation has outgrown the target's context; what was answered counts
            turns.append(_turn(engine, Request(tokens, params), text))
            messages.append({"role": "assistant", "content": turns[-1].text})
    shape = None if contender.drafter is None else contender.drafter.memory_shape
    context = turns[-1].prompt_tokens + len(turns[-1].tokens)
    return Record(
        task=task.name, id=prompt.id, contender=contender.name, setting=setting.name, k=contender.k, turns=turns,
        peak_bytes=memory.bytes, drafter_kv_bytes=0 if shape is None else context * shape.bytes_per_token(target.dtype),
    )  # fmt: skip


def _turn(engine: Engine, request: Request, question: str) -> TurnRecord:
    clock = engine.clock
    assert clock is not None
    clock.reset()
    began = time.perf_counter()
    stream = engine.stream([request])
    step = next(stream)
    prefill = time.perf_counter() - began
    while step.result is None:
        step = next(stream)
    result: Result = step.result
    decode = engine.target.tokenizer.decode
    return TurnRecord(
        question=question, text=result.text, pieces=pieces(result.tokens, decode), tokens=result.tokens,
        drafted="".join("01"[d] for d in result.drafted), runs=result.runs, refused=result.refused,
        refused_text=[decode(drafts) for drafts in result.refused], prompt_tokens=len(request.prompt),
        finish_reason=result.finish_reason, looping=is_looping(result.tokens), prefill_seconds=prefill,
        draft_seconds=clock.draft_seconds, verify_seconds=clock.verify_seconds, reached=result.counters.reached,
        accepted=result.counters.accepted,
    )  # fmt: skip


def pieces(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """What each token adds to the decoded text; a character of several tokens comes with its last."""
    found, shown = list[str](), ""
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[:end]))
        whole = end == len(tokens) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        found.append(text[len(shown) :] if whole and text.startswith(shown) else "")
        shown = text if whole else shown
    return found

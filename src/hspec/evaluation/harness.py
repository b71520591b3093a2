"""Answering the same prompts with several drafters and with none, interleaved, so that every comparison is of pairs.

One answer at a time where speed is compared, and drafts of a fixed length: what is compared is the drafters, not a scheduler. The
contenders answer a prompt one right after the other, and who begins changes from prompt to prompt, so that a change in the machine's load
meets all alike. Where only tau is asked for, prompts are answered in batches.
"""

from __future__ import annotations

import hashlib
import itertools
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
from hspec.evaluation.origin import origins
from hspec.evaluation.records import Record, RecordFile, TurnRecord, whole_groups
from hspec.evaluation.tasks.task import Task, TaskPrompt, as_openai, takes_tools
from hspec.files import reason, write_text
from hspec.locks import alone
from hspec.targets.target import Target
from hspec.targets.template import Message

AR = "ar"
"""The contender without a drafter, that speedups are over."""
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


def identity(target: Target, contenders: Sequence[Contender], settings: Sequence[Setting], batch: int = 1) -> dict[str, Any]:
    """What decides an answer besides its prompt, as it is kept in the folder of an evaluation."""
    return {
        **({} if batch == 1 else {"batch": batch}),
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
    batch: int = 1,
) -> list[Record]:
    """Every prompt of every task under every setting, by every contender; goes on from what the folder holds.

    Args:
        contenders: with distinct names; one that is without a drafter if speeds are to be told.
        on_answer: called with how many answers there are, how many there will be, and the last one.
        batch: prompts that a contender answers at once. Above 1 nothing is timed: for tau alone, some times as fast.

    Raises:
        UsageError: the folder holds an evaluation of something else, or two contenders have one name.
        HSpecError: it cannot be read or written.
    """
    names = [c.name for c in contenders]
    if len(set(names)) < len(names):
        raise UsageError(f"two contenders have one name ({', '.join(names)}): give each its own, as in --drafter NAME=FOLDER")
    with alone(folder / RECORDS_FILE) as free:
        if not free:
            raise UsageError(f"another process writes answers to {folder}: wait for it, or choose another --out")
        return _evaluate(target, contenders, tasks, settings, folder, on_answer, batch)


def _evaluate(
    target: Target,
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    settings: Sequence[Setting],
    folder: Path,
    on_answer: Callable[[int, int, Record], None],
    batch: int,
) -> list[Record]:
    names = [c.name for c in contenders]
    claim(folder, identity(target, contenders, settings, batch))
    file = RecordFile(folder / RECORDS_FILE)
    found = file.read()
    records = whole_groups(found, names)
    if len(records) < len(found):
        file.rewrite(records)
    done = {(r.task, r.id, r.setting) for r in records}
    _check_questions(records, tasks, folder)
    pending = [q for q in _interleaved(tasks, settings) if (q.task.name, q.prompt.id, q.setting.name) not in done]
    told, total = len(records), len(records) + len(pending) * len(contenders)
    clock = StepClock(target.device)
    engines = [Engine(target, c.drafter, c.k or None, max_batch=batch, clock=clock if batch == 1 else None) for c in contenders]
    if pending and batch == 1:
        _warm_up(engines, target)
    for chunk in (pending[at : at + batch] for at in range(0, len(pending), batch)):
        answers: dict[str, list[Record]] = {}
        for turn in range(len(contenders)):
            which = (chunk[0].number + turn) % len(contenders)
            answers[names[which]] = _answer(engines[which], contenders[which], chunk, batch > 1)
            for record in answers[names[which]]:
                told += 1
                on_answer(told, total, record)
        groups = [answers[name][place] for place in range(len(chunk)) for name in names]
        for record in groups:
            file.append(record)
        records += groups
    return records


def _check_questions(records: Sequence[Record], tasks: Sequence[Task], folder: Path) -> None:
    """
    Raises:
        UsageError: an answer is to another text than the prompt of that name has now.
    """
    prompts = {(task.name, prompt.id): prompt.turns[0] for task in tasks for prompt in task.prompts}
    for record in records:
        if record.turns and prompts.get((record.task, record.id), record.turns[0].question) != record.turns[0].question:
            raise UsageError(
                f"{folder} has an answer to another text than prompt {record.id!r} of {record.task} has now: choose another --out"
            )


def claim(folder: Path, own: dict[str, Any]) -> None:
    """Note in a folder what is evaluated there; more settings may come to those that there are.

    Raises:
        UsageError: it is of something else; the message names the first thing that differs.
    """
    known = read_identity(folder)
    if known is None:
        if (folder / RECORDS_FILE).exists():
            raise UsageError(f"{folder} holds answers, and no {IDENTITY_FILE} says of what: choose another --out")
    else:
        settings = {**known.get("settings", {}), **own["settings"]}
        for name, (before, now) in _differences({**known, "settings": settings}, {**own, "settings": settings}):
            raise UsageError(
                f"{folder} holds an evaluation of something else ({name}: {before}, now {now}): choose another --out"
            )
        for name, params in known.get("settings", {}).items():
            if own["settings"].get(name, params) != params:
                raise UsageError(f"{folder} holds answers of the setting {name!r} with other values: choose another --out")
        own = {**own, "settings": settings}
    write_text(folder / IDENTITY_FILE, json.dumps(own, indent=2) + "\n")


def read_identity(folder: Path) -> dict[str, Any] | None:
    """What :func:`claim` has noted in a folder; None where nothing is.

    Raises:
        HSpecError: it cannot be read, or is something else.
    """
    path = folder / IDENTITY_FILE
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HSpecError(f"cannot read {path}: {reason(error)}") from error
    parts = [found.get(part, {}) for part in ("target", "contenders", "settings")] if isinstance(found, dict) else []
    if not (
        parts
        and all(isinstance(part, dict) for part in parts)
        and {"contenders", "dtype"} <= found.keys()
        and "name" in parts[0]
    ):
        raise HSpecError(
            f"{path} is not what an evaluation notes there: it is damaged, or another program's; choose another folder"
        )
    return found


def _differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in (*before, *(k for k in now if k not in before)):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, (before, now)


@dataclass(frozen=True)
class _Question:
    """A prompt under a setting."""

    task: Task
    setting: Setting
    prompt: TaskPrompt
    number: int
    """Of all questions of the evaluation; says who begins."""


def _interleaved(tasks: Sequence[Task], settings: Sequence[Setting]) -> Iterator[_Question]:
    """First prompts of all tasks first, so that a run that is stopped early has some of each."""
    longest = max((len(task.prompts) for task in tasks), default=0)
    numbers = itertools.count()
    for index in range(longest):
        for task in tasks:
            for setting in settings:
                if index < len(task.prompts):
                    yield _Question(task, setting, task.prompts[index], next(numbers))


def _warm_up(engines: Sequence[Engine], target: Target) -> None:
    prompt = tuple(target.template.encode([{"role": "user", "content": "Hello"}]))
    for engine in engines:
        engine.generate([Request(prompt, SamplingParams(max_tokens=WARM_UP, ignore_eos=True))])


class _Dialogue:
    """The turns of one prompt; each sees the contender's own answers to those before it."""

    def __init__(self, target: Target, question: _Question):
        self.target, self.question = target, question
        task, prompt, params = question.task, question.prompt, question.setting.params
        seed = hashlib.sha256(f"{params.seed}/{task.name}/{prompt.id}".encode()).digest()
        self._params = params.model_copy(update={"seed": int.from_bytes(seed[:4], "little")})
        self._messages: list[Message] = task.opening(prompt, target.template)
        self._tools = as_openai(prompt.tools) if prompt.tools and takes_tools(target.template) else None
        self.turns: list[TurnRecord] = []

    def request(self) -> Request | None:
        """The next turn; None behind the last, or where the conversation has outgrown the target's context: what was answered
        counts."""
        texts = self.question.prompt.turns
        if len(self.turns) == len(texts):
            return None
        asked: list[Message] = [*self._messages, {"role": "user", "content": texts[len(self.turns)]}]
        tokens = tuple(self.target.template.encode(asked, tools=self._tools))
        if self.turns and len(tokens) + 2 > self.target.max_positions:
            return None
        self._messages = asked
        return Request(tokens, self._params)

    def take(self, request: Request, result: Result, seconds: tuple[float, float, float] | None) -> None:
        """The answer to a request, and its seconds of prefill, drafting and verification if they are known."""
        prefill, draft, verify = seconds or (None, None, None)
        decode = self.target.tokenizer.decode
        turn = TurnRecord(
            question=self._messages[-1]["content"], text=result.text, pieces=pieces(result.tokens, decode), tokens=result.tokens,
            drafted="".join("01"[d] for d in result.drafted), origins=origins(request.prompt, result.tokens),
            runs=result.runs, refused=result.refused,
            refused_text=[decode(drafts) for drafts in result.refused], prompt_tokens=len(request.prompt),
            finish_reason=result.finish_reason, looping=is_looping(result.tokens), prefill_seconds=prefill,
            draft_seconds=draft, verify_seconds=verify, reached=result.counters.reached, accepted=result.counters.accepted,
        )  # fmt: skip
        self.turns.append(turn)
        self._messages.append({"role": "assistant", "content": turn.text})

    def record(self, contender: Contender, peak: int | None) -> Record:
        """With ``peak`` bytes by which memory rose, if that is known."""
        shape = None if contender.drafter is None else contender.drafter.memory_shape
        context = self.turns[-1].prompt_tokens + len(self.turns[-1].tokens)
        question = self.question
        return Record(
            task=question.task.name, id=question.prompt.id, contender=contender.name, setting=question.setting.name,
            k=contender.k, turns=self.turns, peak_bytes=peak,
            drafter_kv_bytes=0 if shape is None else context * shape.bytes_per_token(self.target.dtype),
        )  # fmt: skip


def _answer(engine: Engine, contender: Contender, questions: Sequence[_Question], together: bool) -> list[Record]:
    """Answers to some questions, in one batch turn by turn if they are ``together``; else each is timed."""
    dialogues = [_Dialogue(engine.target, question) for question in questions]
    if not together:
        return [_timed(engine, contender, dialogue) for dialogue in dialogues]
    while asked := [(d, request) for d in dialogues if (request := d.request()) is not None]:
        for (dialogue, request), result in zip(asked, engine.generate([r for _, r in asked]), strict=True):
            dialogue.take(request, result, None)
    return [dialogue.record(contender, None) for dialogue in dialogues]


def _timed(engine: Engine, contender: Contender, dialogue: _Dialogue) -> Record:
    clock = engine.clock
    assert clock is not None
    with PeakMemory(engine.target.device) as memory:
        while (request := dialogue.request()) is not None:
            clock.reset()
            began = time.perf_counter()
            stream = engine.stream([request])
            step = next(stream)
            prefill = time.perf_counter() - began
            while step.result is None:
                step = next(stream)
            dialogue.take(request, step.result, (prefill, clock.draft_seconds, clock.verify_seconds))
    return dialogue.record(contender, memory.bytes)


def pieces(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """What each token adds to the decoded text; a character of several tokens comes with its last."""
    found, shown = list[str](), ""
    for end in range(1, len(tokens) + 1):
        text = decode(list(tokens[:end]))
        whole = end == len(tokens) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        found.append(text[len(shown) :] if whole and text.startswith(shown) else "")
        shown = text if whole else shown
    return found

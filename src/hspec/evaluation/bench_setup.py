"""From what the command line says to the entrants, the plan and the prompts of a bench of servers."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.tasks.catalogue import load_tasks
from hspec.evaluation.tasks.files import read_task
from hspec.evaluation.tasks.long_context import long_prompt
from hspec.evaluation.tasks.task import Task, TaskPrompt
from hspec.evaluation.throughput import NONE, PROMPTS_FILE, Drive, Entrant, Plan
from hspec.serving.command import parse_options
from hspec.serving.command import plan as plan_server
from hspec.serving.load import VLLM_BENCH, Load, LoadResult, put_under_load
from hspec.serving.schedule import OPTION, Schedule
from hspec.serving.server import server
from hspec.targets.sources import ALIASES, model_folder, read_tokenizer

FAMILIES = "families"
"""Whose built-in prompts are sent, where neither a file nor a length is given."""
TASK = "long-qa"
"""What prompts of a wanted length are made of."""
HOST, ANY_PORT = "127.0.0.1", 0
NO_PREFIX_CACHE = "--no-enable-prefix-caching"
"""The same prompts come again at each concurrency: from the second time on they would cost nothing."""


def entrants_of(methods: Sequence[str], drafters: Sequence[str], k: int, drafts_at: str | None = None) -> list[Entrant]:
    """
    Args:
        methods: ``none``, ``ngram``, ``hspec`` (the drafter that ships) or names of ``drafters``.
        drafters: ``NAME=FOLDER``. drafts_at: as ``hspec serve`` has it, for all that draft.

    Raises:
        UsageError: a method without a drafter, a drafter without a name, or a method twice.
    """
    folders: dict[str, str] = {}
    for source in drafters:
        name, _, folder = source.partition("=")
        if not name or not folder:
            raise UsageError(f"--drafter {source}: give a name and a folder, as in --drafter dflash=my-dflash")
        folders[name] = folder
    idle = set(folders) - set(methods)
    if idle:
        raise UsageError(f"--drafter {min(idle)}={folders[min(idle)]}: no such method in --methods ({', '.join(methods)})")
    found: dict[str, Entrant] = {}
    for name in methods:
        if name in found:
            raise UsageError(f"--methods names {name!r} twice")
        found[name] = _entrant(name, folders.get(name), ("-k", str(k), *([] if drafts_at is None else [OPTION, drafts_at])))
    return list(found.values())


def _entrant(name: str, folder: str | None, drafts: tuple[str, ...]) -> Entrant:
    """``drafts``: options that say how many."""
    if folder is not None:
        return Entrant(name, ("--drafter", folder, *drafts), folder)
    if name == NONE:
        return Entrant(name, ("--no-draft",))
    if name == "ngram":
        return Entrant(name, ("--drafter", "ngram", *drafts), "prompt lookup")
    if name == "hspec":
        return Entrant(name, drafts, "the one that ships")
    raise UsageError(
        f"--methods: no drafter ships for {name!r}: train one ('hspec train --method {name}') and give its folder, --drafter {name}=FOLDER"
    )


@dataclass(frozen=True)
class Prompts:
    texts: tuple[str, ...]
    origin: str
    """Where they come from."""
    mean: float
    """Of their lengths in tokens, the chat template's apart."""

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:16]


def prompts_of(target: str, file: Path | None, tokens: int | None, count: int, seed: int) -> Prompts:
    """What is sent to every server.

    Args:
        file: JSONL with ``prompt`` or ``turns`` (the first counts) in each line. tokens: makes prompts of this length instead. With
            neither they are the built-in ones of the eight families, in turn.

    Raises:
        UsageError: fewer prompts than requests: the same one twice would not cost the same twice.
    """
    tokenizer = read_tokenizer(target)

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    if file is None and tokens is not None:
        texts = [long_prompt(TASK, tokens, count_tokens, seed, i).prompt.turns[0] for i in range(count)]
        origin = f"{TASK}-{tokens}, made from seed {seed}"
    else:
        found = _in_turn(load_tasks((FAMILIES,))) if file is None else _read(file)
        origin = "the built-in prompts of the eight families" if file is None else file.name
        if len(found) < count:
            raise UsageError(
                f"{origin}: {len(found)} prompts, and --requests {count} needs as many: give more, or ask for fewer"
            )
        texts = [prompt.turns[0] for prompt in found[:count]]
    return Prompts(tuple(texts), origin, statistics.mean(map(count_tokens, texts)))


def _in_turn(tasks: Sequence[Task]) -> Sequence[TaskPrompt]:
    """The first prompt of each task, then the second ones."""
    rounds = zip_longest(*(task.prompts for task in tasks))
    return [prompt for each in rounds for prompt in each if prompt is not None]


def _read(file: Path) -> Sequence[TaskPrompt]:
    """Lines with ``prompt``, as vLLM's own benchmark has them, or with ``turns``."""
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError):
        records = []  # read_task says what is wrong
    if records and all(isinstance(r, dict) and isinstance(r.get("prompt"), str) for r in records):
        return [TaskPrompt(str(n), (r["prompt"],)) for n, r in enumerate(records, 1)]
    return read_task(file).prompts


class Servers:
    """Starts a target's server for one entrant after the other; logs lie beside the runs.

    Args:
        plan: what all have in common. out: folder of the bench.
    """

    def __init__(self, plan: Plan, out: Path):
        self.plan, self.out = plan, out

    def check(self, entrants: Sequence[Entrant]) -> None:
        """All that can be known of every server, before the first is started: hours may lie between the two.

        Raises:
            UsageError, HSpecError: as :func:`hspec.serving.command.plan`, with the method's name.
        """
        for entrant in entrants:
            given = parse_options(entrant.arguments)
            drafter, k, drafts_at = given.get("--drafter"), given.get("-k"), given.get(OPTION)
            drafts = "--no-draft" not in given
            try:
                plan_server(
                    self.plan.target,
                    drafter,
                    None if k is None else int(k),
                    HOST,
                    ANY_PORT,
                    self.plan.server,
                    os.environ,
                    drafts,
                    None if drafts_at is None else Schedule.of(drafts_at),
                )
            except HSpecError as error:
                raise type(error)(f"{entrant.name}: {error}") from error

    @contextmanager
    def start(self, entrant: Entrant) -> Iterator[Drive]:
        name = ALIASES.get(self.plan.target, self.plan.target)
        log = self.out / "logs" / f"{entrant.name}.log"
        arguments = [self.plan.target, *entrant.arguments, "--served-model-name", name, *self.plan.server]
        with server(arguments, log) as url:
            tokenizer = str(model_folder(self.plan.target))

            def drive(load: Load, work: Path) -> LoadResult:
                return put_under_load(url, name, tokenizer, load, VLLM_BENCH, work)

            drive(replace(self.plan.load(self.out / PROMPTS_FILE, 1), requests=1, max_tokens=8), self.out / "work")  # warms up
            yield drive

"""Prompts of a wanted length, made from a seed: numbered documents with a question to cite, and one long text with a question.

The texts are our own and made up, so that no target can know the answer without reading. Each document is about a place of its own,
whose name is nowhere else in the prompt, so that exactly one document answers. What is measured is how well a drafter guesses behind
a long context, not whether the answer is right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from hspec.errors import UsageError
from hspec.evaluation.tasks.built_in import ASSETS
from hspec.evaluation.tasks.task import Task, TaskPrompt

LONG_TASKS = ("long-cite", "long-qa")
DEFAULT_PROMPTS = 8
"""Prompts of each length where no limit says otherwise."""
SHORTEST = 1024
"""Tokens of the shortest of :func:`lengths_up_to`."""

_FACTS = 5
"""Of each document."""
_LEAST = 3
"""Title and sentences that a document keeps at least when it is cut to fill the last gap."""
_HEADS = {"long-cite": "[{}] ", "long-qa": ""}
"""What stands before a document."""

Document = tuple[str, ...]
"""A title, then sentences."""


@dataclass(frozen=True)
class LongPrompt:
    """A prompt, and what a right answer says: ``answer``, found in the ``document``-th (from 1) alone."""

    prompt: TaskPrompt
    answer: str
    document: int


def lengths_up_to(longest: int) -> list[int]:
    """1,024 tokens and its doublings, then ``longest`` itself."""
    lengths = []
    length = SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def long_task(
    name: str, tokens: int, count_tokens: Callable[[str], int], prompts: int = DEFAULT_PROMPTS, seed: int = 0
) -> Task:
    """A task whose prompts have ``tokens`` tokens, or fewer by what a short document takes, never more.

    The chat template's own tokens come on top. Prompt i does not depend on how many there are.

    Args:
        name: one of :data:`LONG_TASKS`. count_tokens: how many tokens a text has for the target.

    Raises:
        UsageError: an unknown name, too few tokens for a document with its question, or more than there are names for.
    """
    if name not in LONG_TASKS:
        raise UsageError(f"no task {name!r} that is made to a length: there are {', '.join(LONG_TASKS)}")
    made = tuple(long_prompt(name, tokens, count_tokens, seed, i).prompt for i in range(prompts))
    return Task(f"{name}-{tokens}", made, f"made from seed {seed}")


def long_prompt(name: str, tokens: int, count_tokens: Callable[[str], int], seed: int, index: int) -> LongPrompt:
    """Prompt ``index`` of a seed; see :func:`long_task`."""
    rng = random.Random(f"{seed}/{name}/{tokens}/{index}")
    documents = _documents(rng)
    asked, question, answer = next(documents)
    where = rng.random()

    def render(others: Sequence[Document]) -> tuple[str, int]:
        place = int(where * (len(others) + 1))
        return _text(name, [*others[:place], asked, *others[place:]], question), place + 1

    least = count_tokens(render([])[0])
    if least > tokens:
        raise UsageError(f"{name}: {tokens} tokens are too few, a document with its question takes {least}")
    others = _filled(
        (d for d, _, _ in documents),
        lambda chosen: count_tokens(render(chosen)[0]),
        lambda d: count_tokens(f"\n\n{_HEADS[name].format(100)}{_joined(d)}"),
        tokens,
    )
    text, document = render(others)
    return LongPrompt(TaskPrompt(f"s{seed}-{index:03d}", (text,)), answer, document)


def _filled(
    documents: Iterator[Document], count_all: Callable[[list[Document]], int], count: Callable[[Document], int], tokens: int
) -> list[Document]:
    """As many documents as fit. Each is counted by itself; since counts of parts do not add up exactly, the whole is counted after
    each round, and another round fills what is missing, or sentences are dropped at the end."""
    chosen: list[Document] = []
    room = tokens - count_all(chosen)
    grew = True
    while grew and room > 0:
        more = _round(documents, count, room)
        grew = bool(more)
        chosen += more
        room = tokens - count_all(chosen)
    while room < 0:
        last = chosen.pop()
        if len(last) > _LEAST:
            chosen.append(last[:-1])
        room = tokens - count_all(chosen)
    return chosen


def _round(documents: Iterator[Document], count: Callable[[Document], int], room: int) -> list[Document]:
    """Whole documents while they fit, then one that is cut."""
    chosen: list[Document] = []
    for document in documents:
        fitting = document
        while len(fitting) >= _LEAST and count(fitting) > room:
            fitting = fitting[:-1]
        if len(fitting) >= _LEAST:
            chosen.append(fitting)
            room -= count(fitting)
        if fitting != document:
            break
    return chosen


def _joined(document: Document) -> str:
    return f"{document[0]}\n{' '.join(document[1:])}"


def _text(name: str, documents: Sequence[Document], question: str) -> str:
    body = "\n\n".join(_HEADS[name].format(i) + _joined(d) for i, d in enumerate(documents, 1))
    if name == "long-cite":
        return (
            f"Read the numbered documents, then answer the question.\n\n{body}\n\nQuestion: {question} Answer in full sentences, "
            "and cite the documents that you rely on by their numbers in brackets."
        )
    return (
        f"Below is a traveller's account of many places.\n\n{body}\n\nQuestion: {question} Answer first, then tell in a "
        "paragraph what else the account says about it."
    )


def _documents(rng: random.Random) -> Iterator[tuple[Document, str, str]]:
    """Documents without end, each with a question that it answers, and the answer; no two are about one place.

    Raises:
        UsageError: the names are used up.
    """
    blocks = _blocks()
    places = ["".join(parts) for parts in product(blocks["stem"], blocks["ending"])]
    rng.shuffle(places)
    for place in places:
        kind = rng.choice(blocks["kinds"])
        facts = [(fact, {"place": place, **_details(blocks, rng)}) for fact in rng.sample(kind["facts"], _FACTS)]
        said = [rng.choice(fact["says"]).format(**details) for fact, details in facts]
        said += rng.sample(kind["asides"], rng.randint(1, len(kind["asides"])))
        rng.shuffle(said)
        fact, details = rng.choice(facts)
        title, opening = kind["title"].format(place=place), rng.choice(kind["opening"]).format(place=place)
        yield (title, opening, *said), fact["ask"].format(**details), fact["answer"].format(**details)
    raise UsageError(f"a prompt can have {len(places)} documents, which are too few for this length: ask for fewer tokens")


def _details(blocks: dict[str, Any], rng: random.Random) -> dict[str, str]:
    drawn = {key: rng.choice(blocks[key]) for key in ("month", "material", "trade", "reason")}
    drawn["person"] = f"{rng.choice(blocks['first'])} {rng.choice(blocks['last'])}"
    return drawn | {"year": str(rng.randint(1790, 1989)), "number": str(rng.randint(21, 989)), "small": str(rng.randint(4, 12))}


@cache
def _blocks() -> dict[str, Any]:
    return json.loads((ASSETS / "long_context.json").read_text(encoding="utf-8"))

"""Prompts of a wanted length, made from a seed: numbered documents with a question to cite, and one long text with a question.

The texts are our own and made up, so that no target can know the answer without reading; every prompt differs from the others in
all its facts. What is measured is how well a drafter guesses behind a long context, not whether the answer is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hspec.errors import UsageError
from hspec.evaluation.tasks.task import Task, TaskPrompt

LONG_TASKS = ("long-cite", "long-qa")
SHORTEST = 256
"""Tokens; below that the frame leaves no room for documents."""

_FIRST = ("Ada", "Boris", "Clara", "Dinesh", "Elif", "Farid", "Greta", "Hana", "Ivo", "Jana", "Kofi", "Lena", "Marek", "Nadia")
_LAST = (
    "Amsel",
    "Brandt",
    "Castro",
    "Duval",
    "Eriksen",
    "Fontana",
    "Grau",
    "Holm",
    "Iwanow",
    "Jansen",
    "Keller",
    "Lindt",
    "Moreau",
)
_TOWNS = (
    "Arlen",
    "Brookwick",
    "Caldmoor",
    "Dunvale",
    "Eastry",
    "Farnholt",
    "Glenrow",
    "Harbeck",
    "Inverley",
    "Kestrel",
    "Lowmarsh",
)
_TRADES = (
    "bell founder",
    "map maker",
    "beekeeper",
    "ferry builder",
    "paper mill owner",
    "clock maker",
    "botanist",
    "stonemason",
)
_WORKS = (
    "a water clock",
    "a printed atlas",
    "a covered bridge",
    "a seed bank",
    "a tide mill",
    "a school for pilots",
    "an observatory",
)
_REASONS = (
    "because the old one had burned down",
    "after a bet with a neighbour",
    "with money from a lottery",
    "against the advice of the council",
    "as a gift to the town",
)
_FILLERS = (
    "Visitors came from far away, and an inn was built for them beside the road.",
    "The work took longer than planned, since the winter was hard and the river froze.",
    "Letters from those years are kept in the archive of the town hall.",
    "Most of the stone was brought by boat from a quarry upstream.",
    "For some years nobody took notice, until a newspaper wrote about it.",
    "In the end the costs were twice what had been reckoned.",
    "A small festival is still held there in early summer.",
)


def long_task(name: str, tokens: int, count_tokens: Callable[[str], int], prompts: int, seed: int = 0) -> Task:
    """A task whose prompts have about ``tokens`` tokens, and not more.

    Args:
        name: one of :data:`LONG_TASKS`. count_tokens: how many tokens a text has for the target.

    Raises:
        UsageError: too short for a document, or an unknown name.
    """
    if name not in LONG_TASKS:
        raise UsageError(f"no task {name!r} that is made to a length: there are {', '.join(LONG_TASKS)}")
    if tokens < SHORTEST:
        raise UsageError(f"{name}: {tokens} tokens are too few, at least {SHORTEST} are needed")
    made = [_prompt(name, tokens, count_tokens, random.Random(f"{seed}/{name}/{tokens}/{i}"), i) for i in range(prompts)]
    return Task(f"{name}-{tokens}", tuple(made), "made from a seed")


def _prompt(name: str, tokens: int, count_tokens: Callable[[str], int], rng: random.Random, index: int) -> TaskPrompt:
    """As many documents as fit. Their number is found by what one takes, then by leaving out one at a time."""
    facts = [_fact(rng) for _ in range(max(2, tokens // 25))]
    asked = rng.random()
    count = max(1, min(len(facts), tokens * len(facts) // max(1, count_tokens(_text(name, facts, 0)))) + 1)
    while count > 1 and count_tokens(_text(name, facts[:count], int(asked * count))) > tokens:
        count -= 1
    return TaskPrompt(f"{index:03d}", (_text(name, facts[:count], int(asked * count)),))


def _fact(rng: random.Random) -> dict[str, str]:
    fact = {
        "who": f"{rng.choice(_FIRST)} {rng.choice(_LAST)}",
        "trade": rng.choice(_TRADES),
        "town": f"{rng.choice(('Upper', 'Lower', 'New', 'Old', 'Little', 'Great'))} {rng.choice(_TOWNS)}",
        "work": rng.choice(_WORKS),
        "year": str(rng.randint(1702, 1966)),
        "why": rng.choice(_REASONS),
    }
    fillers = " ".join(rng.sample(_FILLERS, rng.randint(1, 3)))
    fact["text"] = (
        f"In {fact['year']} the {fact['trade']} {fact['who']} built {fact['work']} in {fact['town']}, {fact['why']}. {fillers}"
    )
    return fact


def _text(name: str, facts: list[dict[str, str]], asked: int) -> str:
    fact = facts[asked]
    question = f"In which year did {fact['who']} of {fact['town']} build {fact['work']}, and why?"
    if name == "long-cite":
        documents = "\n\n".join(f"[{i}] {f['text']}" for i, f in enumerate(facts, 1))
        ask = f"Question: {question} Answer in full sentences, and cite the number of every document that you use in brackets."
        return f"Read the numbered documents, then answer the question.\n\n{documents}\n\n{ask}"
    story = "\n\n".join(f["text"] for f in facts)
    ask = f"Question: {question} Explain what else it says about the town."
    return f"Read the chronicle below, then answer the question about it.\n\n{story}\n\n{ask}"

"""Conversations whose answers are copied from their prompts, to train drafters on (``hspec train --data``).

    python benchmarks/copying_data.py copying.jsonl --conversations 3000
    python benchmarks/copying_data.py copying.jsonl --source my-chats.jsonl --longest 1200

A drafter that learns from chat alone seldom has to copy, and then drafts poorly where answers quote documents. Here numbered
sentences, drawn from conversations of all kinds, stand in a prompt that asks for some of them: what comes next can be known from the
prompt, and from little else. Sentences of held-out conversations are not used.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hspec.errors import HSpecError
from hspec.training.conversations import Conversation
from hspec.training.prompts import HELD_OUT_PER_MILLE, Prompt, prompt_id
from hspec.training.sources import PACKAGED_DATA, SourceConfig, stream_sources

CHARACTERS = range(30, 220)
"""Of a sentence that is taken."""
WORDS = 6
"""Of a sentence that is taken, at least."""
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")

Pair = tuple[str, str]
"""What the user says, and the answer."""


def sentences(conversations: Iterable[Conversation]) -> Iterator[str]:
    """Every different sentence of what was said, except in conversations that a job holds out."""
    seen: set[str] = set()
    for conversation in conversations:
        first = conversation.first_user_turn
        if first is None or Prompt(prompt_id(first), first).held_out:
            continue
        for message in conversation.messages:
            for sentence in map(str.strip, _ENDS.split(message["content"])):
                fits = len(sentence) in CHARACTERS and len(sentence.split()) >= WORDS and sentence.isascii()
                if fits and sentence not in seen:
                    seen.add(sentence)
                    yield sentence


def repeat(lines: Sequence[str], rng: random.Random) -> Pair:
    """A passage, word for word."""
    passage = " ".join(lines)
    return f"{rng.choice(('Repeat this text word for word:', 'Copy the following text exactly.'))}\n\n{passage}", passage


def quote(lines: Sequence[str], rng: random.Random) -> Pair:
    """One of several numbered documents."""
    at = rng.randrange(len(lines))
    documents = "\n".join(f"[{number}] {line}" for number, line in enumerate(lines, 1))
    return f"{documents}\n\nQuote document {at + 1}.", lines[at]


def find(lines: Sequence[str], rng: random.Random) -> Pair:
    """The sentence that has some of its own words in a row."""
    line = rng.choice(lines)
    words = line.split()
    at = rng.randrange(len(words) - 2)
    asked = f'Which sentence of the text above contains "{" ".join(words[at : at + 3])}"? Quote it in full.'
    return "\n".join([*lines, "", asked]), f'The sentence is: "{line}"'


def go_on(lines: Sequence[str], rng: random.Random) -> Pair:
    """What comes behind a sentence."""
    at = rng.randrange(len(lines) - 1)
    asked = f'What does the text above say right after "{lines[at]}"?'
    return f"{' '.join(lines)}\n\n{asked}", f"It says: {lines[at + 1]}"


def listed(lines: Sequence[str], rng: random.Random) -> Pair:
    """Some of the documents, as a list."""
    chosen = sorted(rng.sample(range(len(lines)), min(len(lines), rng.randint(2, 4))))
    documents = "\n\n".join(f"Document {number}: {line}" for number, line in enumerate(lines, 1))
    names = ", ".join(str(at + 1) for at in chosen)
    return f"{documents}\n\nList the documents {names} in full.", "\n".join(f"- {lines[at]}" for at in chosen)


KINDS = (repeat, quote, find, go_on, listed)


def copying(lines: Sequence[str], conversations: int, longest: int, seed: int) -> Iterator[Pair]:
    """So many conversations of sentences drawn from ``lines``.

    Args:
        longest: characters of the sentences in one prompt; how many each has is drawn evenly from a few lines on. seed: of all draws.
    """
    rng = random.Random(seed)
    for number in range(conversations):
        room, taken = rng.randint(min(300, longest), longest), list[str]()
        while len(taken) < 3 or (sum(map(len, taken)) < room and len(taken) < len(lines)):
            line = rng.choice(lines)
            if line not in taken:
                taken.append(line)
        yield KINDS[number % len(KINDS)](taken, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", default=PACKAGED_DATA, help="where sentences come from: as --data of hspec train")
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--longest", type=int, default=900, help="characters of the sentences in one prompt")
    parser.add_argument("--most-sentences", type=int, default=200_000, help="read no more than so many")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lines: list[str] = []
    try:
        for line in sentences(stream_sources([SourceConfig(source=given.source)])):
            lines.append(line)
            if len(lines) == given.most_sentences:
                break
        if len(lines) < 100:
            sys.exit(f"copying_data: {given.source} has {len(lines)} usable sentences, 100 are needed")
        with given.out.open("w", encoding="utf-8") as file:
            for asked, answer in copying(lines, given.conversations, given.longest, given.seed):
                messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": messages}) + "\n")
    except (OSError, HSpecError) as error:
        sys.exit(f"copying_data: {error}")
    print(f"{given.out}: {given.conversations:,} conversations of {len(lines):,} sentences ({HELD_OUT_PER_MILLE} ‰ held out)")


if __name__ == "__main__":
    main()

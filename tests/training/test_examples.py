"""Which tokens are trained on, and in what order documents come."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from hspec.training.conversations import Conversation
from hspec.training.examples import Batch, Example, ExampleStream, collate, from_answers, from_conversations
from tests.tiny import tiny_tokenizer

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def documents(count: int, longest: int = 40) -> list[Example]:
    out = []
    for i in range(count):
        length = 4 + (i * 7) % (longest - 3)
        out.append(Example(str(i), [3 + i % 100] * length, [False, False] + [True] * (length - 2)))
    return out


def ids_of(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in batch.tokens]


def test_only_what_the_assistant_wrote_is_supervised(target: Target) -> None:
    (example,) = from_conversations([Conversation.of(TALK, "a")], target.template, 500)
    runs, current = [], []
    for token, own in zip([*example.tokens, 0], [*example.supervised, False], strict=True):
        if own:
            current.append(token)
        elif current:
            runs.append(target.tokenizer.decode(current))
            current = []
    assert runs == ["yo<|end|>", "no<|end|>"]  # the end of the turn is the assistant's own; the newline behind it is not
    assert target.tokenizer.decode(example.tokens) == target.template.text(TALK, generate=False)


def test_long_documents_are_cut_and_those_without_answers_left_out(target: Target) -> None:
    some = [Conversation.of(TALK, "a"), Conversation.of(TALK[:2], "b"), Conversation.of([TALK[1], {**TALK[2], "content": " "}])]
    whole = from_conversations(some, target.template, 500)
    assert [e.id for e in whole] == ["a"]
    end = whole[0].supervised.index(True) + 1
    (cut,) = from_conversations(some, target.template, end)
    assert cut.tokens == whole[0].tokens[:end] and cut.supervised_count == 1
    assert from_conversations(some, target.template, end - 1) == []


def template(text: str | None) -> ChatTemplate:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def test_a_template_that_does_not_show_the_assistant_is_refused() -> None:
    rewriting = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    with pytest.raises(HSpecError, match="does not mark where the assistant speaks"):
        from_conversations([Conversation.of(TALK)], template(rewriting), 500)
    with pytest.raises(UsageError, match="no chat template"):
        from_conversations([Conversation.of(TALK)], template(None), 500)


def test_conversations_that_the_template_refuses_are_left_out_one_by_one() -> None:
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    refused: list[str] = []
    some = [Conversation.of(TALK, "a"), Conversation.of(TALK[1:], "b")]
    found = from_conversations(some, template(strict), 500, lambda c, error: refused.append(f"{c.id}: {error}"))
    assert [e.id for e in found] == ["b"]
    assert len(refused) == 1 and refused[0].startswith("a: ") and "no system role" in refused[0]


def test_answers_are_read_with_the_tokens_that_were_drawn(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"id": "x", "prompt_tokens": [5, 6], "tokens": [7, 0]}, {"id": "y", "prompt_tokens": [1] * 9, "tokens": [2]}]
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + '{"id": "z", "prom')
    assert from_answers(path, 9) == [Example("x", [5, 6, 7, 0], [False, False, True, True])]
    assert [e.id for e in from_answers(path, 10)] == ["x", "y"]
    path.write_text("{}\n" + json.dumps(records[0]) + "\n")
    with pytest.raises(HSpecError, match=r"a\.jsonl, line 1: not an answer record"):
        from_answers(path, 9)
    with pytest.raises(HSpecError, match="cannot read the answers"):
        from_answers(tmp_path / "none.jsonl", 9)


def test_the_stream_is_a_pure_function_of_seed_and_step() -> None:
    examples = documents(60)
    stream = ExampleStream(examples, 100, seed=3)
    forward = [ids_of(stream.batch(s)) for s in range(3 * stream.batches_per_epoch)]
    assert stream.batches_per_epoch > 10
    for step in (len(forward) - 1, 3, 30, 0, 15, 30):
        assert ids_of(stream.batch(step)) == forward[step]
        assert ids_of(ExampleStream(examples, 100, seed=3).batch(step)) == forward[step]
    other = ExampleStream(examples, 100, seed=4)
    assert [ids_of(other.batch(s)) for s in range(len(forward))] != forward


def test_every_document_comes_once_an_epoch_in_another_order() -> None:
    examples = [Example(str(i), [i, *[9] * (4 + i % 5)], [False, False, *[True] * (3 + i % 5)]) for i in range(700)]
    stream = ExampleStream(examples, 64, seed=0)
    orders, step = [], 0
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < len(examples):
            seen += stream.batch(step).tokens[:, 0].tolist()
            step += 1
        assert Counter(seen) == Counter(range(700))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]


def test_batches_keep_the_token_budget() -> None:
    stream = ExampleStream(documents(200), 100, seed=0)
    sizes = [stream.batch(s).tokens.numel() for s in range(stream.batches_per_epoch)]
    assert max(sizes) <= 100 and sum(sizes) / len(sizes) > 60
    long = ExampleStream([*documents(3), Example("long", [5] * 300, [True] * 300)], 100, seed=0)
    shapes = [tuple(long.batch(s).tokens.shape) for s in range(long.batches_per_epoch)]
    assert (1, 300) in shapes  # a document longer than the budget is a batch of its own


def test_padding_is_never_supervised() -> None:
    batch = collate([Example("a", [5, 6], [False, True]), Example("b", [7, 8, 9], [True, True, True])])
    assert batch.tokens.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert batch.supervised.tolist() == [[False, True, False], [True, True, True]]
    assert batch.tokens.dtype == torch.int64


def test_documents_without_room_for_a_block_are_left_out() -> None:
    short = [Example("a", [1], [True]), Example("b", [1, 2], [True, True]), Example("c", [1, 2, 3], [True, True, False])]
    good = Example("d", [1, 2, 3], [False, False, True])
    stream = ExampleStream([*short, good], 10, 0)
    assert stream.batches_per_epoch == 1 and ids_of(stream.batch(5)) == [(1, 2, 3)]
    with pytest.raises(HSpecError, match="no training example"):
        ExampleStream(short, 10, 0)
    with pytest.raises(HSpecError, match="no training example"):
        ExampleStream([], 10, 0)


def test_the_fingerprint_knows_the_documents() -> None:
    base = documents(5)
    same = ExampleStream(list(base), 100, 1).fingerprint()
    assert same == ExampleStream(base, 50, 2).fingerprint()
    assert same != ExampleStream(base[::-1], 100, 1).fingerprint()
    changed = Example(base[0].id, [*base[0].tokens[:-1], 1], base[0].supervised)
    assert same != ExampleStream([changed, *base[1:]], 100, 1).fingerprint()

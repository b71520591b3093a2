"""Which tokens are trained on, and which templates cannot say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from hspec.training.conversations import Conversation
from hspec.training.corpus import Example
from hspec.training.documents import check_template, from_answers, from_conversations
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


def documents(some: list[Conversation], template: ChatTemplate, longest: int = 500) -> list[Example]:
    return [example for _, example in from_conversations(some, template, longest)]


def test_only_what_the_assistant_wrote_is_supervised(target: Target) -> None:
    (example,) = documents([Conversation.of(TALK, "a")], target.template)
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
    whole = documents(some, target.template)
    assert [e.id for e in whole] == ["a"]
    end = whole[0].supervised.index(True) + 1
    (cut,) = documents(some, target.template, end)
    assert cut.tokens == whole[0].tokens[:end] and cut.supervised_count == 1
    assert documents(some, target.template, end - 1) == []


def template(text: str | None) -> ChatTemplate:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{{ messages | length }}{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
            "does not mark where the assistant speaks",
        ),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "no token of a plain exchange"),
        (
            "{% for m in messages if m['role'] == 'assistant' or messages | length == 1 %}{{ m['content'] }}{% endfor %}",
            "does not mark where the assistant speaks",
        ),
        ("{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}{% endfor %}", "leaves out what the user says"),
        ("{{ raise_exception('never') }}", "refuses these messages"),
    ],
)
def test_templates_that_cannot_be_trained_with(text: str, message: str) -> None:
    with pytest.raises(HSpecError, match=message):
        check_template(template(text), own_answers=False)


def test_a_mask_of_ones_is_refused() -> None:
    """A template whose turns cannot be told apart, since the tokenizer makes one token of them."""

    class Whole(ChatTemplate):
        def encode_supervised(self, messages: object) -> tuple[list[int], list[bool]]:
            return [5, 6], [True, True]

    with pytest.raises(HSpecError, match=r"every token of a plain exchange is the assistant's.*--own-answers"):
        check_template(Whole(tiny_tokenizer()), own_answers=False)


def test_a_tokenizer_without_offsets_is_refused_where_they_are_needed() -> None:
    class Slow(ChatTemplate):
        def encode_supervised(self, messages: object) -> tuple[list[int], list[bool]]:
            raise NotImplementedError("return_offsets_mapping is not available when using Python tokenizers")

    check_template(Slow(tiny_tokenizer()), own_answers=True)
    with pytest.raises(HSpecError, match="does not say where its tokens lie"):
        check_template(Slow(tiny_tokenizer()), own_answers=False)


def test_what_own_answers_ask_of_a_template() -> None:
    check_template(template(CHAT_TEMPLATE), own_answers=True)
    check_template(template("{{ messages | length }}{{ messages[0]['content'] }}"), own_answers=True)  # rewrites: no matter
    for own_answers in (False, True):
        with pytest.raises(HSpecError, match="leaves out what the user says"):
            check_template(template("<|start|>assistant\n"), own_answers)
        with pytest.raises(UsageError, match="no chat template"):
            check_template(template(None), own_answers)


def test_conversations_that_the_template_refuses_are_left_out_one_by_one() -> None:
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    refused: list[str] = []
    some = [Conversation.of(TALK, "a"), Conversation.of(TALK[1:], "b")]
    found = from_conversations(some, template(strict), 500, lambda c, error: refused.append(f"{c.id}: {error}"))
    assert [(c.id, e.id) for c, e in found] == [("b", "b")]
    assert len(refused) == 1 and refused[0].startswith("a: ") and "no system role" in refused[0]


def test_answers_are_read_with_the_tokens_that_were_drawn(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"id": "x", "prompt_tokens": [5, 6], "tokens": [7, 0]}, {"id": "y", "prompt_tokens": [1] * 9, "tokens": [2]}]
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + '{"id": "z", "prom')
    assert list(from_answers(path, 9)) == [Example("x", [5, 6, 7, 0], [False, False, True, True])]
    assert [e.id for e in from_answers(path, 10)] == ["x", "y"]
    wanted = from_answers(path, 10, {"y": 3}, weights=(1.0, 2.0, 3.0, 4.0))
    assert wanted.ids == ["y"] and wanted.sources.tolist() == [3] and wanted.weights == (1, 2, 3, 4)
    assert len(from_answers(path, 10, {})) == 0


@pytest.mark.parametrize("bad", ["{}", "[]", "nonsense", '{"id": "x", "prompt_tokens": 5, "tokens": [1]}'])
def test_damaged_answers(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(bad + '\n{"id": "x", "prompt_tokens": [5, 6], "tokens": [7, 0]}\n')
    with pytest.raises(HSpecError, match=r"a\.jsonl, line 1: not an answer record"):
        from_answers(path, 9)
    with pytest.raises(HSpecError, match="cannot read the answers"):
        from_answers(tmp_path / "none.jsonl", 9)

"""Which tokens of a conversation the assistant wrote, and that unsuitable templates are refused."""

from __future__ import annotations

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.targets.template import ChatTemplate
from tests.tiny import BEGIN, CHAT_TEMPLATE, END, START, tiny_tokenizer

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello 🙂"},
    {"role": "user", "content": "assistant\nwho?"},
    {"role": "assistant", "content": "me\n"},
]


def template(text: str | None = CHAT_TEMPLATE, **settings: object) -> ChatTemplate:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, **settings)  # type: ignore[arg-type]


def supervised_parts(chat: ChatTemplate, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of supervised tokens."""
    ids, mask = chat.encode_supervised(messages)
    assert len(ids) == len(mask)
    parts: list[list[int]] = []
    for i, token in enumerate(ids):
        if mask[i]:
            if not (i and mask[i - 1]):
                parts.append([])
            parts[-1].append(token)
    return [chat.tokenizer.decode(part) for part in parts]


def test_text_and_tokens() -> None:
    chat = template()
    assert chat.text(TALK[1:2]) == f"{START}user\nhi{END}\n{START}assistant\n"
    assert chat.text(TALK[1:2], generate=False) == f"{START}user\nhi{END}\n"
    ids = chat.encode(TALK)
    assert chat.tokenizer.decode(ids) == chat.text(TALK)
    assert ids.count(chat.tokenizer.eos_token_id) == len(TALK), "special tokens are single tokens, none is added"


def test_the_assistants_tokens_and_its_end_of_turn_are_supervised() -> None:
    chat = template()
    assert supervised_parts(chat, TALK) == [f"hello 🙂{END}", f"me\n{END}"], "not the newline that the template prints behind"
    ids, mask = chat.encode_supervised(TALK)
    assert ids == chat.encode(TALK, generate=False)
    assert sum(t == chat.tokenizer.eos_token_id and m for t, m in zip(ids, mask, strict=True)) == 2


def test_supervised_tokens_are_what_generation_would_write() -> None:
    """A conversation's prompt, then its supervised tokens, is the conversation."""
    chat = template()
    ids, mask = chat.encode_supervised(TALK)
    prompt = chat.encode(TALK[:-1])
    assert ids[: len(prompt)] == prompt and not any(mask[len(prompt) - 3 : len(prompt)]) and mask[len(prompt)]


def test_neighbouring_assistant_messages() -> None:
    two = [*TALK[:3], {"role": "assistant", "content": "more"}]
    assert supervised_parts(template(), two) == [f"hello 🙂{END}", f"more{END}"]


def test_nothing_to_supervise() -> None:
    ids, mask = template().encode_supervised(TALK[:2])
    assert ids and not any(mask)


def test_an_empty_answer_is_its_end_of_turn() -> None:
    assert supervised_parts(template(), [TALK[1], {"role": "assistant", "content": ""}]) == [END]


def test_a_template_without_an_end_of_turn() -> None:
    plain = "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    assert supervised_parts(template(plain), TALK[1:3]) == ["hello 🙂\n"]


REWRITES = {
    "drops earlier answers": "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}<|start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    "counts messages": "{{ messages|length }}\n" + CHAT_TEMPLATE,
    "another generation prompt": CHAT_TEMPLATE.replace("<|start|>assistant\n{% endif %}", "<|start|>model\n{% endif %}"),
}


@pytest.mark.parametrize("name", REWRITES)
def test_a_template_that_rewrites_is_refused(name: str) -> None:
    with pytest.raises(HSpecError, match=r"rewrites a shorter one.*use a template that only appends"):
        template(REWRITES[name]).encode_supervised(TALK)


def test_no_template() -> None:
    with pytest.raises(UsageError, match="no chat template: pass a plain prompt"):
        template(None).encode(TALK)


def test_a_template_that_refuses() -> None:
    with pytest.raises(HSpecError, match="refuses these messages: no system role here"):
        template("{{ raise_exception('no system role here') }}").encode(TALK)


def test_end_of_turn_tokens() -> None:
    assert template().eos_ids == {0}
    assert template(extra_eos=frozenset([5])).eos_ids == {0, 5}
    chat = template()
    chat.tokenizer.eos_token = None
    assert chat.eos_ids == frozenset()


def test_an_extra_end_of_turn_token_ends_the_supervised_part() -> None:
    """A tokenizer whose EOS is not what ends a turn."""
    chat = template()
    chat.tokenizer.eos_token = BEGIN
    assert supervised_parts(chat, TALK)[0] == f"hello 🙂{END}\n"
    chat.extra_eos = frozenset([0])
    assert supervised_parts(chat, TALK)[0] == f"hello 🙂{END}"


def test_plain_text() -> None:
    assert template().encode_plain("hi") == template().tokenizer("hi").input_ids
    begin = template().tokenizer.convert_tokens_to_ids(BEGIN)
    chat = template(prepend_bos=begin)
    assert chat.encode_plain("hi") == [begin, *template().encode_plain("hi")]
    assert chat.encode_plain(f"{BEGIN}hi") == chat.encode_plain("hi"), "never twice"


def test_the_hash_tells_templates_apart() -> None:
    assert template().hash == template().hash and len(template().hash) == 16
    assert len({template().hash, template(CHAT_TEMPLATE + " ").hash, template(None).hash}) == 3

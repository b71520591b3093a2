"""What ships: enough of each family, nothing twice, and schemas that a template can print."""

import json

import pytest

from hspec.evaluation.tasks.built_in import ASSETS, beginnings, built_in
from hspec.evaluation.tasks.families import DEEPSPEC, FAMILIES, family_of
from hspec.evaluation.tasks.task import as_openai, takes_tools, tools_as_text
from hspec.targets.template import ChatTemplate
from hspec.training.conversations import Conversation
from hspec.training.prompts import clean_prompts, normalised
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str) -> None:
    task = built_in(name)
    assert 12 <= len(task.prompts) <= 16
    assert (task.name, task.family, task.source, task.bad_lines) == (name, name, "built in", ())
    assert all(p.id.startswith(f"{name}-") and bool(p.tools) == (name == "tool_calling") for p in task.prompts)
    assert all(len(p.turns) == (2 if name == "chat" else 1) for p in task.prompts)
    assert 0 < task.max_tokens <= 4096


def test_no_prompt_and_no_source_text_is_there_twice() -> None:
    paragraphs = [part for family in FAMILIES for p in built_in(family).prompts for t in p.turns for part in t.split("\n\n")]
    long = [normalised(part).lstrip("[]0123456789. document:") for part in paragraphs if len(part) > 150]
    assert len(set(long)) == len(long) > 40


def test_schemas_are_whole() -> None:
    for prompt in built_in("tool_calling").prompts:
        for tool in prompt.tools:
            parameters = tool["parameters"]
            assert tool["name"] and tool["description"] and parameters["type"] == "object"
            assert set(parameters["required"]) <= set(parameters["properties"])


def test_training_can_leave_them_out() -> None:
    """By their beginnings, compared as training compares prompts."""
    known = beginnings()
    for family in FAMILIES:
        for prompt in built_in(family).prompts:
            conversation = Conversation.of(
                [{"role": "user", "content": "  " + prompt.turns[0].replace(" ", "\n", 2).replace("e", "E")}]
            )
            kept, _ = clean_prompts([conversation], lambda text: 100)
            assert all(normalised(p.text)[:100] in known for p in kept)
            assert all(normalised(turn)[:100] in known for turn in prompt.turns)
    assert normalised("Why does ice float on lemonade?") not in known


def test_tools_go_into_the_system_message_or_the_template() -> None:
    prompt = built_in("tool_calling").prompts[0]
    plain = ChatTemplate(tiny_tokenizer())
    assert not takes_tools(plain)
    opening = built_in("tool_calling").opening(prompt, plain)
    assert opening == [{"role": "system", "content": tools_as_text(prompt.tools)}]
    lines = opening[0]["content"].splitlines()[1:]
    assert tuple(map(json.loads, lines)) == prompt.tools, "a schema a line, nothing lost"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}" + tokenizer.chat_template
    able = ChatTemplate(tokenizer)
    assert takes_tools(able) and built_in("tool_calling").opening(prompt, able) == []
    text = able.text([{"role": "user", "content": "Hello"}], tools=as_openai(prompt.tools))
    assert text.startswith(f"{prompt.tools[0]['name']} ")
    assert as_openai(as_openai(prompt.tools)) == as_openai(prompt.tools)
    assert built_in("qa").opening(built_in("qa").prompts[0], plain) == []
    tokenizer.chat_template = None
    assert not takes_tools(ChatTemplate(tokenizer))


def test_families() -> None:
    assert {family_of(name) for name in DEEPSPEC} == {"math", "code", "chat"}
    assert [family_of(n) for n in ("bfcl-parallel", "mmath-th", "long-cite-4096", "hotpotqa", "mine")] == [
        "tool_calling", "math", "long", "long", "other",
    ]  # fmt: skip


def test_the_files_of_the_assets() -> None:
    assert {path.stem for path in ASSETS.glob("*.jsonl")} == set(FAMILIES)

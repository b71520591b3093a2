"""What ships: enough of each family, nothing twice, and schemas that a template can print."""

import json

import pytest

from hspec.evaluation.tasks.built_in import ASSETS, built_in
from hspec.evaluation.tasks.families import FAMILIES
from hspec.evaluation.tasks.task import as_openai, takes_tools, tools_as_text
from hspec.targets.template import ChatTemplate
from hspec.training.prompts import normalised
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str) -> None:
    task = built_in(name)
    assert 12 <= len(task.prompts) <= 16
    assert (task.name, task.source, task.bad_lines) == (name, "built in", ())
    assert all(p.id.startswith(f"{name}-") and bool(p.tools) == (name == "tool_calling") for p in task.prompts)
    assert all(len(p.turns) == (2 if name == "chat" else 1) for p in task.prompts)


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


def test_the_files_of_the_assets() -> None:
    assert {path.stem for path in ASSETS.glob("*.jsonl")} == set(FAMILIES)

"""What is asked: prompts of one kind, each one or more user turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hspec.errors import HSpecError
from hspec.targets.template import ChatTemplate, Message

_TOOLS_INTRODUCTION = (
    'You may call the functions below. To call one, answer with a JSON object that has its "name" and its "arguments".\n'
)
_PROBE_MARK = "tool_that_nobody_has"


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt: user turns that are asked one after the other, the tools that may be called, a system prompt if it has one.

    ``tools`` are JSON schemas of functions, bare (``{"name", "description", "parameters"}``) or as OpenAI wraps them.
    """

    id: str
    turns: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()
    system: str | None = None

    @property
    def text(self) -> str:
        """All that a target is given for it, without the chat template's frame: for counting and for comparing."""
        return "\n".join([*([self.system] if self.system else []), *map(json.dumps, self.tools), *self.turns])


@dataclass(frozen=True)
class Task:
    """Prompts of one kind."""

    name: str
    prompts: tuple[TaskPrompt, ...]
    source: str = "built in"
    """Where they come from, for the report."""
    bad_lines: tuple[str, ...] = field(default=(), compare=False)
    """What was left out, and why, where that was asked for."""

    def opening(self, prompt: TaskPrompt, template: ChatTemplate) -> list[Message]:
        """The messages before the first turn: the system prompt, and the tools in words where the chat template has no place
        for them."""
        parts = [prompt.system] if prompt.system else []
        if prompt.tools and not takes_tools(template):
            parts.append(tools_as_text(prompt.tools))
        return [{"role": "system", "content": "\n\n".join(parts)}] if parts else []


def takes_tools(template: ChatTemplate) -> bool:
    """Whether a chat template prints the tools that it is given."""
    probe = [{"type": "function", "function": {"name": _PROBE_MARK, "description": "", "parameters": {"type": "object"}}}]
    try:
        return _PROBE_MARK in template.text([{"role": "user", "content": "Hello"}], tools=probe)
    except HSpecError:
        return False


def tools_as_text(tools: Sequence[dict[str, Any]]) -> str:
    """Function schemas for a system message, a line each."""
    return _TOOLS_INTRODUCTION + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def as_openai(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Function schemas in the form that chat templates expect."""
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]

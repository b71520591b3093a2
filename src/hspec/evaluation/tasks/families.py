"""Kinds of tasks: what they are called, and how long their answers may sensibly become."""

from __future__ import annotations

FAMILIES = ("math", "qa", "chat", "rag", "summarization", "translation", "code", "tool_calling")
"""The paper's eight task families, by Spec-Bench's names."""
DEEPSPEC = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca", "arena-hard-v2")
"""DeepSpec's nine tasks."""
LONG = "long"
OTHER = "other"

_OF = {
    "gsm8k": "math", "math500": "math", "aime25": "math", "mmath": "math",
    "humaneval": "code", "mbpp": "code", "livecodebench": "code",
    "mt-bench": "chat", "alpaca": "chat", "arena-hard-v2": "chat",
    "bfcl": "tool_calling", "squad": "rag",
    "hotpotqa": LONG, "aa-lcr": LONG, "long-cite": LONG, "long-qa": LONG,
}  # fmt: skip
_MAX_TOKENS = {"qa": 128, "translation": 128, "rag": 256, "summarization": 256, "tool_calling": 256, LONG: 256}
_MAX_TOKENS_ELSE = 512


def family_of(task: str) -> str:
    """One of :data:`FAMILIES`, ``long``, or ``other`` for tasks that are not known here; ``mmath-en`` is as ``mmath``."""
    if task in FAMILIES:
        return task
    return next((family for name, family in _OF.items() if task == name or task.startswith(f"{name}-")), OTHER)


def suggested_max_tokens(family: str) -> int:
    """New tokens that most answers of the family do with. The paper allows 4096 everywhere."""
    return _MAX_TOKENS.get(family, _MAX_TOKENS_ELSE)

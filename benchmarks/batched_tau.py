"""Tau of drafters on one target in batches, where 'hspec eval' answers one prompt at a time: many more prompts in the same time.

Speed is not measured, there is no plain decoding, and of a conversation only the first turn is answered. The texts are those of
``hspec eval`` with the same seed as far as rounding in a batch of another size does not change a token. One line of JSON an answer;
``transfer.py`` beside this file compares the files of several targets. The same command goes on with what is missing.

    python benchmarks/batched_tau.py --target tuned -d hspec=smollm2 -d ngram --temperature 0 --temperature 1 --limit 4 --out tuned.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.errors import HSpecError
from hspec.evaluation.harness import Contender, Setting, identity
from hspec.evaluation.held_out import is_looping
from hspec.evaluation.setup import contenders_of, longest_prompt, settings_of
from hspec.evaluation.tasks.catalogue import load_tasks
from hspec.evaluation.tasks.task import Task, TaskPrompt, as_openai, takes_tools
from hspec.files import drop_cut_line
from hspec.targets.sources import load_target
from hspec.targets.target import Target


def request(target: Target, task: Task, prompt: TaskPrompt, params: SamplingParams) -> Request:
    """The first turn of a prompt, with the seed that ``hspec eval`` gives it."""
    seed = hashlib.sha256(f"{params.seed}/{task.name}/{prompt.id}".encode()).digest()
    messages = [*task.opening(prompt, target.template), {"role": "user", "content": prompt.turns[0]}]
    tools = as_openai(prompt.tools) if prompt.tools and takes_tools(target.template) else None
    tokens = tuple(target.template.encode(messages, tools=tools))
    return Request(tokens, params.model_copy(update={"seed": int.from_bytes(seed[:4], "little")}))


def measure(
    target: Target, contender: Contender, setting: Setting, prompts: Sequence[tuple[Task, TaskPrompt]], batch: int
) -> list[dict[str, Any]]:
    """A record for each prompt."""
    engine = Engine(target, contender.drafter, contender.k, max_batch=batch)
    results = engine.generate([request(target, task, prompt, setting.params) for task, prompt in prompts])
    return [
        {
            "setting": setting.name,
            "contender": contender.name,
            "task": task.name,
            "id": prompt.id,
            "emitted": result.counters.emitted,
            "steps": result.counters.steps,
            "looping": is_looping(result.tokens),
            "text": result.text,
        }
        for (task, prompt), result in zip(prompts, results, strict=True)
    ]


def run(
    target: Target, contenders: Sequence[Contender], settings: Sequence[Setting], tasks: Sequence[Task], batch: int, out: Path
) -> None:
    """Measure what ``out`` does not have yet, and append it.

    Raises:
        HSpecError: ``out`` holds what another target or other drafters gave.
    """
    about = identity(target, contenders, settings)
    own = {"target": about["target"], "contenders": about["contenders"]}
    found = [json.loads(line) for line in drop_cut_line(out).splitlines()]
    if found and found[0] != own:
        raise HSpecError(f"{out} holds answers of another target, or by other drafters: choose another --out")
    done = {(r["setting"], r["contender"], r["task"], r["id"]) for r in found[1:]}
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        if not found:
            file.write(json.dumps(own) + "\n")
        for setting in settings:
            for contender in contenders:
                prompts = [(t, p) for t in tasks for p in t.prompts if (setting.name, contender.name, t.name, p.id) not in done]
                for record in measure(target, contender, setting, prompts, batch) if prompts else []:
                    file.write(json.dumps(record) + "\n")
                file.flush()
                print(f"{setting.name}, {contender.name}: {len(prompts)} prompts", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("-d", "--drafter", action="append", required=True, help="as 'hspec eval' takes it; several times")
    parser.add_argument("--temperature", type=float, action="append", help="several times; 0 is greedy")
    parser.add_argument("--tasks", default="families")
    parser.add_argument("--limit", type=int, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        target = load_target(given.target)
        contenders = [c for c in contenders_of(target, given.drafter, None) if c.drafter is not None]
        params = [
            SamplingParams(temperature=t, max_tokens=given.max_tokens, seed=given.seed) for t in given.temperature or [0.0]
        ]
        tasks = load_tasks(
            given.tasks.split(","), None, given.limit, given.seed, False, lambda text: len(target.tokenizer(text).input_ids),
            longest=longest_prompt(target, given.max_tokens),
        )  # fmt: skip
        run(target, contenders, settings_of(params), tasks, given.batch, given.out)
    except HSpecError as error:
        sys.exit(f"batched_tau: {error}")


if __name__ == "__main__":
    main()

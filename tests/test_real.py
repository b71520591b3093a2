"""End to end on the real model (SmolLM2-135M-Instruct as packaged) with the drafter that ships: slow, and run by CI."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hspec import SamplingParams, generate, load_drafter, load_target
from hspec.api import make_request
from hspec.decoding.engine import Engine
from hspec.decoding.session import Session
from hspec.evaluation.demo import time_reference
from hspec.targets.sources import load_reference

pytestmark = pytest.mark.real

PROMPTS = [
    "Name three uses of baking soda.",
    "Write a haiku about winter.",
    "What causes the seasons?",
    "Translate 'good morning' into French, Spanish and German.",
    "Write a SQL query that counts the orders of each customer.",
    "Explain recursion to a child.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "How many minutes are there in a week? Show your work.",
    "Give me a recipe for tomato soup.",
    "What is the difference between a virus and a bacterium?",
    "Write a bash loop that renames all .txt files to .md.",
    "Who wrote The Origin of Species, and when?",
    "List five animals that hibernate.",
    "Draft a tweet that announces a bake sale.",
    "Why do cats purr?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Write a short dialogue between a pirate and a librarian.",
    "What are the primary colours?",
    "Explain what an index fund is.",
    "Give two arguments for and two against remote work.",
]


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2")


@pytest.fixture(scope="module")
def drafter(target):
    return load_drafter(None, target)


@pytest.fixture(scope="module")
def reference():
    return load_reference("smollm2")[0]


def test_logits_agree_with_transformers_at_one_row_and_at_many(target, reference, record_property):
    ids = torch.tensor([target.template.encode([{"role": "user", "content": " ".join(PROMPTS)}])])
    with torch.no_grad():
        expected = reference(ids).logits[0]
    cache = target.new_cache(1, ids.shape[1] + 8)
    many = target.logits(target.forward(ids, cache).hidden)[0]
    split = ids.shape[1] - 9
    cache.advance([split])
    rows = []
    for start, stop in ((split, split + 1), (split + 1, split + 9)):  # one row, then eight
        rows.append(target.logits(target.forward(ids[:, start:stop], cache).hidden)[0])
        cache.advance([stop - start])
    worst = max(float((many - expected).abs().max()), float((torch.cat(rows) - expected[split:]).abs().max()))
    record_property("largest logit difference", worst)
    assert worst < 2e-4


def test_greedy_equals_transformers_generate_token_for_token(target, drafter, reference):
    params = SamplingParams(max_tokens=40)
    singles = [generate(target, prompt, drafter, params=params)[0].tokens for prompt in PROMPTS]
    for prompt, tokens in zip(PROMPTS, singles, strict=True):
        request = make_request(target, prompt, params)
        expected, _ = time_reference(reference, list(request.prompt), 40, sorted(target.eos_ids))
        assert tokens == expected, prompt
    batched = generate(target, PROMPTS, drafter, k=2, params=params)
    assert [r.tokens for r in batched] == singles
    plain = generate(target, PROMPTS, params=params)
    assert [r.tokens for r in plain] == singles


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(target, drafter):
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=5)
    batch = generate(target, PROMPTS[:6], drafter, params=params)
    for prompt, result in zip(PROMPTS[:6], batch, strict=True):
        assert generate(target, prompt, drafter, params=params)[0].tokens == result.tokens


def test_the_shipped_drafter_earns_its_keep(target, drafter):
    """Acceptance does not depend on the machine: a drafter or a seam that broke shows here."""
    requests = [make_request(target, prompt, SamplingParams(max_tokens=64)) for prompt in PROMPTS]
    results = Engine(target, drafter).generate(requests)
    emitted = sum(r.counters.emitted for r in results)
    steps = sum(r.counters.steps for r in results)
    assert emitted / steps > 1.4


def test_a_conversation_keeps_its_cache(target, drafter):
    params = SamplingParams(max_tokens=16)
    session = Session(target, drafter)
    list(session.ask("My name is Ada. Say hello.", params))
    kept = len(session.cached)
    answer = "".join(step.text for step in session.ask("What is my name?", params))
    assert len(session.cached) > kept > 0
    whole = generate(target, session.messages[:-1], drafter, params=params)[0]
    assert answer == whole.text


def test_the_command_line_prints_one_json_object():
    command = [sys.executable, "-m", "hspec.cli", "generate", "Name a colour.", "--max-tokens", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert {"text", "token_ids", "steps", "tau", "finish_reason"} <= answer.keys()


def test_the_readme_example_runs():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})

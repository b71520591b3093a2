"""The served model as its users meet it: 'hspec serve', OpenAI's protocol, many clients at once, some of which hang up."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hspec import SamplingParams, generate, load_target
from hspec.serving.metrics import read_metrics
from hspec.serving.server import server
from tests.test_real import PROMPTS

pytestmark = pytest.mark.serve

TOKENS, CLIENTS = 32, 64


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    target = load_target("smollm2")
    results = generate(target, PROMPTS[:8], params=SamplingParams(max_tokens=TOKENS))
    return {prompt: result.text for prompt, result in zip(PROMPTS, results, strict=False)}


def post(address: str, prompt: str, **changes: Any) -> Any:
    body = {"model": "smollm2-135m-instruct-q4", "messages": [{"role": "user", "content": prompt}]}
    body |= {"temperature": 0, "max_tokens": TOKENS} | changes
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def answer(address: str, prompt: str, **changes: Any) -> str:
    with post(address, prompt, **changes) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def hang_up(address: str, prompt: str) -> None:
    """Read the beginning of a long answer, then close the connection."""
    with post(address, prompt, stream=True, max_tokens=400, ignore_eos=True) as response:
        for _ in range(6):
            response.readline()


def test_a_storm_of_clients(expected, tmp_path):
    prompts = list(expected)
    with server(["smollm2", "--max-model-len", "2048", "--max-num-seqs", "16"], tmp_path / "log") as address:
        assert answer(address, prompts[0]) == expected[prompts[0]]

        def client(i: int) -> str | None:
            prompt = prompts[i % len(prompts)]
            return hang_up(address, prompt) if i % 4 == 3 else answer(address, prompt)

        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(client, range(CLIENTS)))
        for i, text in enumerate(answers):
            assert text is None or text == expected[prompts[i % len(prompts)]]

        end = time.monotonic() + 60
        while read_metrics(address).running and time.monotonic() < end:
            time.sleep(0.5)
        left = read_metrics(address)
        assert left.running == left.waiting == 0
        assert left.kv_usage == 0  # nothing leaks
        assert sum(left.accepted) > 0

        with pytest.raises(urllib.error.HTTPError) as refusal:
            answer(address, prompts[0], logit_bias={"5": 3})
        assert refusal.value.code == 400 and "speculative decoding" in refusal.value.read().decode()
        assert answer(address, prompts[1]) == expected[prompts[1]]  # healthy

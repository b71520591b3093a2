"""``python -m hspec.serving.demo``: start a server, ask it something as any client would, read its counters, stop it."""

from __future__ import annotations

import time

from hspec.cache_folder import cache_folder
from hspec.serving.metrics import KVWatcher, read_metrics
from hspec.serving.server import server

PROMPT = "Explain in three sentences why the sky is blue."


def main(target: str = "smollm2") -> None:
    from openai import OpenAI

    print(f"Starting vLLM with {target} and its drafter (half a minute or more) ...", flush=True)
    with server([target, "--max-model-len", "2048"], cache_folder() / "logs" / "serve-demo.log") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        model = client.models.list().data[0].id
        began = time.monotonic()
        with KVWatcher(lambda: read_metrics(address), 0.1) as watcher:
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=128
            )
        seconds = time.monotonic() - began
        metrics = read_metrics(address)
    tokens = answer.usage.completion_tokens if answer.usage else 0
    print(f"\n> {PROMPT}\n\n{answer.choices[0].message.content}\n")
    print(f"{tokens} tokens in {seconds:.1f} s; tau {metrics.tau or 1.0:.2f} over {metrics.drafts} verification steps")
    print(
        f"KV cache: {metrics.kv_tokens:,} tokens fit, {max(watcher.seen, default=0.0):.1%} in use at most; the drafter's own share is 0"
    )


if __name__ == "__main__":
    main()

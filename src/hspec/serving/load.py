"""Putting a server under load: ``vllm bench serve`` drives it, its metrics are watched meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspec.errors import HSpecError
from hspec.files import reason
from hspec.serving.metrics import KVWatcher, read_metrics

VLLM_BENCH = (sys.executable, "-m", "hspec.serving.launch", "bench", "serve")


@dataclass(frozen=True)
class Load:
    """What clients ask of a server."""

    prompts: Path
    """JSONL with ``prompt`` in each line, the first ``requests`` of which are sent in their order."""
    requests: int
    concurrency: int
    """Requests that are under way at once."""
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    """Every answer has ``max_tokens`` tokens, so that servers do the same work."""


@dataclass(frozen=True)
class LoadResult:
    """What came of it; times in milliseconds."""

    seconds: float
    completed: int
    failed: int
    output_tokens: int
    throughput: float
    """Output tokens a second."""
    ttft: float
    """Median time to the first token."""
    itl: float
    """Median time from one piece of a stream to the next: with drafts a piece has several tokens."""
    tpot: float
    """Median time a token behind the first one."""
    kv_peak: float
    """The highest KV usage that was seen, 0 .. 1."""
    kv_mean: float
    kv_tokens: int
    preemptions: int
    tau: float | None
    acceptance: list[float | None]
    """Conditional, by position."""


def put_under_load(url: str, model: str, tokenizer: str, load: Load, bench: Sequence[str], work: Path) -> LoadResult:
    """
    Args:
        url: of the server. model: the name under which it serves. tokenizer: a folder, which counts tokens.
        bench: the command that is ``vllm bench serve``. work: a folder for what that writes.

    Raises:
        HSpecError: the load could not be driven, or not every request was answered.
    """
    work.mkdir(parents=True, exist_ok=True)
    before = read_metrics(url)
    with KVWatcher(lambda: read_metrics(url)) as watcher:
        found = _drive(url, model, tokenizer, load, bench, work)
    now = read_metrics(url).since(before)
    result = LoadResult(
        seconds=found["duration"], completed=found["completed"], failed=found["failed"],
        output_tokens=found["total_output_tokens"], throughput=found["output_throughput"], ttft=found["median_ttft_ms"],
        itl=found["median_itl_ms"], tpot=found["median_tpot_ms"], kv_peak=max(watcher.seen, default=0.0),
        kv_mean=sum(watcher.seen) / len(watcher.seen) if watcher.seen else 0.0, kv_tokens=now.kv_tokens,
        preemptions=now.preemptions, tau=now.tau, acceptance=now.conditional_acceptance(),
    )  # fmt: skip
    if result.failed or result.completed != load.requests:
        raise HSpecError(
            f"{url}: {result.completed} of {load.requests} requests were answered at concurrency {load.concurrency}: see the "
            f"server's log"
        )
    return result


def _drive(url: str, model: str, tokenizer: str, load: Load, bench: Sequence[str], work: Path) -> dict[str, Any]:
    result, log = work / "bench.json", work / "bench.log"
    result.unlink(missing_ok=True)
    arguments = {
        "base-url": url, "model": model, "tokenizer": tokenizer, "dataset-name": "custom", "dataset-path": load.prompts,
        "custom-output-len": load.max_tokens, "num-prompts": load.requests, "max-concurrency": load.concurrency,
        "temperature": load.temperature, "seed": load.seed, "result-dir": work, "result-filename": result.name,
    }  # fmt: skip
    flags = ["--save-result", "--disable-shuffle", "--disable-tqdm", *(["--ignore-eos"] if load.ignore_eos else [])]
    command = [*bench, *(part for name, value in arguments.items() for part in (f"--{name}", str(value))), *flags]
    try:
        with log.open("wb") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        if code == 0:
            return json.loads(result.read_text(encoding="utf-8"))
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise HSpecError(f"vllm bench serve ended with {code}: {lines[-1] if lines else 'no word'} (all of it is in {log})")
    except (OSError, ValueError) as error:
        raise HSpecError(f"vllm bench serve left no result in {result} ({reason(error)}): see {log}") from error

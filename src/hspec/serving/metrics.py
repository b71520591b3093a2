"""What a vLLM server counts, read from its ``/metrics``, and a watcher that looks often while it is under load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import requests

from hspec.errors import HSpecError
from hspec.files import reason


@dataclass(frozen=True)
class Metrics:
    """At one moment; counters run from the server's start."""

    running: int
    """Requests in the batch ..."""
    waiting: int
    """... and those that wait for a place in it."""
    kv_usage: float
    """Share of the KV blocks that requests hold, 0 .. 1."""
    kv_tokens: int
    """Tokens that the KV blocks have room for."""
    preemptions: int
    drafts: int
    """Drafts put to the test: one a request and step."""
    accepted: tuple[int, ...]
    """Accepted draft tokens by position, empty without speculation."""

    @property
    def tau(self) -> float | None:
        """Mean accepted length since the start, the bonus token included; None without drafts."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None

    def since(self, before: Metrics) -> Metrics:
        """The same with counters from ``before`` on."""
        earlier = before.accepted or (0,) * len(self.accepted)
        return replace(
            self,
            preemptions=self.preemptions - before.preemptions,
            drafts=self.drafts - before.drafts,
            accepted=tuple(a - b for a, b in zip(self.accepted, earlier, strict=True)),
        )

    def conditional_acceptance(self) -> list[float | None]:
        """Of each position: accepted by reached; None where nothing was reached."""
        reached = (self.drafts, *self.accepted)  # the last one has none behind it
        return [a / r if r else None for a, r in zip(self.accepted, reached, strict=False)]


def parse_metrics(text: str) -> Metrics:
    """Read Prometheus' text format; engines of a data-parallel server are added up, their KV usage averaged.

    Raises:
        HSpecError: these are not vLLM's metrics.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise HSpecError("reading a server's metrics needs prometheus-client: pip install 'hspec[vllm]'") from error
    sums: dict[str, float] = {}
    engines: set[str] = set()
    positions: dict[int, float] = {}
    kv_tokens = 0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "vllm:cache_config_info":
                    kv_tokens += _kv_tokens(sample.labels)
                elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                    position = int(sample.labels["position"])
                    positions[position] = positions.get(position, 0.0) + sample.value
                elif sample.name.startswith("vllm:"):
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                    if sample.name == "vllm:kv_cache_usage_perc":
                        engines.add(sample.labels.get("engine", ""))
        return Metrics(
            running=int(sums["vllm:num_requests_running"]),
            waiting=int(sums["vllm:num_requests_waiting"]),
            kv_usage=sums["vllm:kv_cache_usage_perc"] / len(engines),
            kv_tokens=kv_tokens,
            preemptions=int(sums["vllm:num_preemptions_total"]),
            drafts=int(sums.get("vllm:spec_decode_num_drafts_total", 0)),
            accepted=tuple(int(positions[p]) for p in sorted(positions)),
        )
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise HSpecError(f"these are not the metrics of a vLLM server ({error!r})") from error


def _kv_tokens(labels: dict[str, str]) -> int:
    """vLLM's own count: with several KV groups (a drafter's, say) it is not blocks by block size."""
    tokens, blocks = (labels.get(name, "None") for name in ("kv_cache_size_tokens", "num_gpu_blocks"))
    if tokens != "None":
        return int(tokens)
    return 0 if blocks == "None" else int(blocks) * int(labels["block_size"])


def read_metrics(url: str) -> Metrics:
    """
    Args:
        url: of the server, without a path.

    Raises:
        HSpecError: it does not answer, or is no vLLM server.
    """
    try:
        reply = requests.get(f"{url}/metrics", timeout=20)
        reply.raise_for_status()
    except requests.RequestException as error:
        raise HSpecError(f"{url}/metrics cannot be read: {reason(error)}") from error
    return parse_metrics(reply.text)


class KVWatcher:
    """Looks at a server's KV usage in a thread of its own, as long as the context lasts.

    Args:
        read: gives the server's metrics. seconds: between two looks.
    """

    def __init__(self, read: Callable[[], Metrics], seconds: float = 0.25):
        self.read, self.seconds = read, seconds
        self.seen: list[float] = []
        """KV usage at every look with a request in the batch."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> KVWatcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.seconds):
            try:
                now = self.read()
            except HSpecError:
                continue  # one look less; a server that is gone is noticed by whoever waits for its answers
            if now.running:
                self.seen.append(now.kv_usage)

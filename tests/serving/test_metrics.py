from __future__ import annotations

import itertools
import threading

import pytest

from hspec.errors import HSpecError
from hspec.serving.metrics import KVWatcher, Metrics, parse_metrics, read_metrics
from tests.serving.exposition import exposition, metrics_server


def test_a_server_that_drafts():
    found = parse_metrics(exposition(running=3, usage=0.25, preemptions=2, drafts=10, accepted=(6, 3, 0)))
    assert found == Metrics(running=3, waiting=1, kv_usage=0.25, kv_tokens=1024, preemptions=2, drafts=10, accepted=(6, 3, 0))
    assert found.tau == pytest.approx(1.9) and found.conditional_acceptance() == pytest.approx([0.6, 0.5, 0.0])


def test_a_server_that_does_not():
    found = parse_metrics(exposition(usage=0.5))
    assert found.tau is None and found.accepted == () and found.conditional_acceptance() == []


def test_room_is_as_vllm_counts_it():
    assert parse_metrics(exposition(tokens="700")).kv_tokens == 700  # 64 blocks of 16 are shared by several KV groups
    assert parse_metrics(exposition(blocks="None")).kv_tokens == 0


def test_nothing_reached_has_no_acceptance():
    assert Metrics(0, 0, 0.0, 0, 0, 4, (0, 0)).conditional_acceptance() == [0.0, None]


def test_two_engines_are_one_server():
    text = exposition(running=1, usage=0.2, preemptions=1) + "\n".join(
        line for line in exposition(running=2, usage=0.6, preemptions=4, engine="1").splitlines() if not line.startswith("#")
    )
    found = parse_metrics(text + "\n")
    assert (found.running, found.preemptions, found.kv_tokens) == (3, 5, 2048) and found.kv_usage == pytest.approx(0.4)


def test_counters_from_a_moment_on():
    before = Metrics(1, 0, 0.9, 64, 2, 10, (6, 3))
    now = Metrics(0, 0, 0.1, 64, 5, 30, (16, 8))
    assert now.since(before) == Metrics(0, 0, 0.1, 64, 3, 20, (10, 5))
    assert now.since(Metrics(0, 0, 0.0, 64, 0, 0, ())) == now  # positions appear with the first draft


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>", exposition().replace("vllm:", "other:"), exposition(blocks="many")])
def test_what_is_no_vllm_server(text):
    with pytest.raises(HSpecError, match="not the metrics of a vLLM server"):
        parse_metrics(text)


def test_reading_over_http():
    with metrics_server(lambda: exposition(usage=0.5)) as url:
        assert read_metrics(url).kv_usage == 0.5
        with pytest.raises(HSpecError, match=r"/nowhere/metrics cannot be read: 404"):
            read_metrics(f"{url}/nowhere")
    with pytest.raises(HSpecError, match=rf"{url}/metrics cannot be read"):
        read_metrics(url)


def test_the_watcher_looks_while_requests_run_and_survives_silence():
    usages = itertools.chain([(0, 0.0), (2, 0.5), None, (1, 0.75), (0, 0.0)], itertools.repeat((0, 0.0)))
    done = threading.Event()

    def read() -> Metrics:
        found = next(usages)
        if found is None:
            raise HSpecError("silence")
        if found == (0, 0.0) and watcher.seen:
            done.set()
        return Metrics(found[0], 0, found[1], 64, 0, 0, ())

    watcher = KVWatcher(read, seconds=0.001)
    with watcher:
        assert done.wait(20)
    assert watcher.seen == [0.5, 0.75]

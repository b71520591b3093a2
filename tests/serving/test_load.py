from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hspec.errors import HSpecError
from hspec.serving.load import Load, put_under_load
from tests.serving.exposition import exposition, metrics_server

BENCH = """
import json, sys, time
args = {}
words = sys.argv[1:]
for i, word in enumerate(words):
    if word.startswith("--") and i + 1 < len(words) and not words[i + 1].startswith("--"):
        args[word[2:]] = words[i + 1]
what = args["model"]
if what == "breaks":
    print("first line"); print("ValueError: no such thing"); sys.exit(3)
if what == "silent":
    sys.exit(0)
time.sleep(0.8)
requests = int(args["num-prompts"])
failed = 1 if what == "fails" else 0
with open(args["result-dir"] + "/" + args["result-filename"], "w") as file:
    json.dump({"duration": 2.0, "completed": requests - failed, "failed": failed, "total_output_tokens": 64, "words": words,
               "output_throughput": 32.0, "median_ttft_ms": 5.0, "median_itl_ms": 6.0, "median_tpot_ms": 3.0}, file)
"""


@pytest.fixture
def drive(tmp_path):
    """Puts a made-up server under the load of a made-up bench: what the real ones say is tested where they are installed."""
    script = tmp_path / "bench.py"
    script.write_text(BENCH)
    looks = []

    def say() -> str:
        looks.append(1)
        busy = len(looks) in (2, 3)
        drafts = 4 if len(looks) == 1 else 14
        return exposition(running=busy, usage=0.5 * busy, preemptions=len(looks) > 1, drafts=drafts, accepted=(drafts // 2, 2))

    def run(model: str = "a", **changes):
        load = Load(**{"prompts": tmp_path / "prompts.jsonl", "requests": 3, "concurrency": 2, "max_tokens": 16, **changes})
        with metrics_server(say) as url:
            return put_under_load(url, model, "tokenizer", load, [sys.executable, str(script)], tmp_path / "work")

    return run


def test_what_comes_of_a_load(drive, tmp_path: Path):
    found = drive(temperature=0.7, seed=5)
    assert (found.seconds, found.completed, found.failed, found.throughput) == (2.0, 3, 0, 32.0)
    assert (found.ttft, found.itl, found.tpot, found.output_tokens) == (5.0, 6.0, 3.0, 64)
    assert (found.kv_peak, found.kv_mean, found.kv_tokens, found.preemptions) == (0.5, 0.5, 1024, 1)
    assert found.tau == pytest.approx(1 + 5 / 10) and found.acceptance == pytest.approx(
        [0.5, 0.0]
    )  # counted from this load's start
    words = json.loads((tmp_path / "work" / "bench.json").read_text())["words"]
    for name, value in {"--max-concurrency": "2", "--custom-output-len": "16", "--temperature": "0.7", "--seed": "5"}.items():
        assert words[words.index(name) + 1] == value
    assert {"--ignore-eos", "--disable-shuffle", "--save-result"} <= set(words)


def test_answers_may_end_by_themselves(drive, tmp_path: Path):
    drive(ignore_eos=False)
    assert "--ignore-eos" not in json.loads((tmp_path / "work" / "bench.json").read_text())["words"]


def test_a_bench_that_breaks(drive):
    with pytest.raises(HSpecError, match=r"ended with 3: ValueError: no such thing \(all of it is in .*bench\.log\)"):
        drive("breaks")


def test_a_bench_that_says_nothing(drive):
    with pytest.raises(HSpecError, match=r"left no result in .*bench\.json"):
        drive("silent")


def test_a_request_without_an_answer(drive):
    with pytest.raises(HSpecError, match="2 of 3 requests were answered at concurrency 2"):
        drive("fails")

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.throughput import NONE, RUNS_FILE, Entrant, Plan, bench, read_runs, sentences, summarise, write_bench
from hspec.serving.load import Load, LoadResult
from tests.evaluation.browser import check_page

PLAN = Plan(
    target="a", concurrency=[1, 4], requests=8, rounds=3, max_tokens=16, temperature=0.0, k=2, seed=0, prompts="p",
    prompts_hash="0", input_tokens=90.0,
    server=["--x"],
)  # fmt: skip
PROMPTS = ["one", "two"]
ENTRANTS = [Entrant(NONE, ()), Entrant("hspec", ("--draft",), "folder <of> one")]


def result(throughput: float, drafts: bool = False, tokens: int = 1000, **changes) -> LoadResult:
    values = {
        "seconds": 1.0, "completed": 8, "failed": 0, "output_tokens": 128, "throughput": throughput, "ttft": 1.0, "itl": 2.0,
        "tpot": 3.0, "kv_peak": 0.5, "kv_mean": 0.25, "kv_tokens": tokens, "preemptions": 0, "tau": 1.5 if drafts else None,
        "acceptance": [0.5, None] if drafts else [],
    }  # fmt: skip
    return LoadResult(**(values | changes))


class Servers:
    """Starts nothing, and remembers what it was asked for."""

    def __init__(self, fail_at: int = 0):
        self.asked: list[tuple[str, int]] = []
        self.started: list[str] = []
        self.running = 0
        self.fail_at = fail_at

    @contextmanager
    def start(self, entrant: Entrant):
        assert self.running == 0  # one server at a time
        self.running += 1
        self.started.append(entrant.name)

        def drive(load: Load, work: Path) -> LoadResult:
            self.asked.append((entrant.name, load.concurrency))
            if len(self.asked) == self.fail_at:
                raise HSpecError("the server is gone")
            fast = 2.0 if entrant.arguments else 1.0
            return result(fast * load.concurrency * (10 + len(self.asked)), bool(entrant.arguments))

        try:
            yield drive
        finally:
            self.running -= 1


def run(servers: Servers, out: Path, plan: Plan = PLAN, entrants=ENTRANTS):
    return bench(entrants, plan, PROMPTS, out, servers.start, lambda _: None)


def test_rounds_take_turns(tmp_path: Path):
    servers = Servers()
    runs = run(servers, tmp_path)
    assert servers.started == [NONE, "hspec"] * 3
    assert servers.asked == [(NONE, 1), (NONE, 4), ("hspec", 1), ("hspec", 4)] * 3
    assert read_runs(tmp_path) == runs and len(runs) == 12


def test_it_goes_on_where_it_was_cut_off(tmp_path: Path):
    with pytest.raises(HSpecError, match="the server is gone"):
        run(Servers(fail_at=6), tmp_path)
    assert len(read_runs(tmp_path)) == 5
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write('{"round": 1, "meth')  # a write that was cut short
    servers = Servers()
    runs = run(servers, tmp_path)
    assert servers.asked == [(NONE, 4), *[("hspec", 1), ("hspec", 4)], *[(NONE, 1), (NONE, 4), ("hspec", 1), ("hspec", 4)]]
    assert len(runs) == 12 and read_runs(tmp_path) == runs
    again = Servers()
    assert run(again, tmp_path) == runs and again.started == []


def test_other_settings_are_another_bench(tmp_path: Path):
    run(Servers(), tmp_path)
    sent = (tmp_path / "prompts.jsonl").read_text()
    assert [json.loads(line)["prompt"] for line in sent.splitlines()] == PROMPTS
    with pytest.raises(UsageError, match=r"other settings \(prompts_hash\)"):
        bench(ENTRANTS, PLAN.model_copy(update={"prompts_hash": "1"}), ["three"], tmp_path, Servers().start, lambda _: None)
    assert (tmp_path / "prompts.jsonl").read_text() == sent  # nothing is lost
    with pytest.raises(UsageError, match=r"other settings \(requests\): choose another --out"):
        run(Servers(), tmp_path, PLAN.model_copy(update={"requests": 9}))
    with pytest.raises(UsageError, match=r"other settings \(hspec\)"):
        run(Servers(), tmp_path, entrants=[ENTRANTS[0], Entrant("hspec", ("--draft",), "another")])


def test_medians_and_ratios_within_a_round(tmp_path: Path):
    found = summarise(run(Servers(), tmp_path))
    # none at 1: calls 1, 5, 9; hspec at 1: calls 3, 7, 11
    cell = found["hspec"]["1"]
    assert found[NONE]["1"]["throughput"] == 15 and cell["throughput"] == 34 and cell["rounds"] == 3
    assert cell["ratios"] == pytest.approx([26 / 11, 34 / 15, 42 / 19]) and cell["ratio"] == pytest.approx(34 / 15)
    assert (cell["tau"], cell["acceptance"], cell["kv_tokens"]) == (1.5, [0.5, None], 1000)
    assert found[NONE]["1"]["tau"] is None and found[NONE]["1"]["ratio"] == 1


def test_without_a_plain_server_there_is_no_ratio(tmp_path: Path):
    found = summarise(run(Servers(), tmp_path, entrants=ENTRANTS[1:]))
    assert found["hspec"]["4"]["ratio"] is None and sentences(found) == []


def test_sentences_say_what_a_cache_costs(tmp_path: Path):
    runs = run(Servers(), tmp_path)
    said = sentences(summarise(runs))
    assert said[1] == "hspec: the KV blocks have room for 1,000 tokens, as many as without drafts."
    smaller = [
        r if r.method == NONE else type(r)(r.round, r.method, r.concurrency, r.busy, result(1.0, True, 900)) for r in runs
    ]
    assert "room for 900 tokens, -10.0 % against without drafts" in sentences(summarise(smaller))[1]


def test_the_page_and_the_numbers(tmp_path: Path):
    run(Servers(), tmp_path)
    found = write_bench(tmp_path)
    assert json.loads((tmp_path / "serving.json").read_text()) == json.loads(json.dumps(found))
    page = (tmp_path / "serving.html").read_text()
    assert found["load_average"][0] <= found["load_average"][1] and "load average" in page
    assert page.count("<svg") == 7 and "folder &lt;of&gt; one" in page and "src=" not in page


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(tmp_path: Path, width: int, dark: bool):
    run(Servers(), tmp_path)
    write_bench(tmp_path)
    check_page((tmp_path / "serving.html").read_text(encoding="utf-8"), tmp_path, width, dark)


def test_a_folder_without_a_bench(tmp_path: Path):
    with pytest.raises(UsageError, match="has no bench"):
        write_bench(tmp_path)
    run(Servers(), tmp_path)
    (tmp_path / RUNS_FILE).write_text('{"round": 1}\n')
    with pytest.raises(HSpecError, match=r"runs\.jsonl: line 1 is not a run"):
        write_bench(tmp_path)
    (tmp_path / RUNS_FILE).unlink()
    with pytest.raises(UsageError, match="has no run of a bench yet"):
        write_bench(tmp_path)

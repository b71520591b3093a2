"""docs/results.md is what its template makes of the files beside it, and those are what was measured."""

import json
from pathlib import Path

import pytest

from hspec.decoding.params import SamplingParams
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import UsageError
from hspec.evaluation.harness import AR, Contender, Setting, evaluate
from hspec.evaluation.setup import write_summary
from hspec.evaluation.tasks.task import Task, TaskPrompt
from hspec.targets.target import Target
from tests.test_benchmarks import script

TASKS = [Task("talk", (TaskPrompt("1", ("one two",)), TaskPrompt("2", ("three",))))]


def test_the_page_is_up_to_date() -> None:
    page = script("results_page")
    assert page.render() == page.PAGE.read_text(encoding="utf-8"), "run: python benchmarks/results_page.py render"


def test_what_is_kept_of_an_evaluation(target: Target, drafter: ParallelDrafter, tmp_path: Path) -> None:
    page = script("results_page")
    contenders = [Contender(AR), Contender("mine", drafter, 3, "hspec"), Contender("shorter", drafter, 2, "hspec")]
    evaluate(target, contenders, TASKS, [Setting("greedy", SamplingParams(max_tokens=9))], tmp_path)
    summary = write_summary(tmp_path)
    kept = page.collect(tmp_path)
    own = summary["settings"]["greedy"]["entrants"]["mine"]
    assert kept["settings"]["greedy"]["entrants"]["mine"]["tau"]["value"] == pytest.approx(own["tau"]["value"], rel=1e-5)
    found = kept["settings"]["greedy"]
    rows = page.by_task(found).splitlines()
    assert rows[0] == "| task | prompts | mine | shorter |" and rows[2].startswith("| talk | 2 | ") and len(rows) == 4
    speeds = page.by_task(found, "speedup").splitlines()
    assert speeds[0] == rows[0] and speeds[2].startswith("| talk | 2 | ") and speeds[2] != rows[2]
    assert page.pairs(found, "mine").count("mine / shorter") == 1 and page.pairs(found, "shorter").count("/") == 0
    assert page.acceptance(page.drafting(found, 2)).splitlines()[2].startswith("| shorter | 0.")
    assert page.means(kept).splitlines()[0] == "| drafter | tau, greedy |"
    (tmp_path / "rows.jsonl").write_text('{"a": 0.123456789, "name": "/here"}\n{"a": [1]}\n')
    assert page.collect(tmp_path / "rows.jsonl") == [{"a": 0.123457}, {"a": [1]}]
    with pytest.raises(UsageError, match="not the folder of a study, an evaluation or a bench"):
        page.collect(tmp_path / "gone")


def test_an_unfinished_study(tmp_path: Path) -> None:
    """What is done counts, by its last validation; a method without a confidence head has no calibration."""
    page = script("results_page")
    (tmp_path / "study.yaml").write_text("entries: [{method: hspec}, {method: dflash, seeds: [0, 1]}]\n")

    def log(name: str, step: int, **more: object) -> None:
        record = {
            "kind": "held-out", "step": step, "steps": 2, "blocks": 100 * step, "core_seconds": 5.0 * step, "loss": 2.0,
            "tau_sampling": 1 + step / 10, "tau_greedy": 1.0, "conditional": {"sampling": [0.5, None]}, **more,
        }  # fmt: skip
        place = tmp_path / "drafters" / name / "log.jsonl"
        place.parent.mkdir(parents=True, exist_ok=True)
        (place.parent / "drafter.safetensors").touch()
        with place.open("a") as file:
            file.write(json.dumps(record) + "\n")

    log("hspec-0", 1)
    log("hspec-0", 2, calibration={"ece": 0.02})
    log("dflash-0", 2)
    log("dflash-1", 1)
    study = page.collect(tmp_path)
    assert study["trainings"] == 3 and [(r["label"], r["seed"]) for r in study["runs"]] == [("hspec", 0), ("dflash", 0)]
    assert study["runs"][0]["course"] == [[100, 5.0, 1.1], [200, 10.0, 1.2]] and study["evaluation"] is None
    rows = page.trainings(study).splitlines()
    assert rows[2] == "| hspec | 0 | 18.9 M | 200 | 0.2 | 20 | 2.000 | 1.200 | 1.000 | 0.020 |"
    assert rows[3].endswith("| 1.000 | - |") and page.first_seeds(study) == "dflash 1.200, hspec 1.200"
    assert page.first_seeds(study, ("hspec", "gone")) == "hspec 1.200" and page.estimate(study, "dflash", 0) == 1.2
    assert page.courses(study, (0.25, 0.75)).splitlines()[0] == "| training | 25% of the blocks | 75% of the blocks |"
    assert page.courses(study, (0.25, 0.75)).splitlines()[2] == "| hspec 0 | 1.050 | 1.150 |"
    assert page.positions(study).splitlines()[2] == "| hspec 0 | 0.500 | - |"


def test_seeds_beside_each_other() -> None:
    """Means and ranges; pairs are of one seed, and time is that of the quickest training."""
    page = script("results_page")

    def run(label: str, seed: int, seconds: float, tau: float) -> dict[str, object]:
        return {"label": label, "seed": seed, "core_seconds": seconds, "tau": tau, "course": [[100, seconds, tau]]}

    study = {
        "runs": [run("a", 0, 10, 1.4), run("a", 1, 10, 1.5), run("b", 0, 20, 1.4), run("b", 1, 20, 1.2), run("c", 0, 10, 1.1)]
    }
    assert page.ahead_by(study, "a", "b") == pytest.approx(0.15) and page.ahead_by(study, "a", "c") == pytest.approx(0.3)
    rows = page.over_seeds(study, "a").splitlines()[2:]
    assert rows == [
        "| a | 2 | 1.450 (1.400 .. 1.500) | - | 1.450 (1.400 .. 1.500) | - |",
        "| b | 2 | 1.300 (1.200 .. 1.400) | 0.150 (0.000 .. 0.300) | 1.150 (1.100 .. 1.200) | 0.300 (0.200 .. 0.400) |",
        "| c | 1 | 1.100 | 0.300 | 1.100 | 0.300 |",
    ]


def test_a_bench_and_costs(tmp_path: Path) -> None:
    page = script("results_page")

    def cell(throughput: float, ratios: list[float], tau: float | None) -> dict[str, object]:
        return {"throughput": throughput, "ratio": ratios[0] if ratios else None, "ratios": ratios, "tau": tau, "kv_peak": 0.5,
                "kv_tokens": 4480, "preemptions": 2, "rounds": max(1, len(ratios)),
                "throughput_all": [throughput, throughput + 1]}  # fmt: skip

    methods = {
        "none": {"1": cell(20, [], None)},
        "hspec": {"1": cell(30, [1.5, 1.4, 1.6], 1.87)},
        "ngram": {"1": cell(10, [0.5], None)},
    }
    (tmp_path / "serving.json").write_text(json.dumps({"plan": {}, "entrants": {"hspec": "/here"}, "methods": methods}))
    bench = page.collect(tmp_path)
    assert set(bench) == {"plan", "methods"}, "where drafters lie is nobody's business"
    assert page.throughputs(bench).splitlines()[0] == "| at once | none | hspec | ngram |"
    assert (
        page.throughputs(bench).splitlines()[2]
        == "| 1 | 20.0 | 30.0 (1.50x, 1.40 .. 1.60; tau 1.87) | 10.0 (0.50x, 0.50 .. 0.50) |"
    )
    assert page.leads(bench, "hspec", ("none", "ngram")) == "1" and page.leads(bench, "none", ("hspec",)) == "no concurrency"
    assert page.rounds(bench) == "1 to 3 rounds"
    assert page.rooms(bench).splitlines()[3] == "| hspec | 4,480 | 50 %, 2 |"
    costs = {"drafting": [
        {"method": "hspec", "concurrency": 1, "length": 512, "inject_ms": 0.0, "total_ms": 3.0},
        {"method": "dspark", "concurrency": 1, "length": 512, "inject_ms": 1.0, "total_ms": 5.0},
        {"method": "dspark", "concurrency": 1, "length": 1024, "inject_ms": 1.0, "total_ms": 6.0},
    ]}  # fmt: skip
    rows = page.drafting_costs(costs, 512).splitlines()
    assert rows[2:] == ["| hspec | 3.0 |", "| dspark | 5.0 (1.0 of them to inject) |"]
    assert page.growth(costs, "dspark", 1) == pytest.approx(1.2)
    found = [{"rows": n, "length": length, "ms": 10.0 * n + length / 512} for length in (512, 1024) for n in (1, 4)]
    assert page.verification_costs({"verification": found}).splitlines() == [
        "| verifying | 1 row | 4 rows |",
        "| --- | --- | --- |",
        "| 512 tokens | 11.0 | 41.0 |",
        "| 1024 tokens | 12.0 | 42.0 |",
    ]

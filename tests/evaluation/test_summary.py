"""From records to tables: pooled sums, unweighted means, pairs, seeds; and the command from its options to its JSON."""

import json
from pathlib import Path

import numpy as np
import pytest

from hspec import cli
from hspec.errors import UsageError
from hspec.evaluation.records import Record, TurnRecord
from hspec.evaluation.setup import write_summary
from hspec.evaluation.summary import summarise
from tests.saved import loaded, save_drafter_for, save_target


def turn(runs: list[int], draft: float, verify: float) -> TurnRecord:
    k = 3
    accepted = [sum(run > i + 1 for run in runs) for i in range(k)]
    reached = [sum(run > i for run in runs) for i in range(k)]
    n = 1 + sum(runs)
    return TurnRecord(
        question="What?", text="x" * n, pieces=["x"] * n, tokens=[0] * n, drafted="0" * n, runs=runs, refused=[[] for _ in runs],
        refused_text=["" for _ in runs], prompt_tokens=5, finish_reason="stop", looping=False, prefill_seconds=1.0,
        draft_seconds=draft, verify_seconds=verify, reached=reached, accepted=accepted,
    )  # fmt: skip


def record(task: str, id: str, contender: str, runs: list[int], step: float, draft: float = 0.0) -> Record:
    t = turn(runs, draft * len(runs), step * len(runs))
    return Record(
        task=task, id=id, contender=contender, setting="greedy", k=0 if contender == "ar" else 3, turns=[t], peak_bytes=1000,
        drafter_kv_bytes=0,
    )  # fmt: skip


CONTENDERS = {
    "ar": {"method": "ar", "k": 0, "seed": 0},
    "a": {"method": "x", "k": 3, "seed": 0},
    "b": {"method": "y", "k": 3, "seed": 0},
}


def records_of(rng: np.random.Generator, tau: dict[str, float]) -> list[Record]:
    out = []
    for task, prompts in (("math", 20), ("code", 10)):
        for i in range(prompts):
            steps = int(rng.integers(20, 40))
            out.append(record(task, str(i), "ar", [1] * steps, 0.010))
            for name, mean in tau.items():
                runs = rng.choice([1, 2, 3, 4], size=steps, p=_shares(mean)).tolist()
                out.append(record(task, str(i), name, runs, 0.011, 0.003))
    return out


def _shares(mean: float) -> list[float]:
    """Of runs of 1 to 4 tokens, with this mean: only 1 and 4 occur."""
    four = (mean - 1) / 3
    return [1 - four, 0, 0, four]


def test_numbers() -> None:
    found = summarise(records_of(np.random.default_rng(0), {"a": 2.2, "b": 1.6}), CONTENDERS)["greedy"]
    assert found["prompts"] == {"math": 20, "code": 10}
    a, plain = found["entrants"]["a"], found["entrants"]["ar"]
    assert (plain["tau"]["value"], plain["speedup"]["value"]) == (1.0, 1.0)
    assert a["tau"]["value"] == pytest.approx(np.mean([a["tasks"][t]["tau"]["value"] for t in ("math", "code")]))
    assert a["tau"]["low"] < a["tau"]["value"] < a["tau"]["high"]
    assert 2.0 < a["tau"]["value"] < 2.4
    # An AR token takes 10 ms, a step here 14: the speedup is tau over 1.4, and the model's latency is the measured one.
    for task in ("math", "code"):
        assert a["tasks"][task]["speedup"]["value"] == pytest.approx(a["tasks"][task]["tau"]["value"] / 1.4)
    assert (a["draft_ms"], a["verify_ms"]) == pytest.approx((3.0, 11.0))
    assert a["ms_per_token"] == pytest.approx(a["ms_per_token_model"]) == pytest.approx(14 / a["tau_pooled"])
    assert len(a["acceptance"]) == 3 and a["acceptance"][1]["value"] == a["acceptance"][2]["value"] == 1.0
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"], pair["tau_ratio"]["verdict"], pair["speed_ratio"]["verdict"]) == ("a", "b", "ahead", "ahead")
    assert set(pair["tasks"]) == {"math", "code"} and pair["prompts_for_5_percent"] > 2


def test_seeds_of_one_method_are_one_row() -> None:
    rng = np.random.default_rng(1)
    contenders = {
        "ar": CONTENDERS["ar"], "b": CONTENDERS["b"],
        **{f"x{s}": {"method": "x", "k": 3, "seed": s} for s in (1, 2, 3)},
    }  # fmt: skip
    taus = {"b": 1.6, "x1": 2.0, "x2": 2.2, "x3": 2.4}
    found = summarise(records_of(rng, taus), contenders)["greedy"]
    assert list(found["entrants"]) == ["ar", "b", "x (k 3, 3 seeds)"]
    three = found["entrants"]["x (k 3, 3 seeds)"]
    assert three["seeds"] == 3 and 2.1 < three["tau"]["value"] < 2.3
    alone = summarise(
        records_of(np.random.default_rng(1), {"b": 1.6, "x2": 2.2}), {k: contenders[k] for k in ("ar", "b", "x2")}
    )
    width = three["tau"]["high"] - three["tau"]["low"]
    one = alone["greedy"]["entrants"]["x2"]["tau"]
    assert width > 1.1 * (one["high"] - one["low"])


def answered(task: str, id: str, runs: list[int], prompt_tokens: int) -> list[Record]:
    """One prompt, by drafter ``a`` and without one."""
    both = [record(task, id, "ar", [1] * sum(runs), 0.01), record(task, id, "a", runs, 0.01)]
    return [r.model_copy(update={"turns": [r.turns[0].model_copy(update={"prompt_tokens": prompt_tokens})]}) for r in both]


def test_tau_by_position_and_by_input() -> None:
    """Five prompts with 31 tokens in 12 steps and then 6 in 2, four with 4 in 2; the first of each kind belongs to a task of its own."""
    long = [answered("ab"[i > 0], f"long {i}", [3] * 9 + [1, 1, 2] + [3, 3], 100) for i in range(5)]
    short = [answered("ab"[i > 0], f"short {i}", [1, 3], 20) for i in range(4)]
    contenders = {name: CONTENDERS[name] for name in ("ar", "a")}
    found = summarise([r for both in long + short for r in both], contenders)["greedy"]["entrants"]
    first, second = found["a"]["tau_by_position"]
    assert (first["bin"], first["prompts"], first["steps"]) == ("1-32", 9, 5 * 12 + 4 * 2)
    assert first["tau"]["value"] == pytest.approx((5 * 31 + 4 * 4) / (5 * 12 + 4 * 2))
    assert 2.0 <= first["tau"]["low"] < first["tau"]["value"] < first["tau"]["high"] <= 31 / 12
    # All prompts that come so far have the same tau, so that there is nothing to be unsure of.
    same = {"value": 3.0, "low": 3.0, "high": 3.0}
    assert second == {"bin": "33-64", "prompts": 5, "steps": 10, "tau": same}
    few, five = found["a"]["tau_by_input"]
    assert few == {"bin": "<64", "prompts": 4, "steps": 8, "tau": {"value": 2.0, "low": None, "high": None}}
    assert (five["bin"], five["prompts"], five["tau"]["value"]) == ("64-255", 5, pytest.approx(37 / 14))
    assert five["tau"]["low"] == five["tau"]["high"] == pytest.approx(37 / 14)
    assert {b["tau"]["value"] for b in found["ar"]["tau_by_position"] + found["ar"]["tau_by_input"]} == {1.0}


def test_tau_by_origin() -> None:
    """Steps whose first token is in the prompt emit three tokens, others one."""
    records = [r for i in range(5) for r in answered("t", str(i), [3, 1, 3, 1], 20)]
    marks = {"ar": "nnnnnnnnn", "a": "npnnnpnnn"}
    records = [r.model_copy(update={"turns": [r.turns[0].model_copy(update={"origins": marks[r.contender]})]}) for r in records]
    found = summarise(records, {name: CONTENDERS[name] for name in ("ar", "a")})["greedy"]["entrants"]["a"]["tau_by_origin"]
    assert [(b["bin"], b["prompts"], b["steps"], b["tau"]["value"]) for b in found] == [
        ("new", 5, 10, 1.0),
        ("in the prompt", 5, 10, 3.0),
    ]


def test_bins_of_several_seeds() -> None:
    """A prompt counts once however many trainings answered it; sums are of all."""
    records = [
        record("t", str(i), name, runs, 0.01) for i in range(6) for name, runs in (("ar", [1, 1]), ("x1", [1]), ("x2", [3]))
    ]
    contenders = {"ar": CONTENDERS["ar"], **{f"x{s}": {"method": "x", "k": 3, "seed": s} for s in (1, 2)}}
    (found,) = summarise(records, contenders)["greedy"]["entrants"]["x (k 3, 2 seeds)"]["tau_by_input"]
    assert (found["prompts"], found["steps"], found["tau"]["value"]) == (6, 12, 2.0)
    assert (found["tau"]["low"], found["tau"]["high"]) == (1.0, 3.0)


def test_nothing_to_summarise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no evaluation"):
        write_summary(tmp_path)
    (tmp_path / "evaluation.json").write_text(
        json.dumps({"target": {"name": "x"}, "dtype": "float32", "device": "cpu", "contenders": {}})
    )
    with pytest.raises(UsageError, match="holds no answer yet"):
        write_summary(tmp_path)


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    save_target(folder / "target")
    save_drafter_for(loaded(folder / "target"), folder / "drafter")
    (folder / "mine.jsonl").write_text("".join(json.dumps({"id": i, "turns": [f"what is {i}"]}) + "\n" for i in range(4)))
    return folder


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["hspec", "eval", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_command(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    common = [
        "-t",
        place / "target",
        "-d",
        f"mine={place / 'drafter'}",
        "-d",
        "ngram",
        "--tasks",
        place / "mine.jsonl",
        "-n",
        6,
    ]
    code, out, err = run(
        capsys, monkeypatch, *common, "-k", "2,3", "--limit", 3, "--temperature", 0, "--temperature", 1, "--top-p", 0.9, "--out",
        tmp_path / "out", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert list(said["settings"]) == ["greedy", "T=1 top_p=0.9"]
    assert list(said["settings"]["greedy"]["entrants"]) == ["ar", "mine k=2", "mine k=3", "ngram k=2", "ngram k=3"]
    assert said["settings"]["greedy"]["prompts"] == {"mine": 3}
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == said
    assert {"threads", "torch", "load_average"} <= set(said["machine"])
    code, out, _ = run(capsys, monkeypatch, *common, "--out", tmp_path / "table")
    assert code == 0 and "mine against ngram: tau" in out and "prompts" in out


def test_lookup_beside_a_drafter(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of its own in the tables, with the drafter's weights."""
    asked = ["-t", place / "target", "-d", f"mine={place / 'drafter'}", "-d", f"both={place / 'drafter'}+ngram", "-n", 6]
    code, _, err = run(capsys, monkeypatch, *asked, "--tasks", place / "mine.jsonl", "--limit", 2, "--out", tmp_path, "--json")
    assert (code, err) == (0, "")
    about = json.loads((tmp_path / "evaluation.json").read_text())["contenders"]
    assert about["both"]["method"] == about["mine"]["method"] + "+ngram" == "hspec+ngram"
    assert about["both"]["weights"] == about["mine"]["weights"]


def test_another_target_of_the_same_shape(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tune with a chat template of its own, and the drafter as it was: two warnings, and it is measured."""
    tuned = save_target(tmp_path / "tuned", seed=5)
    template = tuned / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    arguments = ["-d", f"old={place / 'drafter'}", "--tasks", place / "mine.jsonl", "-n", 6, "--limit", 2, "--json"]
    code, out, err = run(capsys, monkeypatch, "-t", tuned, *arguments, "--out", tmp_path / "out")
    assert code == 0 and json.loads(out)["settings"]["greedy"]["entrants"]["old"]["tokens"] > 0
    weights, other_template = err.splitlines()
    assert "was trained on other weights" in weights and "was trained under another chat template" in other_template
    wider = save_target(tmp_path / "wider", hidden=64)
    code, out, err = run(capsys, monkeypatch, "-t", wider, *arguments, "--out", tmp_path / "other")
    assert (code, out) == (2, "") and "(hidden_size 48), not for" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "maths"], "no task 'maths': there are math"),
        (["--tasks", ""], "no task is asked for"),
        (["-k", "0"], "-k 0: give whole numbers"),
        (["-k", "99"], "-k 99, but mine was trained for 1 to"),
        (["-d", "mine=gone"], "no drafter at gone"),
        (["-d", "mine=ngram"], "two drafters are called 'mine'"),
        (["--temperature", "-1"], "--temperature"),
        (["--tasks", "long-qa", "--lengths", "10"], "10 tokens are too few"),
    ],
)
def test_bad_input(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    code, out, err = run(
        capsys, monkeypatch, "-t", place / "target", "-d", f"mine={place / 'drafter'}", "--out", tmp_path / "out", *arguments
    )
    assert (code, out) == (2, "") and said in err
    assert not (tmp_path / "out").exists()

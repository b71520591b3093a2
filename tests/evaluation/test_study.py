"""A tiny study end to end: trained piece by piece, stopped and gone on with, measured once all is there."""

import json
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from hspec.cli import main
from hspec.errors import HSpecError, UsageError
from hspec.evaluation import study_run
from hspec.evaluation.study import Piece, Study, claim, read_study
from hspec.evaluation.study_run import _at_time, _Texts, is_done, run_study
from hspec.locks import alone
from hspec.training.checkpoints import Checkpoints
from hspec.training.data import prepare_data
from hspec.training.examples import Batch
from hspec.training.features import Features, FeatureSource, Needs
from hspec.training.job import shape
from hspec.training.plan import run_flops
from hspec.training.sources import SourceConfig
from hspec.training.trainer import Trainer
from tests.saved import held_out_numbers, save_target, write_exchanges

SETTINGS: dict[str, Any] = {
    "job": {
        "preset": "{place}/shape.yaml", "own_answers": False,
        "train": {"steps": 3, "batch_tokens": 200, "growth": [{"start": 0, "slots": 3, "density": 0.5}], "warmup_steps": 1},
    },
    "entries": [{"method": "hspec", "seeds": [0, 1]}, {"method": "dflash"}],
    "measure": {"tasks": ["qa"], "limit": 2, "temperatures": [0.0], "max_tokens": 8},
}  # fmt: skip


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))
    save_target(tmp_path / "target")
    write_exchanges(tmp_path / "talk.jsonl", 120)
    (tmp_path / "shape.yaml").write_text("draft_vocab_size: 100\n")
    job = SETTINGS["job"] | {
        "target": str(tmp_path / "target"), "data": [str(tmp_path / "talk.jsonl")], "preset": str(tmp_path / "shape.yaml")
    }  # fmt: skip
    return Study.model_validate(SETTINGS | {"job": job})


def test_a_study(study: Study, tmp_path: Path) -> None:
    out = tmp_path / "study"
    wrong = study.model_copy(update={"measure": study.measure.model_copy(update={"tasks": ("maths",)})})
    with pytest.raises(UsageError, match="no task 'maths'"):
        run_study(wrong, out, lambda _: pytest.fail("found out before anything is trained"))
    seen: list[str] = []
    stopped = run_study(
        study,
        out,
        lambda _: None,
        lambda piece, record: seen.append(piece.name),
        interruptible=lambda: nullcontext(lambda: "dflash-0" in seen),
    )
    assert stopped is None and not (out / "evaluation").exists()
    assert [is_done(piece.folder(out)) for piece in study.pieces()] == [True, True, False]
    before = (out / "drafters" / "hspec-0" / "drafter.safetensors").read_bytes()
    result = run_study(study, out, lambda _: None)
    assert result is not None
    assert (out / "drafters" / "hspec-0" / "drafter.safetensors").read_bytes() == before, "what is done stays"
    runs = result["trainings"]["runs"]
    assert list(runs) == ["hspec-0", "dflash-0", "hspec-1"]
    assert runs["hspec-0"]["blocks"] == runs["dflash-0"]["blocks"] > 0, "the same blocks"
    assert runs["hspec-0"]["method"] == runs["hspec-0"]["label"] == "hspec" and runs["hspec-1"]["seed"] == 1
    assert all(1 <= r["estimated_tau_at_equal_time"] <= r["estimated_tau"] + 1e-9 for r in runs.values())
    found = result["evaluation"]["settings"]["greedy"]
    assert list(found["entrants"]) == ["ar", "hspec (k 3, 2 seeds)", "dflash-0"]
    assert json.loads((out / "study.json").read_text()) == result
    assert "estimated tau in training" in (out / "report.html").read_text(encoding="utf-8")
    assert run_study(study, out, lambda _: pytest.fail("nothing is left to train")) is not None
    with pytest.raises(UsageError, match="holds another study"):
        run_study(study.model_copy(update={"entries": study.entries[:1]}), out, lambda _: None)


def test_a_training_that_was_killed_before_its_weights_were_saved_is_not_done(study: Study, tmp_path: Path) -> None:
    train = study.job.train.model_copy(update={"save_minutes": 1e-9})  # in every step
    study = study.model_copy(update={"job": study.job.model_copy(update={"train": train})})
    out = tmp_path / "study"
    assert run_study(study, out, lambda _: None) is not None
    own = out / "drafters" / "hspec-0"
    weights = (own / "drafter.safetensors").read_bytes()
    last = Checkpoints(own).place(Checkpoints(own).steps()[-1])
    shutil.rmtree(last)  # the log says that it has come to its end
    assert not is_done(own) and is_done(out / "drafters" / "dflash-0")
    again: list[str] = []
    run_study(study, out, lambda _: None, lambda piece, _: again.append(piece.name))
    assert set(again) == {"hspec-0"} and is_done(own)
    assert (own / "drafter.safetensors").read_bytes() == weights
    shutil.rmtree(own / "checkpoints")  # to save space, when all is done
    assert is_done(own)


def test_what_was_measured_of_a_smaller_study_stays(study: Study, tmp_path: Path) -> None:
    hspec, _ = study.entries
    small = study.model_copy(update={"entries": (hspec.model_copy(update={"seeds": (0,)}),)})
    assert run_study(small, tmp_path, lambda _: None) is not None
    before = (tmp_path / "evaluation" / "records.jsonl").read_bytes()
    result = run_study(study, tmp_path, lambda _: None)
    assert result is not None
    assert list(result["evaluation"]["settings"]["greedy"]["entrants"]) == ["ar", "hspec (k 3, 2 seeds)", "dflash-0"]
    assert (tmp_path / "evaluation-1" / "records.jsonl").read_bytes() == before
    more = study.model_copy(update={"measure": study.measure.model_copy(update={"limit": 3})})
    result = run_study(more, tmp_path, lambda _: None)
    assert result is not None and result["evaluation"]["settings"]["greedy"]["prompts"] == {"qa": 3}
    assert not (tmp_path / "evaluation-2").exists(), "more prompts come to those that there are"


def test_a_study_may_grow(study: Study, tmp_path: Path) -> None:
    """By entries and seeds; what is there must have been trained as the larger study would."""
    hspec, dflash = study.entries
    small = study.model_copy(update={"entries": (hspec.model_copy(update={"seeds": (0,)}),)})
    claim(small, tmp_path)
    claim(study, tmp_path)
    assert read_study(tmp_path / "study.yaml") == study
    changed = dflash.model_copy(update={"job": {"train": {"batch_tokens": 100}}})
    longer = study.job.train.model_copy(update={"steps": 4})
    for other in (
        small,
        study.model_copy(update={"entries": (hspec, changed)}),
        study.model_copy(update={"job": study.job.model_copy(update={"train": longer})}),
        study.model_copy(update={"share_features": True}),
    ):
        with pytest.raises(UsageError, match="holds another study"):
            claim(other, tmp_path)
        assert read_study(tmp_path / "study.yaml") == study


def test_ctrl_c_while_the_target_answers(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only trainings, which save themselves, put it off."""
    usual = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in the background

    def interrupted(*_: Any) -> None:
        assert signal.getsignal(signal.SIGINT) is usual
        raise KeyboardInterrupt

    monkeypatch.setattr(study_run, "prepare_data", interrupted)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(json.loads(study.model_dump_json())))
    out = tmp_path / "study"
    monkeypatch.setattr("sys.argv", ["hspec", "study", "--config", str(tmp_path / "own.yaml"), "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert f"stopped; 'hspec study --out {out}' with the same settings goes on" in " ".join(capsys.readouterr().out.split())


def test_processes_share_the_trainings_out(study: Study, tmp_path: Path) -> None:
    """What another process has is passed over, and the last one to finish measures."""
    out, said = tmp_path / "study", []
    hspec, dflash, second = study.pieces()
    with alone(hspec.folder(out)) as free:
        assert free
        assert run_study(study, out, said.append) is None
        assert [is_done(piece.folder(out)) for piece in (hspec, dflash, second)] == [False, True, True]
    assert "another process is at work: hspec-0; the last one" in said[-1]
    trained: list[str] = []
    result = run_study(study, out, said.append, lambda piece, record: trained.append(piece.name))
    assert set(trained) == {"hspec-0"} and result is not None
    with alone(out / "evaluation"):
        assert run_study(study, out, said.append) is None
    assert "it measures" in said[-1]


def test_tau_in_batches_and_speed_of_the_first_seeds_alone(study: Study, tmp_path: Path) -> None:
    measure = study.measure.model_copy(update={"batch": 4, "timed_limit": 1, "temperatures": (0.0, 1.0), "limit": 3})
    result = run_study(study.model_copy(update={"measure": measure}), tmp_path / "study", lambda _: None)
    assert result is not None
    tau, timing = result["evaluation"]["settings"], result["timing"]["settings"]
    assert list(tau) == ["greedy", "T=1"] and list(timing) == ["greedy"]
    assert list(tau["greedy"]["entrants"]) == ["hspec (k 3, 2 seeds)", "dflash-0"]
    assert list(timing["greedy"]["entrants"]) == ["ar", "hspec-0", "dflash-0"]
    assert tau["greedy"]["prompts"] == {"qa": 3} and timing["greedy"]["prompts"] == {"qa": 1}
    assert all(e["speedup"] is None for e in tau["greedy"]["entrants"].values())
    assert all(run["cycle"] > 0 for run in result["trainings"]["runs"].values())
    assert "speedup" in (tmp_path / "study" / "timing.html").read_text(encoding="utf-8")


def test_features_are_shared(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target sees a document once for all trainings, and none of it in their time."""
    seen: list[bytes] = []
    run = FeatureSource._run

    def noted(self: FeatureSource, batch: Batch, needs: Needs) -> Features:
        seen.append(batch.tokens.numpy().tobytes())
        return run(self, batch, needs)

    in_step: list[int] = []
    step = Trainer.train_step

    def timed(self: Trainer) -> Any:
        before = len(seen)
        out = step(self)
        in_step.append(len(seen) - before)
        return out

    monkeypatch.setattr(FeatureSource, "_run", noted)
    monkeypatch.setattr(Trainer, "train_step", timed)
    result = run_study(study.model_copy(update={"share_features": True}), tmp_path / "study", lambda _: None)
    assert result is not None and list(result["trainings"]["runs"]) == ["hspec-0", "dflash-0", "hspec-1"]
    assert seen and len(seen) == len(set(seen))
    assert in_step and not any(in_step)
    assert list((tmp_path / "study" / "features").glob("*.bin"))


def test_without_held_out_documents(study: Study, tmp_path: Path) -> None:
    """Nothing would tell the trainings apart, so none is begun."""
    few = tmp_path / "few.jsonl"
    write_exchanges(few, 1, start=min(set(range(50)) - held_out_numbers(50)))
    with pytest.raises(HSpecError, match="no document is held out"):
        run_study(
            study.model_copy(update={"job": study.job.model_copy(update={"data": (SourceConfig(source=str(few)),)})}),
            tmp_path / "out",
            lambda _: None,
        )
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_dir() and p.name != "drafters"]


def test_pieces_come_by_seed(study: Study) -> None:
    assert study.pieces() == [Piece("hspec", 0), Piece("dflash", 0), Piece("hspec", 1)]


def test_equal_time() -> None:
    records = [{"spent": 10.0, "tau_sampling": 1.5}, {"spent": 20.0, "tau_sampling": 1.7}]
    assert [_at_time(records, t) for t in (0, 5, 10, 15, 20, 99)] == pytest.approx([1.0, 1.25, 1.5, 1.6, 1.7, 1.7])


def test_what_ships_and_what_is_wrong(tmp_path: Path) -> None:
    shipped = read_study(None)
    seeds = {entry.label: len(entry.seeds) for entry in shipped.entries}
    assert all(seeds[m] == 3 for m in ("hspec", "dspark", "dflash", "dflash-kv", "attention-only"))
    for change, said in [
        ({"entries": [{"method": "ar"}]}, "no method 'ar' that is trained"),
        ({"entries": []}, "entries"),
        ({"entries": [{"method": "hspec", "seeds": [1, 1]}]}, "a seed is there twice"),
        ({"entries": [{"method": "hspec"}, {"method": "hspec"}]}, "two entries are called 'hspec'"),
        ({"job": {"init_from": "x"}, "entries": [{"method": "hspec"}]}, "job.init_from"),
        ({"entries": [{"method": "hspec", "seeds": [-1]}]}, r"seeds\.0"),
        ({"entries": [{"method": "hspec", "job": {"train": 3}}]}, "train: its keys are needed, not 3"),
        ({"entries": [{"method": "hspec", "job": {"drafter": None}}]}, "drafter: its keys are needed, not None"),
        ({"entries": [{"method": "hspec"}], "mesure": {}}, "mesure"),
        ({"entries": [{"job": {"target": "x"}}]}, "hspec: job.target is the study's"),
        ({"entries": [{"job": {"train": {"precision": "bf16"}}}]}, "hspec: job.train.precision is the study's"),
        ({"entries": [{"name": "a/b"}]}, "name"),
        ({"entries": [{"job": {"train": {"rate": 1}}}]}, "rate"),
        ({"entries": [{"job": {"init_from": "x"}}]}, "job.init_from"),
        ({"equal": "compute", "entries": [{"name": "long", "job": {"train": {"steps": 9}}}]}, "long: job.train.steps follow"),
    ]:
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(change))
        with pytest.raises(UsageError, match=said):
            read_study(path)
    with pytest.raises(UsageError, match="cannot read the study"):
        read_study(tmp_path / "gone.yaml")


def test_what_an_entry_changes(study: Study) -> None:
    other = {"train": {"learning_rate": 0.5}, "drafter": {"draft_vocab_size": 120}, "preset": "auto", "copy_layers": False}
    both = Study.model_validate(
        study.model_dump() | {"entries": [{"method": "hspec"}, {"name": "fast", "seeds": [4], "job": other}]}
    )
    plain, fast = (both.job_of(piece) for piece in both.pieces())
    assert plain == study.job_of(Piece("hspec", 0)) and plain.train.learning_rate != 0.5
    assert (fast.train.learning_rate, fast.train.seed, fast.train.steps) == (0.5, 4, plain.train.steps)
    assert fast.train.batch_tokens == plain.train.batch_tokens  # a section is given in part
    assert (fast.drafter, fast.preset, fast.copy_layers) == ({"draft_vocab_size": 120}, "auto", False)
    assert shape(fast).draft_vocab_size == 120 and fast.target == plain.target


def test_equal_compute_gives_dear_blocks_fewer_steps(study: Study) -> None:
    job = study.job.model_copy(update={"train": study.job.train.model_copy(update={"steps": 1000})})
    dense = {"growth": [{"start": 0, "slots": 3, "density": 1.0}]}
    entries = [{"name": "plain"}, {"name": "dense", "job": {"train": dense}}]
    equal = Study.model_validate({"job": job.model_dump(), "entries": entries, "equal": "compute"})
    plain, dear = (equal.job_of(piece) for piece in equal.pieces())
    assert plain.train.steps == 1000 and 400 < dear.train.steps < 1000
    assert run_flops(dear) == pytest.approx(run_flops(plain), rel=2e-3)


def test_texts_are_read_once_and_held_out_for_all(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_exchanges(tmp_path / "more.jsonl", 60, start=200)
    entries = [
        {"name": "a"},
        {"name": "b", "job": {"train": {"ema": 0.5}}},
        {"name": "c", "job": {"data": [str(tmp_path / "more.jsonl")]}},
    ]
    several = Study.model_validate(study.model_dump() | {"entries": entries})
    read: list[int] = []

    def counted(job: Any, target: Any, say: Any) -> Any:
        found = prepare_data(job, target, say)
        read.append(len(found.train))
        return found

    monkeypatch.setattr("hspec.evaluation.study_run.prepare_data", counted)
    texts = _Texts(several.job, lambda _: None)
    a, b, c = (texts.of(several.job_of(piece)) for piece in several.pieces())
    assert len(read) == 2 and a.train is b.train and len(c.train) < len(a.train)
    assert a.held_out is b.held_out is c.held_out


def test_a_drafter_that_does_not_fit_is_found_before_any_training(study: Study, tmp_path: Path) -> None:
    entries = [{"name": "a"}, {"name": "b", "job": {"preset": "auto", "drafter": {"taps": [99]}}}]
    wrong = Study.model_validate(study.model_dump() | {"entries": entries})
    with pytest.raises(UsageError, match="drafter"):
        run_study(wrong, tmp_path / "out", lambda _: pytest.fail("found out before anything is read"))
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_dir() and p.name != "drafters"]


def test_the_recipe_study_that_ships() -> None:
    recipe = read_study(Path("recipe"))
    jobs = {piece.label: recipe.job_of(piece) for piece in recipe.pieces()}
    assert recipe.equal == "compute" and len(jobs) == len(recipe.entries)
    base = run_flops(jobs["plain"])
    assert all(run_flops(job) == pytest.approx(base, rel=0.01) for job in jobs.values())

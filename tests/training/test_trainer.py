"""The training loop: it learns, it can be stopped anywhere, and nothing that it keeps is ever half-written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter
from hspec.errors import HSpecError, UsageError
from hspec.files import beside
from hspec.targets.target import Target
from hspec.training.agenda import Agenda
from hspec.training.checkpoints import STATE_FILE, Checkpoints
from hspec.training.config import GrowthStage, TrainConfig, default_growth
from hspec.training.divergence import DIVERGED_FILE
from hspec.training.log import measured_at_end
from hspec.training.loss import LossSums
from hspec.training.optimiser import learning_rate
from hspec.training.trackers import LOG_FILE
from hspec.training.trainer import BEST, Trainer
from hspec.training.validation import Meter
from tests.tiny import tiny_target
from tests.training.helpers import settings, small_config, trainer_for
from tests.training.test_objective import Largest


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=3, hidden=48)


def run(trainer: Trainer, until: int) -> Trainer:
    while trainer.step < until:
        trainer.train_step()
    return trainer


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, averages and the optimiser's memory, by name."""
    out = {f"weight {n}": p.detach() for n, p in trainer.drafter.named_parameters()}
    out |= {f"ema {n}": p for n, p in trainer.learner.ema.items()}
    for index, memory in trainer.learner.optimiser.state_dict()["state"].items():
        out |= {f"optimiser {index} {n}": torch.as_tensor(v) for n, v in memory.items()}
    return out


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "core_seconds", "blocks_per_second")}


def same(one: Trainer, two: Trainer) -> None:
    a, b = everything(one), everything(two)
    assert a.keys() == b.keys() and len(a) > 100
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert (one.step, one.blocks_seen) == (two.step, two.blocks_seen)


# -- resuming ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_undisturbed_run_bit_for_bit(target: Target, tmp_path: Path) -> None:
    whole = run(trainer_for(target, tmp_path / "whole"), 8)
    for stops in ((1,), (3, 4, 5), (7,)):  # the block grows at step 4
        folder = tmp_path / str(stops)
        trainer = trainer_for(target, folder)
        for stop in stops:
            run(trainer, stop).save()
            if stop == 4:
                trainer.validate()
            torch.manual_seed(stop)  # what else draws random numbers does not matter
            trainer = trainer_for(target, folder)
            trainer.resume()
        same(run(trainer, 8), whole)


def test_validation_and_saving_do_not_disturb_a_run(target: Target, tmp_path: Path) -> None:
    whole, watched = trainer_for(target, tmp_path / "a"), trainer_for(target, tmp_path / "b")
    run(whole, 6)
    for step in range(1, 7):
        run(watched, step)
        watched.validate()
        watched.save()
    same(watched, whole)


def test_the_state_must_fit(target: Target, tmp_path: Path) -> None:
    run(trainer_for(target, tmp_path), 1).save()
    with pytest.raises(
        HSpecError, match=r"other settings: learning_rate was 0\.003, is 0\.0001; ema was 0\.9, is 0\.5\. Put them back"
    ):
        trainer_for(target, tmp_path, settings(learning_rate=1e-4, ema=0.5)).resume()
    with pytest.raises(HSpecError, match="does not fit the drafter"):
        trainer_for(target, tmp_path, fusion_rank=12).resume()
    with pytest.raises(HSpecError, match="the hash of the draft vocabulary was"):
        trainer_for(target, tmp_path, draft_vocab=150).resume()
    with pytest.raises(
        HSpecError, match=r"the hash of the training data was [0-9a-f]+ when the run began, and is [0-9a-f]+ now: bring it back"
    ):
        trainer_for(target, tmp_path, count=11).resume()
    with pytest.raises(HSpecError, match=r"the hash of the target's weights was [0-9a-f]+ when the run began"):
        trainer_for(tiny_target(layers=3, hidden=48, seed=1), tmp_path).resume()
    with pytest.raises(UsageError, match="nothing to resume"):
        trainer_for(target, tmp_path / "elsewhere").resume()


def test_what_computes_nothing_may_change(target: Target, tmp_path: Path) -> None:
    run(trainer_for(target, tmp_path), 1).save()
    other = trainer_for(target, tmp_path, settings(save_minutes=1, validate_minutes=2, keep=7))
    other.resume()
    assert other.step == 1


def test_what_was_measured_since_the_last_report_is_not_lost(target: Target, tmp_path: Path) -> None:
    reports: list[list[dict[str, Any]]] = []
    for name, stops in (("whole", (8,)), ("parts", (3, 6, 8))):
        reports.append([])
        for stop in stops:
            trainer = trainer_for(target, tmp_path / name)
            if trainer.checkpoints.steps():
                trainer.resume()
            trainer.run(reports[-1].append, lambda trainer=trainer, stop=stop: trainer.step == stop)
    assert [untimed(r) for r in reports[0]] == [untimed(r) for r in reports[1]]
    assert [r["kind"] for r in reports[0]] == ["train", "held-out"]


def test_a_run_that_is_done_is_left_as_it_is(target: Target, tmp_path: Path) -> None:
    trainer_for(target, tmp_path).run(lambda _: None)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    again = trainer_for(target, tmp_path)
    again.resume()
    again.run(lambda _: None)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("left", ["", "one", "cut", "nothing"])
def test_a_measurement_that_was_lost_at_the_end_is_made_again(target: Target, tmp_path: Path, left: str) -> None:
    trainer_for(target, tmp_path).run(lambda _: None)
    log = tmp_path / LOG_FILE
    whole = log.read_text()
    lines = whole.splitlines(keepends=True)
    assert measured_at_end(tmp_path) == trainer_for(target, tmp_path).config.steps
    log.write_text({"": "", "one": "".join(lines[:-1]), "cut": whole[:-20], "nothing": ""}[left])
    if left == "nothing":
        log.unlink()
    assert measured_at_end(tmp_path) is None
    again, reports = trainer_for(target, tmp_path), list[dict[str, Any]]()
    again.resume()
    again.run(reports.append)
    assert [untimed(r) for r in reports] == [untimed(json.loads(lines[-1]))]
    assert measured_at_end(tmp_path) == again.config.steps


# -- a full disk -------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def partly_written(state: Any, file: BinaryIO) -> None:
    file.write(b"half a state")
    full()


def test_a_full_disk_leaves_the_previous_state(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = run(trainer_for(target, tmp_path), 2)
    trainer.save()
    before = snapshot(tmp_path)
    run(trainer, 4)
    with monkeypatch.context() as patch:
        patch.setattr("hspec.drafters.checkpoint.save_file", full)
        with pytest.raises(HSpecError, match="cannot write the drafter"):
            trainer.save()
    assert snapshot(tmp_path) == before and not beside(tmp_path).exists()
    with monkeypatch.context() as patch:
        patch.setattr("torch.save", partly_written)
        with pytest.raises(HSpecError, match=r"cannot write the training state .*: No space left on device\. The last one is"):
            trainer.save()
    state = f"checkpoints/step-00000002/{STATE_FILE}"
    assert snapshot(tmp_path)[state] == before[state] and snapshot(tmp_path).keys() == before.keys()
    again = trainer_for(target, tmp_path)
    again.resume()
    assert again.step == 2
    same(run(again, 4), trainer)


def test_a_log_that_cannot_be_written_is_one_message(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_for(target, tmp_path)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(HSpecError, match=r"cannot write .*log\.jsonl: No space left on device.*--resume"):
        trainer.validate()


# -- learning ----------------------------------------------------------------------------------------------------


def test_it_overfits(target: Target, tmp_path: Path) -> None:
    config = settings(steps=40, batch_tokens=100, learning_rate=1e-2, growth=(GrowthStage(start=0, slots=2, density=1.0),))
    trainer = trainer_for(target, tmp_path, config, count=4)
    first, last = Meter(), Meter()
    for step in range(40):
        (first if step < 5 else last if step >= 35 else Meter()).add(*trainer.train_step())
    assert last.report()["loss"] < 0.8 * first.report()["loss"]
    early, late = first.report(), last.report()
    assert late["acceptance"][0] > early["acceptance"][0] + 0.1 and late["tau_sampling"] > early["tau_sampling"] + 0.1


def test_only_matrices_decay_and_only_the_causal_head_is_faster(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path, settings(weight_decay=0.3, head_learning_rate=5.0), fusion_norm=True)
    names = {id(p): n for n, p in trainer.drafter.named_parameters()}
    decays: dict[str, float] = {}
    factors: dict[str, float] = {}
    for group in trainer.learner.optimiser.param_groups:
        for p in group["params"]:
            decays[names[id(p)]], factors[names[id(p)]] = group["weight_decay"], group["factor"]
    assert decays.keys() == set(names.values())  # each once, none forgotten
    ends = ("A_log", ".D", "dt_bias", "conv_bias", ".bias", "norm.weight", "mask_embedding")
    without = {n for n in decays if n.endswith(ends) or ".norms." in n or n.startswith("norms.") or "tap_norms" in n}
    for kind in (*ends, "tap_norms", "norms.0", "q_norm", "k_norm", "seed.norm"):
        assert any(kind in n for n in without), kind
    assert {n for n, decay in decays.items() if decay == 0.0} == without
    assert {decay for n, decay in decays.items() if n not in without} == {0.3}
    assert {n for n, f in factors.items() if f == 5.0} == {"causal.w1.weight", "causal.w2.weight"}
    assert set(factors.values()) == {1.0, 5.0}


def test_the_target_and_its_shared_weights_stay(target: Target, tmp_path: Path) -> None:
    before = target.embedding_weight.clone(), target.head_weight.clone()
    trainer = run(trainer_for(target, tmp_path), 3)
    assert torch.equal(target.embedding_weight, before[0]) and torch.equal(target.head_weight, before[1])
    assert not any(p.requires_grad for p in target.model.parameters())
    assert all(p.requires_grad for p in trainer.drafter.parameters())


def test_validation_restores_weights_and_mode(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = run(trainer_for(target, tmp_path), 3)
    before = everything(trainer)
    before = {n: t.clone() for n, t in before.items()}
    first, second = trainer.validate(), trainer.validate()
    assert trainer.drafter.training
    assert all(torch.equal(t, before[n]) for n, t in everything(trainer).items())
    assert first == second  # always the same anchors
    assert len(first["acceptance"]) == 3  # the whole block, although one slot is trained at this step

    def broken(*_: Any) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr(trainer, "loss", broken)
    with pytest.raises(RuntimeError):
        trainer.validate()
    assert trainer.drafter.training and all(torch.equal(t, before[n]) for n, t in everything(trainer).items())


def test_validation_uses_the_averaged_weights(target: Target, tmp_path: Path) -> None:
    trainer = run(trainer_for(target, tmp_path), 3)
    averaged = trainer.validate()["loss"]
    trainer.learner.ema = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    assert trainer.validate()["loss"] != averaged


def test_the_average_follows_the_weights(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path)
    start = trainer.learner.ema["norm.weight"].clone()
    trainer.train_step()
    decay = min(0.9, 2 / 11)
    expected = start * decay + trainer.drafter.norm.weight.detach() * (1 - decay)
    assert torch.allclose(trainer.learner.ema["norm.weight"], expected, atol=1e-6)


def test_what_is_saved_is_a_drafter_with_the_averaged_weights(target: Target, tmp_path: Path) -> None:
    trainer = run(trainer_for(target, tmp_path), 2)
    trainer.save()
    loaded = load_drafter(tmp_path, target)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, trainer.learner.ema[name]), name
    assert loaded.max_draft == 3
    assert not torch.equal(loaded.norm.weight, trainer.drafter.norm.weight)


@pytest.mark.parametrize("what", ["losses", "gradients"])
def test_diverging_names_the_batch_and_keeps_what_is_there(
    target: Target, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = run(trainer_for(target, tmp_path), 2)
    trainer.save()
    before, weights = snapshot(tmp_path), {n: t.clone() for n, t in everything(trainer).items()}
    make = trainer.learner.loss

    def broken(*given: Any) -> tuple[Tensor, LossSums]:
        total, sums = make(*given)
        # A sum of 0 whose derivative is infinite, or one that is no number.
        return total + (math.nan if what == "losses" else (trainer.drafter.norm.weight * 0).sum().sqrt()), sums

    monkeypatch.setattr(trainer.learner, "loss", broken)
    with pytest.raises(
        HSpecError, match=rf"step 2: the {what} of the documents 0-\d+, .* are not finite .*diverged\.json names all"
    ):
        trainer.run(lambda _: None)
    after = snapshot(tmp_path)
    record = json.loads(after.pop(DIVERGED_FILE))
    ids = [trainer.stream.examples[i].id for i in trainer.stream.batch(2).documents]
    assert record["step"] == 2 and record["not finite"] == what
    assert [(p["rank"], p["documents"]) for p in record["processes"]] == [(0, ids)]
    assert after == before and all(torch.equal(t, weights[n]) for n, t in everything(trainer).items())
    again = trainer_for(target, tmp_path)
    again.resume()
    assert again.step == 2


def test_memory_of_a_step_does_not_grow_with_the_logits(target: Target, tmp_path: Path) -> None:
    config = settings(objective_chunk=8, batch_tokens=300, growth=(GrowthStage(start=0, slots=3, density=1.0),))
    trainer = trainer_for(target, tmp_path, config, draft_vocab=157)
    shapes: set[tuple[int, ...]] = set()

    class Shapes(Largest):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            shapes.update(tuple(t.shape) for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
            return out

    with Shapes():
        _, blocks = trainer.train_step()
    wide = {s for s in shapes if len(s) >= 2 and s[-1] in (157, target.vocab_size) and s[-2] not in (8, 48)}
    assert blocks > 50  # 150 slots
    assert all(math.prod(s[:-1]) <= 8 for s in wide), wide


# -- schedules ---------------------------------------------------------------------------------------------------


def test_learning_rate() -> None:
    config = settings(steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(config, step) for step in range(201)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.55)
    assert rates[100] == rates[200] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(settings(warmup_steps=0, learning_rate=2.0), 0) == pytest.approx(2.0)
    longer = settings(steps=4, warmup_steps=8, learning_rate=1.0)
    assert [learning_rate(longer, s) for s in range(4)] == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8])


def test_the_causal_heads_rate_is_a_multiple(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path, settings(learning_rate=1.0, warmup_steps=2, head_learning_rate=5.0))
    trainer.train_step()
    assert sorted({group["lr"] for group in trainer.learner.optimiser.param_groups}) == pytest.approx([0.5, 2.5])


@pytest.mark.parametrize(
    ("until", "start", "expected"),
    [
        (0.5, 0.7, {0: 1, 49: 1, 50: 1, 60: 0.5, 69: 0.05, 70: 0, 99: 0}),
        (0.5, 0.5, {0: 1, 49: 1, 50: 0, 99: 0}),
        (0.0, 0.0, {0: 0, 99: 0}),
        (1.0, 1.0, {0: 1, 99: 1}),
        (0.0, 1.0, {0: 1, 50: 0.5, 99: 0.01}),
    ],
)
def test_from_kl_to_tv(until: float, start: float, expected: dict[int, float]) -> None:
    config = settings(steps=100, warm_kl_until=until, tv_from=start, ce=0.1)
    assert {s: config.kl_share(s) for s in expected} == pytest.approx(expected)
    for step, share in expected.items():
        weights = config.weights(step)
        assert (weights.ce, weights.kl, weights.tv) == pytest.approx((0.1, 0.9 * share, 0.9 * (1 - share)))


def test_growth_stages_begin_where_they_say() -> None:
    stages = tuple(GrowthStage(start=s, slots=k, density=1.0) for s, k in ((0, 1), (0.25, 2), (0.9, 5)))
    config = TrainConfig(steps=20, growth=stages)
    assert [config.stage(s).slots for s in range(20)] == [1] * 5 + [2] * 13 + [5] * 2


@pytest.mark.parametrize("starts", [(0.1,), (0.0, 0.5, 0.5), (0.0, 0.6, 0.5)])
def test_growth_must_ascend_from_zero(starts: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="growth must start at 0 and ascend"):
        TrainConfig(growth=tuple(GrowthStage(start=s, slots=1, density=1) for s in starts))


@pytest.mark.parametrize(("slots", "expected"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (7, [1, 2, 7])])
def test_by_default_the_whole_block_is_reached(slots: int, expected: list[int]) -> None:
    assert [s.slots for s in default_growth(slots)] == expected
    config = TrainConfig().for_block(slots)
    assert config.stage(0).slots == 1 and config.stage(config.steps - 1).slots == slots
    assert config.for_block(3) is config


def test_a_trainer_grows_to_the_drafters_block_unless_told_otherwise(target: Target, tmp_path: Path) -> None:
    assert trainer_for(target, tmp_path, settings(growth=())).slots == small_config(target).max_draft == 3
    with pytest.raises(UsageError, match="k = 4"):
        trainer_for(target, tmp_path, settings(growth=(GrowthStage(start=0, slots=4, density=1.0),)))


# -- the run -----------------------------------------------------------------------------------------------------


def test_a_run_reports_validates_and_saves(target: Target, tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    trainer = trainer_for(target, tmp_path, settings(steps=3, growth=()))
    trainer.run(reports.append)
    assert [r["kind"] for r in reports] == ["train", "held-out"]
    assert reports[0]["step"] == 3 and reports[0]["blocks"] == trainer.blocks_seen
    assert [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()] == reports
    again = trainer_for(target, tmp_path, settings(steps=3, growth=()))
    again.resume()
    same(again, trainer)


def test_a_run_without_held_out_documents_reports_training_only(target: Target, tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    trainer = trainer_for(target, tmp_path, settings(steps=2, growth=(), validate_minutes=1e-9), held_out=0)
    trainer.run(reports.append)
    assert [r["kind"] for r in reports] == ["train"]
    assert trainer.validate() == {}


def test_the_best_average_is_kept_as_a_drafter(target: Target, tmp_path: Path) -> None:
    trainer = run(trainer_for(target, tmp_path), 3)
    first, kept = trainer.validate(), {n: w.clone() for n, w in trainer.learner.average().items()}
    assert trainer.best == first["tau_sampling"] > 1
    for average in trainer.learner.ema.values():
        average.mul_(0.5)
    assert trainer.validate()["tau_sampling"] < trainer.best
    best = load_drafter(tmp_path / BEST, target)
    assert all(torch.equal(p, kept[name]) for name, p in best.named_parameters())
    trainer.save()
    again = trainer_for(target, tmp_path)
    again.resume()
    assert again.best == trainer.best


def test_states_and_the_best_are_kept_as_settings_say(target: Target, tmp_path: Path) -> None:
    config = settings(keep=3)
    trainer_for(target, tmp_path, config).run(lambda _: None, agenda=Agenda({"report": 1e9, "validate": 1e9, "save": -1.0}))
    assert Checkpoints(tmp_path).steps() == [6, 7, 8]
    assert {p.name for p in tmp_path.iterdir()} == {"best", "checkpoints", "config.json", "drafter.safetensors", "log.jsonl"}


def test_stopping_saves(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path)
    trainer.run(lambda _: None, lambda: trainer.step == 2)
    again = trainer_for(target, tmp_path)
    again.resume()
    assert again.step == 2

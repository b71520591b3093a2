"""The training loop: it learns, it can be stopped anywhere, and nothing that it keeps is ever half-written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter
from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from hspec.training.config import GrowthStage, TrainConfig, default_growth
from hspec.training.trackers import LOG_FILE
from hspec.training.trainer import STATE_FILE, Trainer
from hspec.training.validation import Meter
from tests.tiny import tiny_target
from tests.training.helpers import documents, settings, small_config, trainer_for
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
    out |= {f"ema {n}": p for n, p in trainer.ema.items()}
    for index, memory in trainer.optimiser.state_dict()["state"].items():
        out |= {f"optimiser {index} {n}": torch.as_tensor(v) for n, v in memory.items()}
    return out


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
    with pytest.raises(HSpecError, match="a run with other settings"):
        trainer_for(target, tmp_path, settings(learning_rate=1e-4)).resume()
    with pytest.raises(HSpecError, match="does not fit the drafter"):
        trainer_for(target, tmp_path, fusion_rank=12).resume()
    with pytest.raises(HSpecError, match="another draft vocabulary"):
        trainer_for(target, tmp_path, draft_vocab=150).resume()
    other = trainer_for(target, tmp_path)
    other.stream = type(other.stream)(documents(11), 80, 0)
    with pytest.raises(HSpecError, match=r"the training data is not what the run in .* began with"):
        other.resume()
    with pytest.raises(UsageError, match="nothing to resume"):
        trainer_for(target, tmp_path / "elsewhere").resume()


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"PK" + bytes(200)])
def test_a_damaged_state_says_what_to_do(target: Target, tmp_path: Path, damage: Any) -> None:
    run(trainer_for(target, tmp_path), 1).save()
    path = tmp_path / STATE_FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(HSpecError, match=r"state\.pt is damaged \(.+\): train on from the drafter beside it, with --init-from"):
        trainer_for(target, tmp_path).resume()


# -- a full disk -------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def partly_written(state: Any, path: Path) -> None:
    path.write_bytes(b"half a state")
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
    assert snapshot(tmp_path) == before and list(tmp_path.parent.glob(f"{tmp_path.name}.partial")) == []
    with monkeypatch.context() as patch:
        patch.setattr("torch.save", partly_written)
        with pytest.raises(HSpecError, match=r"cannot write the training state .*: No space left on device\. The last one is"):
            trainer.save()
    assert snapshot(tmp_path)[STATE_FILE] == before[STATE_FILE] and snapshot(tmp_path).keys() == before.keys()
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
    for group in trainer.optimiser.param_groups:
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
    trainer.ema = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
    assert trainer.validate()["loss"] != averaged


def test_the_average_follows_the_weights(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path)
    start = trainer.ema["norm.weight"].clone()
    trainer.train_step()
    decay = min(0.9, 2 / 11)
    expected = start * decay + trainer.drafter.norm.weight.detach() * (1 - decay)
    assert torch.allclose(trainer.ema["norm.weight"], expected, atol=1e-6)


def test_what_is_saved_is_a_drafter_with_the_averaged_weights(target: Target, tmp_path: Path) -> None:
    trainer = run(trainer_for(target, tmp_path), 2)
    trainer.save()
    loaded = load_drafter(tmp_path, target)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, trainer.ema[name]), name
    assert loaded.max_draft == 3
    assert not torch.equal(loaded.norm.weight, trainer.drafter.norm.weight)


def test_diverging_is_an_error_and_not_a_silent_nan(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path)
    with torch.no_grad():
        trainer.drafter.norm.weight.fill_(math.nan)
    with pytest.raises(HSpecError, match="step 0: the gradients are not finite"):
        trainer.train_step()


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


def at(trainer: Trainer, step: int) -> float:
    trainer.step = step
    return trainer._learning_rate()


def test_learning_rate(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path, settings(steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1))
    assert at(trainer, 0) == pytest.approx(0.1) and at(trainer, 9) == pytest.approx(1.0)
    assert at(trainer, 10) == pytest.approx(1.0) and at(trainer, 55) == pytest.approx(0.55)
    assert at(trainer, 100) == pytest.approx(0.1) and at(trainer, 200) == pytest.approx(0.1)
    assert all(at(trainer, s) >= at(trainer, s + 1) for s in range(10, 99))
    assert at(trainer_for(target, tmp_path, settings(warmup_steps=0, learning_rate=2.0)), 0) == pytest.approx(2.0)
    longer = trainer_for(target, tmp_path, settings(steps=4, warmup_steps=8, learning_rate=1.0))
    assert [at(longer, s) for s in range(4)] == pytest.approx([1 / 8, 2 / 8, 3 / 8, 4 / 8])


def test_the_causal_heads_rate_is_a_multiple(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path, settings(learning_rate=1.0, warmup_steps=2, head_learning_rate=5.0))
    trainer.train_step()
    assert sorted({group["lr"] for group in trainer.optimiser.param_groups}) == pytest.approx([0.5, 2.5])


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


def test_stopping_saves(target: Target, tmp_path: Path) -> None:
    trainer = trainer_for(target, tmp_path)
    trainer.run(lambda _: None, lambda: trainer.step == 2)
    again = trainer_for(target, tmp_path)
    again.resume()
    assert again.step == 2

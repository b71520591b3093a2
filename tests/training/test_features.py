"""Kept features: what they keep, how exactly, for how long, and when they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hspec.errors import HSpecError
from hspec.targets.target import Target
from hspec.training import features as module
from hspec.training.examples import Batch, ExampleStream
from hspec.training.features import Features, FeatureSource, KeptFeatures, Needs, feature_bytes
from hspec.training.trainer import FEATURES_FILE
from tests.tiny import tiny_config
from tests.training.helpers import documents, settings, trainer_for

EXAMPLES = documents(9, length=21)


def batches() -> list[Batch]:
    stream = ExampleStream(EXAMPLES, 70, 0)
    return [stream.batch(step) for step in range(2 * stream.batches_per_epoch)]


def compare(kept: Features, fresh: Features, batch: Batch, layers: list[int]) -> None:
    for row, document in enumerate(batch.documents):
        count = len(EXAMPLES[document].tokens)
        for mine, exact in ((kept.taps, fresh.taps), (kept.hidden, fresh.hidden)):
            scale = float(exact[row, :count].square().mean().sqrt())
            assert float((mine[row, :count] - exact[row, :count]).abs().max()) < 4e-3 * scale
        for layer in layers:
            for mine, exact in zip(kept.kv.layer(layer), fresh.kv.layer(layer), strict=True):
                torch.testing.assert_close(mine[row, :, :count], exact[row, :, :count], atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_kept_is_what_the_target_gives_up_to_fp16(target: Target, tmp_path: Path, where: str) -> None:
    config = tiny_config(target)
    kept = KeptFeatures(target, config, EXAMPLES, tmp_path / "f" if where == "disk" else None)
    fresh = FeatureSource(target, config)
    for batch in batches():
        compare(kept(batch), fresh(batch), batch, config.kv_layers)
    tokens = sum(len(e.tokens) for e in EXAMPLES)
    assert 0 < kept.nbytes - tokens * feature_bytes(config) < 100


def test_a_large_residual_stream_is_no_trouble(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    config, [batch, *_] = tiny_config(target), batches()
    kept = KeptFeatures(target, config, EXAMPLES, None)
    forward = target.forward

    def large(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return type(output)(output.hidden, output.taps * 1e6)

    monkeypatch.setattr(target, "forward", large)
    compare(kept(batch), FeatureSource(target, config)(batch), batch, config.kv_layers)


def test_the_target_runs_over_a_document_once(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, runs = tiny_config(target), []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: runs.append(1) or forward(*a, **k))
    kept = KeptFeatures(target, config, EXAMPLES, tmp_path / "f")
    first = [kept(batch) for batch in batches()]
    count = len(runs)
    assert count == len(EXAMPLES)
    again = KeptFeatures(target, config, EXAMPLES, tmp_path / "f")  # another run finds them
    second = [again(batch) for batch in batches()]
    assert len(runs) == count
    assert all(torch.equal(a.taps, b.taps) and torch.equal(a.hidden, b.hidden) for a, b in zip(first, second, strict=True))


def test_a_document_is_the_same_in_any_company(target: Target) -> None:
    """Else a resumed run, whose first batch with it is another, would not be the undisturbed one."""
    config = tiny_config(target)
    [batch] = [b for b in batches() if len(b.documents) > 1][:1]
    together = KeptFeatures(target, config, EXAMPLES, None)(batch)
    for row, document in enumerate(batch.documents):
        count = len(EXAMPLES[document].tokens)
        alone = KeptFeatures(target, config, EXAMPLES, None)(
            Batch(batch.tokens[row : row + 1, :count], batch.supervised[row : row + 1, :count], (document,))
        )
        assert torch.equal(alone.taps[0], together.taps[row, :count])
        assert torch.equal(alone.hidden[0], together.hidden[row, :count])
        for layer in config.kv_layers:
            for one, other in zip(alone.kv.layer(layer), together.kv.layer(layer), strict=True):
                assert torch.equal(one[0], other[row, :, :count])


def test_other_documents_are_not_mistaken_for_these(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(target)
    kept = KeptFeatures(target, config, EXAMPLES, tmp_path / "f")
    kept(batches()[0])
    other = KeptFeatures(target, config, documents(9, seed=5, length=21), tmp_path / "f")
    assert not other._store.filled.any()


def test_a_disk_that_is_too_small(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(HSpecError, match=r"would take .* GB, only 0.0 GB are free .*: train with features: stream"):
        KeptFeatures(target, tiny_config(target), EXAMPLES, tmp_path / "f")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_training_on_them_is_training_without_and_resumes(target: Target, tmp_path: Path, where: str) -> None:
    plain = trainer_for(target, tmp_path / "a", settings())
    kept = trainer_for(target, tmp_path / "b", settings(features=where))
    for _ in range(8):
        (one, _), (two, _) = plain.train_step(), kept.train_step()
        assert float(one.total.detach()) == pytest.approx(float(two.total.detach()), rel=2e-2)
        if kept.step == 5:
            kept.save()
    assert (tmp_path / "b" / FEATURES_FILE).exists() == (where == "disk")
    resumed = trainer_for(target, tmp_path / "b", settings(features=where))
    resumed.resume()
    for _ in range(3):
        resumed.train_step()
    for name, p in kept.drafter.state_dict().items():
        assert torch.equal(p, resumed.drafter.state_dict()[name]), name


def test_drafters_share_what_is_kept(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what it would have kept for itself, bit for bit, and the target runs over a document once for all."""
    one = tiny_config(target)
    other = one.model_copy(update={"taps": one.taps[:1], "kv_layers": [one.kv_layers[0]] * len(one.kv_layers)})
    both = Needs.of(one) | Needs.of(other)
    alone = {config.model_dump_json(): KeptFeatures(target, config, EXAMPLES, None) for config in (one, other)}
    expected = {key: [kept(batch) for batch in batches()] for key, kept in alone.items()}
    forward, runs = target.forward, []
    monkeypatch.setattr(target, "forward", lambda *a, **k: runs.append(1) or forward(*a, **k))
    for config in (one, other, one):
        shared = KeptFeatures(target, config, EXAMPLES, tmp_path / "f", both)
        for batch, wanted in zip(batches(), expected[config.model_dump_json()], strict=True):
            got = shared(batch)
            assert torch.equal(got.taps, wanted.taps) and torch.equal(got.hidden, wanted.hidden)
            for layer in config.kv_layers:
                for mine, own in zip(got.kv.layer(layer), wanted.kv.layer(layer), strict=True):
                    assert torch.equal(mine, own)
    assert len(runs) == len(EXAMPLES)


def test_needs_of_both() -> None:
    assert Needs((1, 14, 28), (3,)) | Needs((1, 8, 28), (2, 3)) == Needs((1, 8, 14, 28), (2, 3))


def test_a_training_on_shared_features_is_one_on_its_own(target: Target, tmp_path: Path) -> None:
    own = trainer_for(target, tmp_path / "a", settings(features="memory"))
    more = Needs((0, 1), (0, 1))

    def keep(config: Any, examples: Any) -> KeptFeatures:
        return KeptFeatures(target, config, examples, tmp_path / str(len(examples)), more)

    shared = trainer_for(target, tmp_path / "b", settings(), keep=keep)
    for _ in range(4):
        own.train_step(), shared.train_step()
    for name, p in own.drafter.state_dict().items():
        assert torch.equal(p, shared.drafter.state_dict()[name]), name
    assert own.validate()["tau_sampling"] == pytest.approx(shared.validate()["tau_sampling"], abs=0.02)

"""Training on features of a server is training without one, in every bit; and a server that is lost costs nothing but time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from hspec.errors import HSpecError, UsageError
from hspec.remote import client as client_module
from hspec.remote.address import Address
from hspec.remote.client import FeatureError
from hspec.targets.partial import PartialTarget
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.build import build
from hspec.training.checkpoints import Checkpoints
from hspec.training.feature_server import FeatureServerConfig, served_target, shared_out
from hspec.training.job import Job, read_job
from hspec.training.plan import plan
from hspec.training.trainer import Trainer
from tests.remote.helpers import serving
from tests.saved import save_target, write_exchanges
from tests.training import runs
from tests.training.helpers import settings, trainer_for
from tests.training.runs import KILLED, STEPS, BySteps, End, Served, course, run
from tests.training.test_resume import ended_alike


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Target:
    return load_target(str(folder))


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> Target:
    """Another copy, for servers: they run at the same time as trainers do."""
    return load_target(str(folder))


@pytest.fixture
def served(folder: Path, elsewhere: Target) -> Iterator[PartialTarget]:
    with serving(elsewhere) as server:
        yield connected(folder, str(server.address))


def connected(folder: Path, *at: str, **changes: Any) -> PartialTarget:
    return served_target(str(folder), FeatureServerConfig(at=at, **changes), "fp32", "cpu", 0, 1)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.drafter.state_dict() | {f"average {name}": average for name, average in trainer.learner.ema.items()}


def same_weights(one: Trainer, two: Trainer) -> None:
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys() and len(a) > 40 and all(torch.equal(a[name], b[name]) for name in a)


# -- the same training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["stream", "memory", "disk"])
def test_the_same_bits_as_in_one_process(whole: Target, served: PartialTarget, tmp_path: Path, features: str) -> None:
    """One machine, one thread count, fp32: the same modules see the same numbers."""
    one = trainer_for(whole, tmp_path / "here", settings(features=features))
    two = trainer_for(served, tmp_path / "served", settings(features=features))
    same_weights(one, two)  # the drafter starts as the target's layers, and from its text
    for _ in range(8):
        (a, _), (b, _) = one.train_step(), two.train_step()
        assert float(a.total.detach()) == float(b.total.detach())
    same_weights(one, two)
    timed = ("seconds", "core_seconds")
    assert {k: v for k, v in one.validate().items() if k not in timed} == {
        k: v for k, v in two.validate().items() if k not in timed
    }


@pytest.mark.parametrize("method", [{"context": "features", "fusion_rank": 48}, {"context": "none"}])
def test_drafters_that_read_no_kv(whole: Target, served: PartialTarget, tmp_path: Path, method: dict[str, Any]) -> None:
    one, two = (trainer_for(t, tmp_path / str(i), **method) for i, t in enumerate((whole, served)))
    for _ in range(3):
        one.train_step(), two.train_step()
    same_weights(one, two)


def test_the_next_batch_is_under_way(served: PartialTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for before this one's loss is begun, and never twice."""
    one = trainer_for(served, tmp_path, settings(steps=4))
    asked: list[bytes] = []
    expect = served.streams.expect

    def count(tokens: Tensor, layers: Any) -> None:
        if tokens.numpy().tobytes() not in asked:
            asked.append(tokens.numpy().tobytes())
        expect(tokens, layers)

    monkeypatch.setattr(served.streams, "expect", count)
    loss, begun = one.learner.loss, []

    def note(*given: Any) -> Any:
        begun.append(list(asked))
        return loss(*given)

    monkeypatch.setattr(one.learner, "loss", note)
    for _ in range(4):
        one.train_step()
    order = [one.stream.batch(step).tokens.numpy().tobytes() for step in range(4)]
    assert begun == [order[:2], order[:3], order[:4], order[:4]]
    assert not served.streams._under_way  # type: ignore[attr-defined]


def test_several_servers_are_asked_in_turn(folder: Path, whole: Target, elsewhere: Target, tmp_path: Path) -> None:
    with serving(elsewhere) as one, serving(load_target(str(folder))) as two:
        trainer = trainer_for(connected(folder, str(one.address), str(two.address)), tmp_path / "served", held_out=0)
        assert trainer._streams is not None and trainer._streams.ahead == 2
        for _ in range(8):
            trainer.train_step()
    alone = trainer_for(whole, tmp_path / "here", held_out=0)
    for _ in range(8):
        alone.train_step()
    same_weights(trainer, alone)


def test_who_asks_which_server() -> None:
    a, b, c, d = (Address("host", port) for port in range(4))
    assert [shared_out([a], rank, 2) for rank in range(2)] == [[[a]], [[a]]]
    assert [shared_out([a, b], rank, 4) for rank in range(4)] == [[[a, b]], [[b, a]], [[a, b]], [[b, a]]]
    assert shared_out([a, b, c, d], 1, 2) == [[b, c, d, a], [d, a, b, c]]
    assert shared_out([a, b, c], 0, 1) == [[a, b, c], [b, c, a], [c, a, b]]


# -- processes, kills and resumes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("runs"), layers=2, hidden=32, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def there(runs_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    address = f"unix:{tmp_path_factory.mktemp('socket') / 's'}"
    with runs.serving(runs_target, address):
        yield Served(runs_target, (address,))


@pytest.fixture(scope="module")
def undisturbed(runs_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose target is in its own process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, served=Served(runs_target)) == [End(0)]
    return folder


def test_killed_and_resumed(undisturbed: Path, there: Served, tmp_path: Path) -> None:
    assert run(tmp_path / "whole", served=there) == [End(0)]
    ended_alike(tmp_path / "whole", undisturbed)
    calls = course(tmp_path / "whole").calls
    for number, share in enumerate((0.55, 0.8)):
        assert run(tmp_path / str(number), [int(calls * share)], served=there) == [End(KILLED)]
        assert run(tmp_path / str(number), served=there) == [End(0)]
        ended_alike(tmp_path / str(number), undisturbed)


@pytest.mark.parametrize("shard", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_with_one_server(there: Served, tmp_path: Path, shard: bool) -> None:
    assert run(tmp_path / "here", [None, None], shard, Served(there.folder)) == [End(0)] * 2
    assert run(tmp_path / "served", [None, None], shard, served=there) == [End(0)] * 2
    ended_alike(tmp_path / "here", tmp_path / "served")


def test_two_processes_lose_their_server_and_find_another(runs_target: Path, tmp_path: Path) -> None:
    first, second = f"unix:{tmp_path / 'first'}", f"unix:{tmp_path / 'second'}"
    assert run(tmp_path / "here", [None, None], served=Served(runs_target)) == [End(0)] * 2
    with runs.serving(runs_target, first):
        ends = runs.together(*lose(tmp_path / "run", Served(runs_target, (first,)), tmp_path / "go"))
    assert [end.code for end in ends] == [1, 1] and not ends[1].message
    assert "is gone" in ends[0].message and "The state of step 3 is saved: --resume goes on from it" in ends[0].message
    assert Checkpoints(tmp_path / "run").steps() == [2, 3]
    with runs.serving(runs_target, second):
        assert run(tmp_path / "run", [None, None], served=Served(runs_target, (second,))) == [End(0)] * 2
    one, two = (Checkpoints(tmp_path / name).read(STEPS) for name in ("here", "run"))
    for kind in ("drafter", "ema"):
        assert all(torch.equal(one[kind][name], two[kind][name]) for name in one[kind])


def lose(folder: Path, served: Served, go: Path) -> tuple[Any, ...]:
    folder.mkdir()
    return (_train_and_lose, (folder, served, go), (folder, served, go))


def _train_and_lose(folder: Path, served: Served, go: Path) -> None:
    """After step 3 nobody answers the second process any more."""
    one = runs.trainer(folder, served=served)
    step = one.train_step

    def lost(*_: Any) -> Any:
        raise FeatureError("the feature server at nowhere is gone")

    def counted() -> Any:
        if one.step == 3 and one.processes.rank == 1:
            one.features.target.forward = lost  # type: ignore[method-assign]
        return step()

    one.train_step = counted  # type: ignore[method-assign]
    one.run(lambda _: None, agenda=BySteps({"report": 3, "validate": 4, "save": 2}))


def test_a_server_that_comes_back(
    folder: Path, whole: Target, elsewhere: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)
    with serving(elsewhere) as server:
        trainer = trainer_for(connected(folder, str(server.address), patience=20), tmp_path / "served")
        for _ in range(3):
            trainer.train_step()
    again = threading.Timer(0.3, lambda: servers.append(serving(elsewhere, server.address)) or servers[0].__enter__())  # type: ignore[func-returns-value]
    servers: list[Any] = []
    again.start()
    with pytest.warns(UserWarning, match="is gone .*; it is tried again"):
        for _ in range(5):
            trainer.train_step()
    servers[0].__exit__(None, None, None)
    alone = trainer_for(whole, tmp_path / "here")
    for _ in range(8):
        alone.train_step()
    same_weights(trainer, alone)


@pytest.mark.parametrize("when", ["training", "validating"])
def test_a_server_that_is_lost_ends_the_run_with_a_saved_state(
    folder: Path, whole: Target, elsewhere: Target, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(elsewhere) as server:
        trainer = trainer_for(connected(folder, str(server.address), patience=0), tmp_path / "run")
        for _ in range(4):
            trainer.train_step()
    assert trainer.checkpoints.steps() == []
    act = trainer.train_step if when == "training" else trainer.validate
    with (
        pytest.warns(UserWarning),
        pytest.raises(FeatureError, match=r"is gone.* The state of step .* is saved: --resume goes"),
    ):
        for _ in range(3):  # what was under way may have come before
            act()
    assert trainer.checkpoints.steps() == [trainer.step]
    with serving(elsewhere) as other:
        resumed = trainer_for(connected(folder, str(other.address)), tmp_path / "run")
        resumed.resume()
        while resumed.step < 8:
            resumed.train_step()
    alone = trainer_for(whole, tmp_path / "here")
    for _ in range(8):
        alone.train_step()
    same_weights(resumed, alone)


def test_numbers_that_are_not_finite_do_not_reach_the_weights(served: PartialTarget, elsewhere: Target, tmp_path: Path) -> None:
    trainer = trainer_for(served, tmp_path)
    trainer.train_step(), trainer.train_step()
    norm = elsewhere.layers[2].input_layernorm.weight
    fine, before = norm.clone(), dict[str, Tensor]()
    norm.fill_(torch.nan)
    with pytest.raises(FeatureError, match=r"not finite.*The state of step \d is saved"):
        for _ in range(3):
            before = {name: t.clone() for name, t in weights(trainer).items()}
            trainer.train_step()
    norm.copy_(fine)
    assert all(torch.equal(before[name], t) for name, t in weights(trainer).items())


# -- settings ----------------------------------------------------------------------------------------------------


def job(folder: Path, data: Path, at: str, **changes: Any) -> Job:
    values = {"target": str(folder), "data": [str(data)], "own_answers": False, "feature_server": at}
    train = {"steps": 3, "batch_tokens": 200, "save_minutes": 60, **changes.pop("train", {})}
    return Job.model_validate(values | {"train": train} | changes)


def test_a_job_from_its_settings(folder: Path, whole: Target, elsewhere: Target, tmp_path: Path) -> None:
    data, said = write_exchanges(tmp_path / "d.jsonl", 60), list[str]()
    results = []
    with serving(elsewhere) as server:
        for name, at in (("served", str(server.address)), ("here", None)):
            trainer = build(job(folder, data, at, drafter={"fusion_rank": 16}), tmp_path / name, False, said.append)  # type: ignore[arg-type]
            trainer.run(lambda _: None)
            results.append(trainer)
        same_weights(*results)
        lines = plan(job(folder, data, str(server.address)), tmp_path / "new").lines
        assert f"; its layers run at {server.address}" in lines["target"]
    saved = read_job(tmp_path / "served" / "run.yaml").feature_server
    assert saved == FeatureServerConfig(at=(str(server.address),))
    with serving(elsewhere) as other:  # servers may have moved
        moved = job(folder, data, str(other.address), drafter={"fusion_rank": 16})
        assert build(moved, tmp_path / "here", True, said.append).step == 3


def test_what_is_refused_at_once(folder: Path, whole: Target, elsewhere: Target, tmp_path: Path) -> None:
    data = write_exchanges(tmp_path / "d.jsonl", 60)
    own = job(folder, data, "host:80", own_answers=True)
    for act in (lambda: plan(own, tmp_path / "x"), lambda: build(own, tmp_path / "x", False, print)):
        with pytest.raises(UsageError, match="at a feature server, which writes no answers: name a server that does"):
            act()
    plan(job(folder, data, "host:80", own_answers=True, answers={"server": "http://host:80"}), tmp_path / "x")
    with pytest.raises(HSpecError, match=r"no feature server at 127.0.0.1:1"):
        build(job(folder, data, "127.0.0.1:1"), tmp_path / "x", False, print)
    other = save_target(tmp_path / "other", layers=4, seed=5)
    with serving(elsewhere) as server, pytest.raises(HSpecError, match="has a target whose weights have the hash"):
        build(job(other, data, str(server.address)), tmp_path / "x", False, print)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("feature_server: nowhere", "'nowhere' is no address of a feature server: give host:port"),
        ("feature_server: []", "at"),
        ("feature_server: {at: [a:1], port: 3}", "known are at, dtype, patience, timeout"),
        ("feature_server: {at: [a:1], dtype: int8}", "dtype"),
        ("train: {features: server}", "features"),
    ],
)
def test_settings_that_are_wrong(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_job(tmp_path / "a.yaml")


def test_ways_to_write_it() -> None:
    for value in ("a:1", ["a:1"], {"at": ["a:1"]}):
        found = Job.model_validate({"feature_server": value})
        assert found.feature_server == FeatureServerConfig(at=("a:1",))
        assert Job.model_validate(yaml.safe_load(json.dumps(found.model_dump(mode="json")))) == found


def test_a_server_in_another_type_is_a_fact_of_the_run(folder: Path, whole: Target, elsewhere: Target, tmp_path: Path) -> None:
    half = load_target(str(folder), dtype=torch.bfloat16)
    with serving(half) as server, serving(elsewhere) as exact:
        loose = trainer_for(connected(folder, str(server.address), dtype="bfloat16"), tmp_path / "run")
        close = trainer_for(whole, tmp_path / "here")
        (a, _), (b, _) = loose.train_step(), close.train_step()
        assert float(a.mean.detach()) == pytest.approx(float(b.mean.detach()), rel=0.02)
        assert not torch.equal(a.total, b.total)
        loose.save()
        resumed = trainer_for(connected(folder, str(server.address), dtype="bfloat16"), tmp_path / "run")
        resumed.resume()
        with pytest.raises(HSpecError, match="has weights of the type 'bfloat16', and this run 'float32'"):
            connected(folder, str(server.address))
        with pytest.raises(HSpecError, match=r"the type in which the target's layers are run was bfloat16 .*, and is None now"):
            trainer_for(connected(folder, str(exact.address)), tmp_path / "run").resume()

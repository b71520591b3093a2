"""Several processes train as one: the same updates, one message when something is wrong, and nobody waits for ever."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.run import get_args_parser
from typer.main import get_command

from hspec.cli import app
from hspec.drafters.methods import METHODS, configuration
from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from hspec.training.blocks import Anchors, cut_blocks, draw_anchors
from hspec.training.checkpoints import Checkpoints
from hspec.training.divergence import DIVERGED_FILE
from hspec.training.examples import ExampleStream, collate
from hspec.training.features import FeatureSource
from hspec.training.initialise import initialise
from hspec.training.loss import BlockLoss
from hspec.training.processes import Processes
from hspec.training.shares import share_of
from tests.tiny import tiny_config, tiny_target
from tests.training.helpers import documents, settings, trainer_for
from tests.training.runs import ROOT, STEPS, TARGET, End, config, course, run, together, trainer

ONE_DOCUMENT = 24
"""Tokens of a batch that has room for one document only, so that the second process has none."""


# -- the same updates --------------------------------------------------------------------------------------------


def states(folder: Path, steps: int = STEPS) -> dict[str, Tensor]:
    state = Checkpoints(folder).read(steps)
    out = {f"{kind} {name}": t for kind in ("drafter", "ema") for name, t in state[kind].items()}
    for index, memory in state["optimiser"]["state"].items():
        out |= {f"{name} {index}": t for name, t in memory.items()}
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process's run of one step, and of all."""
    folder = tmp_path_factory.mktemp("alone")
    for name, changes in (("first", {"steps": 1}), ("all", {}), ("one document", {"steps": 2, "batch_tokens": ONE_DOCUMENT})):
        assert run(folder / name, **changes) == [End(0)]
    return folder


@pytest.mark.parametrize("shard", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_update_as_one_does(alone: Path, tmp_path: Path, shard: bool) -> None:
    assert run(tmp_path / "first", [None, None], shard, steps=1) == [End(0)] * 2
    one, two = states(alone / "first", 1), states(tmp_path / "first", 1)
    assert one.keys() == two.keys() and len(one) > 100
    gradients = [name for name in one if name.startswith("exp_avg ")]  # after one step a multiple of the clipped gradient
    scale = max(float(one[name].abs().max()) for name in gradients)
    for name in gradients:
        assert torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-6 * scale), name
    assert run(tmp_path / "all", [None, None], shard) == [End(0)] * 2
    one, two = states(alone / "all"), states(tmp_path / "all")
    # Where a gradient is all rounding, the optimiser makes a step of it: those few weights apart, everything is the same.
    close = torch.cat([torch.isclose(one[name], two[name], rtol=1e-4, atol=1e-5).flatten().float() for name in one])
    assert float(close.mean()) > 0.995
    logs = [[json.loads(line) for line in (f / "all" / "log.jsonl").read_text().splitlines()] for f in (alone, tmp_path)]
    assert [(r["kind"], r["step"], r["blocks"]) for r in logs[0]] == [(r["kind"], r["step"], r["blocks"]) for r in logs[1]]
    assert [r["loss"] for r in logs[0]] == pytest.approx([r["loss"] for r in logs[1]], rel=1e-3)


@pytest.mark.parametrize("shard", [False, True], ids=["DDP", "FSDP2"])
def test_a_process_without_a_document_takes_part(alone: Path, tmp_path: Path, shard: bool) -> None:
    assert run(tmp_path / "two", [None, None], shard, steps=2, batch_tokens=ONE_DOCUMENT) == [End(0)] * 2
    one, two = states(alone / "one document", 2), states(tmp_path / "two", 2)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-7), name


def test_each_process_keeps_features_of_its_own_documents(tmp_path: Path) -> None:
    assert run(tmp_path / "one", steps=2, features="disk") == [End(0)]
    assert run(tmp_path / "two", [None, None], steps=2, features="disk") == [End(0)] * 2
    assert {p.name for p in (tmp_path / "two").glob("*.bin")} == {"0-features.bin", "1-features.bin"}
    one, two = states(tmp_path / "one", 2), states(tmp_path / "two", 2)
    close = torch.cat([torch.isclose(one[name], two[name], rtol=1e-4, atol=1e-5).flatten().float() for name in one])
    assert float(close.mean()) > 0.995


def test_shares_that_are_saved_are_taken_up_again(tmp_path: Path) -> None:
    """FSDP2, stopped in the middle by force."""
    assert run(tmp_path / "whole", [None, None], True) == [End(0)] * 2
    first, second = run(tmp_path / "parts", [None, course(tmp_path / "whole", 1).calls * 3 // 4], True)
    assert first.code and second.code and Checkpoints(tmp_path / "parts").steps()
    assert run(tmp_path / "parts", [None, None], True) == [End(0)] * 2
    one, two = states(tmp_path / "whole"), states(tmp_path / "parts")
    assert all(torch.equal(one[name], two[name]) for name in one)


# -- whose documents ---------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 5))
def test_shares_are_disjoint_and_together_the_whole(rows: int, count: int) -> None:
    stream = ExampleStream(documents(rows), 10_000, 0)
    batch = stream.batch(0)
    anchors = draw_anchors(batch, 0.5, torch.Generator().manual_seed(rows))
    blocks: list[tuple[int, int]] = []
    for rank in range(count):
        part, own = share_of(batch, anchors, rank, count)
        assert part.tokens.shape[0] == own.positions.shape[0] == own.valid.shape[0] == len(part.documents) > 0
        for row, document in enumerate(part.documents):
            assert torch.equal(part.tokens[row], batch.tokens[batch.documents.index(document)])
            blocks += [(document, int(p)) for p in own.positions[row][own.valid[row]]]
    whole = [(d, int(p)) for row, d in enumerate(batch.documents) for p in anchors.positions[row][anchors.valid[row]]]
    assert sorted(blocks) == sorted(whole)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=4, hidden=48, seed=4)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.derive is not None])
def test_without_a_block_the_same_weights_have_gradients(target: Target, method: str) -> None:
    """What FSDP2 asks of every process: gradients of the same weights, be they zero."""
    shape = configuration(method, tiny_config(target, block_size=4, fusion_rank=48, intermediate_size=64))
    drafter = initialise(shape, target, torch.arange(shape.draft_vocab_size), seed=1)
    loss, batch = BlockLoss(drafter, target, settings()), collate(documents(2))
    anchors = draw_anchors(batch, 0.5, torch.Generator().manual_seed(0))
    seen: list[dict[str, Tensor]] = []
    for valid in (anchors.valid, anchors.valid & False):
        drafter.zero_grad(set_to_none=True)
        blocks = cut_blocks(FeatureSource(target, shape)(batch), batch, Anchors(anchors.positions, valid), 3)
        loss(blocks, settings().weights(0), 0.0).total.backward()
        seen.append({name: p.grad for name, p in drafter.named_parameters() if p.grad is not None})
    assert seen[0].keys() == seen[1].keys()
    assert all(not bool(gradient.any()) for gradient in seen[1].values())


# -- what goes wrong ---------------------------------------------------------------------------------------------


def diverge(folder: Path, rank: int) -> None:
    """Train, until the loss of a process is no number at step 3."""
    one = trainer(folder)
    make = one.learner.loss

    def broken(*given: Any) -> Any:
        total, sums = make(*given)
        return (total * math.nan if one.step == 3 and one.processes.rank == rank else total), sums

    one.learner.loss = broken  # type: ignore[method-assign]
    one.run(lambda _: None)


def test_a_loss_that_is_no_number_ends_all_and_names_its_documents(tmp_path: Path) -> None:
    one = together(diverge, (tmp_path, 1), (tmp_path, 1))
    assert [end.code for end in one] == [1, 1]
    assert one[0].message.startswith("step 3, process 1: the losses of the documents 0-") and not one[1].message
    (record,) = json.loads((tmp_path / DIVERGED_FILE).read_text())["processes"]
    assert record["rank"] == 1 and len(record["documents"]) > 1
    assert Checkpoints(tmp_path).steps() == []  # nothing of it was saved


def differ(folder: Path, count: int, changes: dict[str, Any]) -> None:
    trainer_for(TARGET, folder, config(), count=count, processes=Processes.launched(), taps=[0, 1], **changes)


@pytest.mark.parametrize(
    ("count", "changes", "message"),
    [
        (11, {}, "the hash of the training data is "),
        (12, {"fusion_rank": 8}, "the drafter.fusion_rank is 16 for process 0, and 8"),
    ],
)
def test_processes_with_other_data_or_drafters(tmp_path: Path, count: int, changes: dict[str, Any], message: str) -> None:
    ends = together(differ, (tmp_path, 12, {}), (tmp_path, count, changes))
    assert [end.code for end in ends] == [1, 1]
    assert ends[0].message.startswith(f"the processes of this run disagree: {message}") and not ends[1].message


def test_a_state_is_of_so_many_processes(tmp_path: Path) -> None:
    assert run(tmp_path, [None, None], steps=2) == [End(0)] * 2
    (end,) = run(tmp_path, steps=2)
    assert end.code == 1 and "the number of processes was 2 when the run began, and is 1 now" in end.message


def converse(report: Path) -> None:
    """All that two processes say to each other."""
    processes = Processes.launched()
    rank, heard = processes.rank, {}

    def attempt(name: str, act: Any) -> None:
        try:
            heard[name] = act()
        except HSpecError as error:
            heard[name] = [type(error).__name__, error.exit_code, str(error)]
        except SystemExit as error:
            heard[name] = ["left", error.code]

    def fail(who: int) -> str:
        if rank == who:
            raise UsageError(f"no such thing here ({rank})")
        return "fine"

    order = report / "order"
    attempt("gather", lambda: processes.gather({"rank": rank}))
    attempt("agree", lambda: processes.agree({"setting": {"train": {"steps": 3}}, "data": "a"}))
    attempt("disagree", lambda: processes.agree({"setting": {"train": {"steps": 3 + rank, "seed": 0}}, "data": "a"}))
    attempt("a key more", lambda: processes.agree({"data": "a"} | ({"version": 2} if rank else {})))
    attempt("first fails", lambda: processes.together(lambda: fail(0)))
    attempt("second fails", lambda: processes.together(lambda: fail(1)))
    attempt("none fails", lambda: processes.together(lambda: fail(2)))
    attempt("main", lambda: processes.on_main(lambda: order.write_text("main ")))
    attempt("in turn", lambda: processes.in_turn(lambda: order.write_text(order.read_text() + str(rank))))
    attempt("bug", lambda: processes.together(lambda: 1 // (rank - 1) if rank else 1))
    (report / f"heard-{rank}").write_text(json.dumps(heard))


def test_what_processes_say_to_each_other(tmp_path: Path) -> None:
    ends = together(converse, (tmp_path,), (tmp_path,))
    # A mistake in the program keeps its traceback where it happened.
    assert [end.code for end in ends] == [0, 1]
    first = json.loads((tmp_path / "heard-0").read_text())
    assert first["gather"] == [{"rank": 0}, {"rank": 1}] and first["agree"] is None and first["none fails"] == "fine"
    begin = "the processes of this run disagree: "
    assert first["disagree"][2].startswith(begin + "setting.train.steps is 3 for process 0, and 4 for process 1: start all")
    assert first["a key more"][2].startswith(begin + "version is nothing for process 0, and 2 for process 1")
    assert first["first fails"] == ["UsageError", 2, "no such thing here (0)"]
    assert first["second fails"] == ["HSpecError", 2, "process 1 of 2: no such thing here (1)"]
    assert (tmp_path / "order").read_text() == "main 01"
    assert first["bug"] == ["HSpecError", 1, "process 1 of 2: unexpected ZeroDivisionError: integer division or modulo by zero"]


def test_alone_nothing_is_asked_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    one = Processes.launched("cpu")
    assert one == Processes() and one.main and one.gather(3) == [3] and one.in_turn(lambda: 4) == 4
    one.agree({"a": 1})
    one.on_main(lambda: None)
    with pytest.raises(ZeroDivisionError), one.connected():
        one.together(lambda: 1 // 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--device cuda:1: of several processes each takes the GPU of its rank"):
        Processes.launched("cuda:1")


def test_the_commands_of_the_manual() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^(torchrun|accelerate launch) (.+) -m hspec\.cli train (.+)$", page, re.MULTILINE)
    assert len(commands) == 6
    train = get_command(app).commands["train"]  # type: ignore[attr-defined]
    launchers = {"torchrun": get_args_parser(), "accelerate launch": launch_command_parser()}
    for launcher, own, ours in commands:
        assert {w for w in ours.split() if w.startswith("--")} <= {name for p in train.params for name in p.opts}
        launchers[launcher].parse_args([*own.split(), "-m", "hspec.cli"])  # ends the test on what it does not know

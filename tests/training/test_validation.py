"""What is measured of held-out blocks, and that the blocks are always the same."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request, Result
from hspec.drafters.config import SelectorConfig
from hspec.drafters.drafter import Drafter
from hspec.targets.target import Target
from hspec.training.config import GrowthStage
from hspec.training.examples import Example, ExampleStream
from hspec.training.features import FeatureSource
from hspec.training.initialise import initialise
from hspec.training.loss import BlockLoss
from hspec.training.validation import Meter, Validation, estimated_tau, fixed_anchors
from tests.tiny import tiny_target
from tests.training.helpers import documents, settings, small_config, trainer_for

HELD_OUT = documents(6, seed=9, length=40)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=3, hidden=48)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    config = small_config(target)
    return initialise(config, target, torch.arange(config.draft_vocab_size), seed=1)


def measured(target: Target, drafter: Drafter, examples: list[Example] = HELD_OUT, parts: int = 1, **changes: object) -> Meter:
    config = settings(**changes)
    validation = Validation(examples, config, FeatureSource(target, drafter.config), slots=3)
    loss, meter = BlockLoss(drafter, target, config), Meter()
    for part in range(parts):
        meter.merge(validation(loss, part, parts))
    return meter


def alike(one: Meter, two: Meter) -> None:
    assert one.blocks == two.blocks > 20
    assert one.slots[0].tolist() == two.slots[0].tolist()
    assert torch.allclose(one.slots, two.slots, rtol=1e-4, atol=1e-4)
    assert (one.loss, one.normaliser) == pytest.approx((two.loss, two.normaliser), rel=1e-5)
    assert one.parts == pytest.approx(two.parts, rel=1e-4)
    assert torch.allclose(one.calibration.sums, two.calibration.sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"batch_tokens": 40}, {"batch_tokens": 1000}, {"seed": 5}, {"parts": 3}, {"batch_tokens": 81, "parts": 2}]
)
def test_neither_batches_nor_seed_nor_processes_change_it(target: Target, drafter: Drafter, changes: dict[str, int]) -> None:
    alike(measured(target, drafter, **changes), measured(target, drafter))  # type: ignore[arg-type]


def test_nor_the_order_of_the_documents(target: Target, drafter: Drafter) -> None:
    alike(
        measured(target, drafter, HELD_OUT[::-1], validate_tokens=130), measured(target, drafter, HELD_OUT, validate_tokens=130)
    )


def test_it_takes_as_many_tokens_as_it_may(target: Target, drafter: Drafter) -> None:
    source = FeatureSource(target, drafter.config)
    for budget, count in ((1, 1), (80, 2), (10_000, 6)):
        assert len(Validation(HELD_OUT, settings(validate_tokens=budget), source, 3).stream.examples) == count


def test_anchors_depend_on_the_document_alone() -> None:
    stream = ExampleStream(HELD_OUT, 400, 0)
    batch = stream.batch(0)
    anchors = fixed_anchors(batch, stream.examples)
    seen = {}
    for row, document in enumerate(batch.documents):
        seen[stream.examples[document].id] = anchors.positions[row][anchors.valid[row]].tolist()
        assert set(anchors.positions[row].tolist()) == set(seen[stream.examples[document].id])  # padding repeats
    alone = ExampleStream(HELD_OUT, 1, 3)
    for index in range(len(HELD_OUT)):
        batch = alone.batch(index)
        anchors = fixed_anchors(batch, alone.examples)
        assert seen.pop(alone.examples[batch.documents[0]].id) == anchors.positions[0].tolist()
    assert not seen


def test_the_report(target: Target, drafter: Drafter) -> None:
    meter = measured(target, drafter)
    report = json.loads(json.dumps(meter.report()))
    parts = report["parts"]
    assert set(parts) == {"ce", "kl", "tv", "confidence"}
    assert report["loss"] == pytest.approx(0.1 * parts["ce"] + 0.9 * parts["tv"] + parts["confidence"], rel=1e-3)
    assert len(report["acceptance"]) == len(report["agreement"]) == 3
    assert report["conditional"]["sampling"][0] == report["acceptance"][0]  # everything reaches the first slot
    assert report["conditional"]["greedy"][0] == report["agreement"][0]
    assert report["tau_greedy"] == pytest.approx(estimated_tau(report["conditional"]["greedy"]), abs=1e-3)
    assert sum(report["calibration"]["count"]) == int(meter.slots[0].sum())


def test_a_drafter_without_confidence_has_no_calibration(target: Target) -> None:
    config = small_config(target, confidence_head=False, confidence_with_markov=False)
    plain = initialise(config, target, torch.arange(config.draft_vocab_size), seed=1)
    report = measured(target, plain).report()
    assert "calibration" not in report and "confidence" not in report["parts"]


def test_an_empty_meter_reports() -> None:
    report = Meter().report()
    assert (report["loss"], report["acceptance"], report["tau_greedy"]) == (0.0, [], 1.0)


def test_tau_from_acceptance() -> None:
    assert estimated_tau([]) == 1.0
    assert estimated_tau([0.5, 0.5, 1.0]) == pytest.approx(1 + 0.5 + 0.25 + 0.25)


def test_slots_that_are_accepted_together_are_not_taken_for_independent() -> None:
    """Half of the blocks are accepted whole, half not at all: tau is 2, where the product of mean rates says 1.75."""
    meter = Meter(slots=torch.tensor([[2, 2], [1, 1], [1, 1], [2, 1], [1, 1], [2, 1], [1, 1]], dtype=torch.float64))
    report = meter.report()
    assert report["acceptance"] == [0.5, 0.5] and report["tau_sampling"] == report["tau_greedy"] == 2.0


def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "estimate_against_decoding.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


HEADS: dict[str, dict[str, Any]] = {
    "markov": {},
    "selector": {"head": SelectorConfig(rank=8, candidates=24), "confidence_head": False, "confidence_with_markov": False},
}


@pytest.fixture(scope="module", params=HEADS)
def trained(request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """A drafter that has learnt some of what the target says."""
    learnt = [
        Example(str(i), [*r.prompt, *a.tokens], [False] * 7 + [True] * 40) for i, (r, a) in enumerate(answered(target, 24, 40))
    ]
    growth = (GrowthStage(start=0.0, slots=3, density=1.0),)
    config = settings(steps=60, growth=growth, batch_tokens=300, learning_rate=1e-2, warm_kl_until=1.0, tv_from=1.0)
    run = trainer_for(target, tmp_path_factory.mktemp("trained"), config, draft_vocab=211, **HEADS[request.param])
    run.stream = ExampleStream(learnt, 300, 0)
    for _ in range(60):
        run.train_step()
    return run.drafter.eval().requires_grad_(False)


def answered(
    target: Target, count: int, tokens: int, drafter: Drafter | None = None, temperature: float = 0.0
) -> list[tuple[Request, Result]]:
    params = [SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=i) for i in range(count)]
    requests = [Request(tuple(e.tokens[:7]), params[i]) for i, e in enumerate(documents(count, seed=5))]
    return list(zip(requests, Engine(target, drafter).generate(requests), strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_estimate_is_what_decoding_reaches(target: Target, trained: Drafter, temperature: float) -> None:
    """At decoding's own anchors: greedily to the draft, but for the block that an answer's end cuts; when sampling on average."""
    module, greedy = benchmark(), temperature == 0
    loss, source = BlockLoss(trained, target, settings()), FeatureSource(target, trained.config)
    pairs = answered(target, 12 if greedy else 40, 61, trained, temperature)
    compared = [module.compare(loss, source, request, result, 3) for request, result in pairs]
    assert sum(c.steps for c in compared) > 100
    if greedy:
        for one, (_, result) in zip(compared, pairs):
            assert [n for n in one.own.slots[6].tolist() if n] == [n for n in result.counters.accepted if n]
    out = module.summary(compared, greedy)
    assert out["decoded"] > 1.15
    assert out["own anchors"]["over decoded"] == pytest.approx(1.0, abs=0.03)
    assert out["own anchors"]["interval"][0] <= 1.02

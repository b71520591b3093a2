"""The loss of a batch: what it is made of, that it pools, and who learns from which part."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from hspec.drafters.drafter import Drafter
from hspec.drafters.methods import METHODS, configuration
from hspec.targets.target import Target
from hspec.training.blocks import Anchors, BlockBatch, cut_blocks, draw_anchors
from hspec.training.config import TrainConfig
from hspec.training.examples import Batch, Example, collate
from hspec.training.features import FeatureSource
from hspec.training.initialise import initialise
from hspec.training.loss import BlockLoss, LossSums
from hspec.training.objective import LossWeights, dpace_weights, slot_decay
from tests.tiny import tiny_target
from tests.training.helpers import documents, settings, small_config

K = 3
WEIGHTS = LossWeights(0.1, 0.3, 0.4, 0.2)
DOCUMENTS = documents(6, seed=3)
TRAINED = [name for name, method in METHODS.items() if method.derive is not None]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=4, hidden=48, seed=4)


def new_drafter(target: Target, method: str = "hspec") -> Drafter:
    config = configuration(method, small_config(target, fusion_rank=48, intermediate_size=64))
    drafter = initialise(config, target, torch.arange(config.draft_vocab_size), seed=1)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():  # what starts at zero would hide what it does
        for p in drafter.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.05)
    return drafter


def blocks_of(target: Target, drafter: Drafter, examples: list[Example], seed: int = 0) -> BlockBatch:
    """The same anchors for a document in whatever company."""
    drawn = []
    for e in examples:
        alone = collate([e])
        drawn.append(draw_anchors(alone, 0.6, torch.Generator().manual_seed(len(e.tokens) + seed)))
    width = max(a.positions.shape[1] for a in drawn)

    def wide(t: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(t, (0, width - t.shape[1]), value=fill)

    anchors = Anchors(torch.cat([wide(a.positions, 2) for a in drawn]), torch.cat([wide(a.valid, 0) for a in drawn]))
    batch: Batch = collate(examples)
    return cut_blocks(FeatureSource(target, drafter.config)(batch), batch, anchors, K)


def sums_of(target: Target, drafter: Drafter, examples: list[Example], done: float = 0.5, **changes: object) -> LossSums:
    return BlockLoss(drafter, target, settings(**changes))(blocks_of(target, drafter, examples), WEIGHTS, done)


def gradients(drafter: Drafter, total: Tensor) -> dict[str, Tensor]:
    drafter.zero_grad(set_to_none=True)
    total.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in drafter.named_parameters()}


# -- pooling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("method", TRAINED)
def test_the_sums_of_parts_are_those_of_the_whole(target: Target, method: str, weights: str) -> None:
    """So that several processes, each with a part of a batch, make the update of one that has all of it."""
    drafter = new_drafter(target, method)
    whole = sums_of(target, drafter, DOCUMENTS, position_weights=weights)
    joint = gradients(drafter, whole.total)
    parts = [sums_of(target, drafter, part, position_weights=weights) for part in (DOCUMENTS[:1], DOCUMENTS[1:])]
    apart = [gradients(drafter, part.total) for part in parts]
    assert float(whole.total.detach()) == pytest.approx(sum(float(p.total.detach()) for p in parts), rel=1e-4)
    assert float(whole.normaliser) == pytest.approx(sum(float(p.normaliser) for p in parts), rel=1e-5)
    for name, value in whole.parts.items():
        assert float(value) == pytest.approx(sum(float(p.parts[name]) for p in parts), rel=1e-4), name
    largest = max(float(g.abs().max()) for g in joint.values())
    for name, g in joint.items():
        assert torch.allclose(g, apart[0][name] + apart[1][name], rtol=1e-3, atol=1e-4 * largest), name


def test_blocks_without_a_counted_slot_are_no_loss(target: Target) -> None:
    drafter = new_drafter(target)
    blocks = blocks_of(target, drafter, DOCUMENTS)
    sums = BlockLoss(drafter, target, settings())(replace(blocks, weight=torch.zeros_like(blocks.weight)), WEIGHTS, 0.5)
    sums.total.backward()
    assert (float(sums.total.detach()), float(sums.normaliser), sums.k) == (0.0, 0.0, 0)


# -- what it is made of ------------------------------------------------------------------------------------------


def test_the_total_is_its_parts(target: Target) -> None:
    sums = sums_of(target, new_drafter(target), DOCUMENTS, confidence=0.7)
    parts = {name: float(value) for name, value in sums.parts.items()}
    kl, tv = WEIGHTS.of_divergences(sums.stats.acceptance)
    decay = slot_decay(K, 4.0)[sums.slots]
    hybrid = float(((kl - WEIGHTS.kl) * sums.stats.kl + (tv - WEIGHTS.tv) * (1 - sums.stats.acceptance)) @ decay)
    expected = 0.1 * parts["ce"] + 0.3 * parts["kl"] + 0.4 * parts["tv"] + hybrid + 0.7 * parts["confidence"]
    assert float(sums.total.detach()) == pytest.approx(expected, rel=1e-5)
    assert parts["tv"] == pytest.approx(float((1 - sums.stats.acceptance) @ decay), rel=1e-5)
    assert float(sums.normaliser) == pytest.approx(float(decay.sum()), rel=1e-6)
    assert float(sums.mean.detach()) == pytest.approx(float(sums.total.detach()) / float(sums.normaliser))


@pytest.mark.parametrize(("method", "own"), [("domino", "base"), ("dflash2", "unary"), ("dblast", "prior")])
def test_methods_report_what_is_their_own(target: Target, method: str, own: str) -> None:
    sums = sums_of(target, new_drafter(target, method), DOCUMENTS)
    assert own in sums.parts and not sums.parts[own].requires_grad and float(sums.parts[own]) > 0


def test_dpace_weighs_by_the_acceptance_of_the_block(target: Target) -> None:
    drafter = new_drafter(target)
    plain = sums_of(target, drafter, DOCUMENTS, confidence=0.0)
    sums = sums_of(target, drafter, DOCUMENTS, confidence=0.0, position_weights="dpace", dpace_alpha=0.3)
    expected, block = 0.0, []
    for slot, acceptance, loss in zip(plain.slots.tolist(), plain.stats.acceptance, plain.stats.loss):
        if slot == 0 and block:
            expected += dpace_of(block)
            block = []
        block.append((float(acceptance), float(loss)))
    expected += dpace_of(block)
    assert float(sums.total.detach()) == pytest.approx(expected, rel=1e-4)
    assert float(sums.total.detach()) != pytest.approx(float(plain.total.detach()), rel=1e-2)
    assert float(sums.normaliser) == float(plain.normaliser)  # not of the weights: their mass counts
    assert {n: float(v) for n, v in sums.parts.items()} == pytest.approx({n: float(v) for n, v in plain.parts.items()})


def dpace_of(block: list[tuple[float, float]]) -> float:
    weights = dpace_weights(torch.tensor([[a for a, _ in block]]), 0.3)[0].tolist()
    return sum(w * loss for w, (_, loss) in zip(weights, block, strict=True))


def test_ce_is_told_the_argmax_or_the_token_of_the_text(target: Target) -> None:
    drafter = new_drafter(target)
    blocks = blocks_of(target, drafter, DOCUMENTS)
    counted = blocks.weight.flatten() > 0
    tokens = blocks.tokens.flatten()[counted]
    argmax = target.logits(blocks.hidden[blocks.rows.flatten()[counted]]).argmax(-1)
    predicted = drafter.predict(blocks.context_for(drafter), blocks.previous)
    hidden, features = predicted.hidden.flatten(0, 1)[counted], predicted.features
    assert features is not None
    logits = hidden @ drafter.head.T + features.flatten(0, 1)[counted] @ drafter.causal.w2.weight.T  # type: ignore[union-attr, operator]
    log_q = logits.detach().log_softmax(-1)
    for label, wanted in (("argmax", argmax), ("data", tokens)):
        sums = BlockLoss(drafter, target, settings(ce_label=label))(blocks, WEIGHTS, 0.5)
        for ce, y, row in zip(sums.stats.ce, wanted, log_q):
            at = (drafter.draft_ids == y).nonzero()
            assert float(ce) == pytest.approx(-float(row[at[0, 0]]) if len(at) else 0.0, rel=1e-3, abs=1e-4)
    assert int((tokens != argmax).sum()) > 0


@pytest.mark.parametrize("method", TRAINED)
def test_reach_is_the_product_of_what_stands_before(target: Target, method: str) -> None:
    sums = sums_of(target, new_drafter(target, method), DOCUMENTS)
    first = sums.slots == 0
    assert torch.allclose(sums.reach[first], torch.ones(int(first.sum())))
    assert bool((sums.reach >= 0).all()) and bool((sums.reach <= 1 + 1e-6).all())
    assert set(sums.reach_greedy.tolist()) <= {0.0, 1.0} and bool((sums.reach_greedy[first] == 1).all())
    for i in range(1, len(sums.slots)):
        if sums.slots[i]:
            assert float(sums.reach_greedy[i]) == float(sums.reach_greedy[i - 1]) * float(sums.stats.agreement[i - 1])
            if method != "dblast":  # there it is a mixture's
                assert float(sums.reach[i]) == pytest.approx(
                    float(sums.reach[i - 1]) * float(sums.stats.token_ratio[i - 1]), abs=1e-6
                )


# -- confidence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hspec", "dspark"])
def test_nothing_but_its_head_learns_from_the_confidence(target: Target, method: str) -> None:
    drafter = new_drafter(target, method)
    without = gradients(drafter, sums_of(target, drafter, DOCUMENTS, confidence=0.0).total)
    with_it = gradients(drafter, sums_of(target, drafter, DOCUMENTS, confidence=5.0).total)
    own = {n for n in without if n.startswith("confidence.")}
    assert own and all(bool(without[n].abs().max() == 0) and bool(with_it[n].abs().max() > 0) for n in own)
    for name in without.keys() - own:
        assert torch.equal(without[name], with_it[name]), name


def test_the_confidences_are_those_of_the_head(target: Target) -> None:
    sums = sums_of(target, new_drafter(target), DOCUMENTS)
    assert sums.confidence is not None and not sums.confidence.requires_grad
    bce = -(sums.stats.acceptance * sums.confidence.log() + (1 - sums.stats.acceptance) * (1 - sums.confidence).log())
    assert float(sums.parts["confidence"]) == pytest.approx(float(bce @ slot_decay(K)[sums.slots]), rel=1e-4)
    assert sums_of(target, new_drafter(target), DOCUMENTS, confidence=0.0).confidence is None


# -- settings ----------------------------------------------------------------------------------------------------


def test_the_terms_weights_are_in_the_settings() -> None:
    default = TrainConfig(steps=100)
    assert default.weights(0) == LossWeights(0.1, 0.9, 0.0) and default.weights(100) == LossWeights(0.1, 0.0, 0.9)
    half = default.weights(60)
    assert (half.kl, half.tv) == (pytest.approx(0.45), pytest.approx(0.45))
    lk = TrainConfig(ce=0.1, lk=0.9, lk_eta=2.0)
    assert lk.weights(0) == lk.weights(999) == LossWeights(0.1, 0.0, 0.0, 0.9, 2.0)
    partly = TrainConfig(steps=100, ce=0.1, lk=0.5).weights(0)
    assert (partly.kl, partly.tv, partly.lk) == (pytest.approx(0.4), 0.0, 0.5)
    fixed = TrainConfig(ce=0.0, kl=0.3, tv=2.0)
    assert fixed.weights(0) == fixed.weights(1000) == LossWeights(0.0, 0.3, 2.0)
    assert TrainConfig(tv=0.9).weights(0) == LossWeights(0.1, 0.0, 0.9)


def test_the_settings_that_the_page_shows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
    shown = [TrainConfig(**yaml.safe_load(text)) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    default, hybrid, paper, dpace = shown
    assert default == TrainConfig()
    assert hybrid.weights(0) == LossWeights(0.1, 0.0, 0.0, 0.9)
    assert paper.weights(0) == LossWeights(0.1, 0.0, 0.9)
    assert dpace.weights(0) == LossWeights(1.0, 0.0, 0.0) and (dpace.position_weights, dpace.ce_label) == ("dpace", "data")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ce": 0.5, "lk": 0.6}, "leave nothing of 1"),
        ({"ce": 0.0, "kl": 0.0}, "all 0"),
        ({"ce_label": "text"}, "argmax"),
        ({"position_weights": "pace"}, "dpace"),
        ({"dpace_alpha": 0.0}, "greater than 0"),
        ({"lk_weight": 1.0}, "lk_weight"),
    ],
)
def test_settings_that_make_no_objective_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**given)  # type: ignore[arg-type]


def test_settings_of_older_runs_are_read() -> None:
    """As they were saved before there was a choice of terms: they mean what they meant."""
    old = {
        "steps": 600, "batch_tokens": 256, "ce": 0.1, "warm_kl_until": 0.5, "tv_from": 0.7, "gamma": 4.0, "confidence": 1.0,
        "objective_chunk": 128, "seed": 3, "growth": [{"start": 0.0, "slots": 4, "density": 0.5}],
    }  # fmt: skip
    config = TrainConfig.model_validate(old)
    assert (config.ce_label, config.position_weights, config.trackers) == ("argmax", "decay", ())
    assert config.weights(0) == LossWeights(0.1, 0.9, 0.0) and config.weights(599) == LossWeights(0.1, 0.0, 0.9)
    assert TrainConfig.model_validate(config.model_dump()) == config

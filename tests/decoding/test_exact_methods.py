"""Sampled drafting is exact for every method: by enumeration, what is emitted is distributed as the target's own text.

Every draft that a method could make behind one anchor is made, by its own ``propose`` with a chooser that is told what to draw;
the acceptance rule is integrated over its random numbers. Nothing is random here, and nothing is estimated.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.decoding.verify import verify_sampled
from hspec.drafters.config import AttentionConfig, LatentConfig, MambaConfig, MarkovConfig, ParallelConfig, TargetIdentity
from hspec.drafters.context import Draft, DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.family import make_drafter
from hspec.drafters.methods import configuration
from hspec.targets.cache import KVView
from tests.methods import TRAINED
from tests.tiny import randomise

VOCABULARY, HIDDEN, LAYERS, LENGTH, K = 6, 16, 4, 7, 2
DRAFT_IDS = [0, 1, 3, 4, 5]
TEMPERATURE = 0.7

Joint = dict[tuple[int, ...], float]
Fault = Callable[[Drafter, DraftContext, Tensor, Tensor], Tensor]
"""Drafter, context, tokens ``[k]``, the true q ``[k, draft vocabulary]`` -> another q."""


# -- a drafter, what it sees, and a target -----------------------------------------------------------------------


def make(name: str, **changes: Any) -> Drafter:
    """A random drafter of a method on a vocabulary of six tokens, of which five can be drafted."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    base = ParallelConfig(
        target=TargetIdentity(name="six", family="llama", layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCABULARY),
        pattern=["mamba", "mlp", "attention", "mlp"], hidden_size=HIDDEN, intermediate_size=24, block_size=K + 1,
        mamba=MambaConfig(heads=2, head_dim=8, groups=2), taps=[1, 2, 3], kv_layers=[3], fusion_rank=HIDDEN,
        attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8, window=4, rope=[rope]), draft_vocab_size=len(DRAFT_IDS),
        head=MarkovConfig(rank=4),
    )  # fmt: skip
    config = configuration(name, base)
    config = type(config).model_validate({**config.model_dump(), **changes})
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    head = 0.4 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
    ids = torch.tensor(DRAFT_IDS)
    drafter = make_drafter(config, embedding, head[ids], ids)
    randomise(drafter, 5)
    return drafter.eval().requires_grad_(False)


def context_of(drafter: Drafter) -> DraftContext:
    generator = torch.Generator().manual_seed(4)
    taps = torch.randn(1, LENGTH, len(drafter.taps), HIDDEN, generator=generator)
    keys, values = ([torch.randn(1, 1, LENGTH, 8, generator=generator) for _ in range(LAYERS)] for _ in range(2))
    memory = None
    if drafter.memory_shape is not None:
        following = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
        following[0, -1] = 2
        kept = drafter.remember(taps, following, torch.arange(LENGTH)[None], None)
        memory = KVView([k for k, _ in kept], [v for _, v in kept], (LENGTH,))
    return DraftContext(torch.tensor([[2]]), torch.tensor([[LENGTH]]), taps[:, -1:], KVView(keys, values, (LENGTH,)), memory)


def target_p(prefix: tuple[int, ...]) -> Tensor:
    """The target's distribution behind some tokens; it depends on all of them, and one token is impossible."""
    generator = torch.Generator().manual_seed(1 + sum((t + 1) * 7**i for i, t in enumerate(prefix)))
    logits = 1.5 * torch.randn(VOCABULARY, generator=generator)
    logits[(sum(prefix) + len(prefix)) % VOCABULARY] = float("-inf")
    return logits.softmax(-1)


# -- every draft, and every verdict on it ------------------------------------------------------------------------


class Told:
    """Draws what it is told, and keeps what that was drawn from."""

    def __init__(self, drafts: Sequence[int], z: int):
        self.drafts, self.z, self.chance, self.values = drafts, z, 1.0, 1

    def __call__(self, slot: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        q = (logits / TEMPERATURE).softmax(-1)
        self.chance *= float(q[0, self.drafts[slot - 1]])
        return torch.tensor([self.drafts[slot - 1]]), q

    def latent(self, logits: Tensor) -> Tensor:
        self.values = logits.shape[-1]
        self.chance *= float(logits.softmax(-1)[0, self.z])
        return torch.tensor([self.z])


def every_draft(drafter: Drafter, context: DraftContext) -> Iterator[tuple[float, Draft]]:
    """What can be drafted, and how likely it is."""
    head = getattr(drafter.config, "head", None)
    values = head.values if isinstance(head, LatentConfig) else 1
    for z in range(values):
        for drafts in itertools.product(range(len(DRAFT_IDS)), repeat=K):
            told = Told(drafts, z)
            draft = drafter.propose(context, K, told)
            assert draft.tokens.tolist() == [[DRAFT_IDS[d] for d in drafts]]
            if told.chance > 0:
                yield told.chance, draft


def steps(*breaks: Tensor) -> list[tuple[float, float]]:
    """Intervals of [0, 1) between the breaks, as (a point within, length): a function that changes at these only is integrated
    exactly by its values there."""
    ends = sorted({0.0, 1.0, *(float(b) for b in torch.cat([b.double().flatten() for b in breaks]) if 0 < float(b) < 1)})
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(ends) if b - a > 1e-12]


def emitted(drafter: Drafter, fault: Fault | None = None) -> Joint:
    """The distribution of the K + 1 tokens behind the anchor; where a step emits fewer, the target draws the rest."""
    context, ids, joint = context_of(drafter), torch.tensor(DRAFT_IDS), defaultdict[tuple[int, ...], float](float)

    def finish(tokens: tuple[int, ...], weight: float) -> None:
        if len(tokens) == K + 1:
            joint[tokens] += weight
            return
        for token, share in enumerate(target_p(tokens).tolist()):
            if share:
                finish((*tokens, token), weight * share)

    for chance, draft in every_draft(drafter, context):
        assert draft.probabilities is not None
        drafts, q = draft.tokens[0].tolist(), draft.probabilities[0]
        if fault is not None:
            q = fault(drafter, context, draft.tokens[0], q)
        p = torch.stack([target_p(tuple(drafts[:i])) for i in range(K + 1)])
        for weight, accepted, token in verdicts(p, drafts, q, ids):
            finish((*drafts[:accepted], token), chance * weight)
    return joint


def verdicts(p: Tensor, drafts: list[int], q: Tensor, ids: Tensor) -> Iterator[tuple[float, int, int]]:
    """Every outcome of the acceptance rule, with its probability."""
    slot = torch.searchsorted(ids, torch.tensor(drafts))
    ratios = [p[i, draft].double() / q[i, slot[i]].double() for i, draft in enumerate(drafts)]
    residuals = p[:K].double()
    residuals[:, ids] -= q.double()
    residuals.clamp_min_(0)
    cumulative = torch.cat((residuals, p.double())).cumsum(-1)
    draws = steps(*(row / row[-1] for row in cumulative if row[-1] > 0))
    for accept in itertools.product(*(steps(ratio[None]) for ratio in ratios)):
        points = [u for u, _ in accept]
        weight = float(torch.tensor([length for _, length in accept], dtype=torch.float64).prod())
        for u, length in draws:
            verdict = verify_sampled(p, drafts, q, ids, points, [u] * (K + 1))
            yield weight * length, verdict.accepted, verdict.token


def of_the_target() -> Joint:
    joint = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=K + 1):
        weight = 1.0
        for i, token in enumerate(tokens):
            weight *= float(target_p(tokens[:i])[token])
        joint[tokens] = weight
    return joint


def distance(joint: Joint) -> float:
    """Total variation from the target's own text."""
    own = of_the_target()
    assert sum(joint.values()) == pytest.approx(1.0, abs=1e-5)
    return 0.5 * sum(abs(own.get(t, 0.0) - joint.get(t, 0.0)) for t in {*own, *joint})


# -- the claim ---------------------------------------------------------------------------------------------------

SELECTOR = {"head": {"kind": "selector", "rank": 4, "candidates": 3}}
LATENT = {"head": {"kind": "latent", "values": 3, "rank": 4}}
CHANGES: dict[str, dict[str, Any]] = {"dflash2": SELECTOR, "hspec-dflash2": SELECTOR, "dblast": LATENT}


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_emitted_is_the_targets(name: str) -> None:
    assert distance(emitted(make(name, **CHANGES.get(name, {})))) < 1e-5


@pytest.mark.parametrize("variant", ["gated", "recurrent"])
def test_the_other_markov_heads(variant: str) -> None:
    for name in ("hspec", "dspark"):
        drafter = make(name, head={"kind": "markov", "rank": 4, "variant": variant})
        assert distance(emitted(drafter)) < 1e-5


def test_drafts_do_depend_on_what_was_drafted_before() -> None:
    """Or the walks above would have been independent slots."""
    for name, depends in (("hspec", True), ("domino", True), ("dflash2", True), ("dflash", False), ("eagle3", True)):
        drafter = make(name, **CHANGES.get(name, {}))
        context = context_of(drafter)
        second = {
            first: drafter.propose(context, K, Told((first, 0), 0)).probabilities[0, 1]  # type: ignore[index]
            for first in range(len(DRAFT_IDS))
        }
        assert all(torch.allclose(second[0], q) for q in second.values()) != depends, name


# -- what would be wrong is seen ---------------------------------------------------------------------------------


def over_all_tokens(drafter: Drafter, context: DraftContext, tokens: Tensor, q: Tensor) -> Tensor:
    """As if the selector's candidates had shared the probability with the tokens that it does not draw from."""
    return (q + 0.1) / (q + 0.1).sum(-1, keepdim=True)


def without_the_walk(drafter: Drafter, context: DraftContext, tokens: Tensor, q: Tensor) -> Tensor:
    """The unary logits' distribution, not what the tokens were drawn from."""
    slots, first = drafter._slots(K)  # type: ignore[operator]
    hidden = drafter.backbone(context, slots)[0, 0, first:]  # type: ignore[operator]
    return (drafter.base_logits(hidden) / TEMPERATURE).softmax(-1)


def of_the_mixture(drafter: Drafter, context: DraftContext, tokens: Tensor, q: Tensor) -> Tensor:
    """The average over the latent, not the distribution given what was drawn."""
    total = torch.zeros_like(q)
    for z in range(3):
        told = Told([DRAFT_IDS.index(t) for t in tokens.tolist()], z)
        draft = drafter.propose(context, K, told)
        assert draft.probabilities is not None
        share = told.chance / float(
            draft.probabilities[0].gather(-1, torch.searchsorted(torch.tensor(DRAFT_IDS), tokens)[:, None]).prod()
        )
        total += share * draft.probabilities[0]
    return total


def at_another_temperature(drafter: Drafter, context: DraftContext, tokens: Tensor, q: Tensor) -> Tensor:
    return (q.log() * TEMPERATURE).softmax(-1)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("dflash2", over_all_tokens),
        ("dflash2", without_the_walk),
        ("hspec", without_the_walk),
        ("domino", without_the_walk),
        ("dblast", of_the_mixture),
        ("dflash", at_another_temperature),
        ("eagle3", at_another_temperature),
    ],
)
def test_a_wrong_q_is_seen(name: str, fault: Fault) -> None:
    drafter = make(name, **CHANGES.get(name, {}))
    assert distance(emitted(drafter)) < 1e-5
    assert distance(emitted(drafter, fault)) > 1e-3

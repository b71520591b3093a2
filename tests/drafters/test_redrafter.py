"""ReDrafter: its cell against the formulas written out, its beam against trying everything, and both in the loop."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Counters, Request, Result
from hspec.drafters.checkpoint import build_drafter
from hspec.drafters.config import ReDrafterConfig
from hspec.drafters.context import DraftContext
from hspec.drafters.redrafter import ReDrafter
from hspec.errors import UsageError
from hspec.targets.cache import KVView
from hspec.targets.target import Target
from tests.tiny import randomise, tiny_config, tiny_target

K, BATCH = 4, 3
SIZE: dict[str, Any] = {"layers": 3, "hidden": 48}
NOTHING = KVView([], [], (0,) * BATCH)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", **SIZE)


def make(target: Target, beam: int = 1, vocabulary: int = 101, seed: int = 0, **fields: Any) -> ReDrafter:
    """With random weights; all ids can be drafted, or every second one."""
    config = ReDrafterConfig(
        target=tiny_config(target).target,
        hidden_size=target.hidden_size,
        taps=[1, len(target.layers)],
        draft_vocab_size=vocabulary,
        block_size=K,
        beam=beam,
        **fields,
    )
    step = 1 if vocabulary == target.vocab_size else 2
    drafter = build_drafter(config, target, step * torch.arange(vocabulary))
    assert isinstance(drafter, ReDrafter)
    randomise(drafter, seed)
    return drafter.eval().requires_grad_(False)


def with_beam(target: Target, drafter: ReDrafter, beam: int) -> ReDrafter:
    """The same weights."""
    other = make(target, beam, drafter.config.draft_vocab_size, mlp_layers=drafter.config.mlp_layers)
    other.load_state_dict(drafter.state_dict())
    return other


def make_context(target: Target, anchors: int = 1, seed: int = 1) -> DraftContext:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(211, (BATCH, anchors), generator=generator)
    taps = torch.randn(BATCH, anchors, 2, target.hidden_size, generator=generator)
    return DraftContext(tokens, torch.full((BATCH, anchors), 9), taps, NOTHING)


# -- the cell ------------------------------------------------------------------------------------------------------------


class Naive:
    """Cheng et al. (2024), by hand, one number at a time: log-probabilities of the next token behind some tokens."""

    def __init__(self, drafter: ReDrafter):
        self.weights = {name: w.double().tolist() for name, w in drafter.state_dict().items()}
        self.embedding, self.head = drafter.embedding.double().tolist(), drafter.head.double().tolist()
        self.mlp_layers, self.eps = drafter.config.mlp_layers, drafter.config.rms_norm_eps

    def linear(self, name: str, x: Sequence[float]) -> list[float]:
        bias = self.weights.get(f"{name}.bias")
        out = [sum(w * v for w, v in zip(row, x, strict=True)) for row in self.weights[f"{name}.weight"]]
        return out if bias is None else [o + b for o, b in zip(out, bias, strict=True)]

    def norm(self, name: str, x: Sequence[float]) -> list[float]:
        scale = math.sqrt(sum(v * v for v in x) / len(x) + self.eps)
        return [w * v / scale for w, v in zip(self.weights[f"{name}.weight"], x, strict=True)]

    def log_probabilities(self, last_hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """``[draft vocabulary]`` behind an anchor (the first of ``tokens``) and drafts."""
        state = self.embedding[tokens[0]]
        for token in tokens[1:]:
            sums = zip(self.linear("recurrent", state), self.linear("token", self.embedding[token]), strict=True)
            state = [silu(u + w) for u, w in sums]
        x = [*state, *self.norm("hidden_norm", last_hidden.double().tolist())]
        for i in range(self.mlp_layers):
            x = [v + silu(w) for v, w in zip(x, self.linear(f"layers.{i}", x), strict=True)]
        read = self.norm("norm", self.linear("out", x))
        logits = [sum(w * v for w, v in zip(row, read, strict=True)) for row in self.head]
        return torch.tensor(logits).log_softmax(-1)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize("mlp_layers", [0, 2])
def test_the_cell_is_the_formulas(target: Target, mlp_layers: int) -> None:
    drafter = make(target, vocabulary=9, mlp_layers=mlp_layers)
    context = make_context(target, anchors=2)
    previous = torch.randint(211, (BATCH, 2, K))
    previous[..., 0] = context.anchors
    predicted = drafter.base_logits(drafter.predict(context, previous).hidden).log_softmax(-1).view(BATCH, 2, K, -1)
    naive = Naive(drafter)
    for b, n, slot in itertools.product(range(BATCH), range(2), range(K)):
        wanted = naive.log_probabilities(context.taps[b, n, -1], previous[b, n, : slot + 1].tolist())
        torch.testing.assert_close(predicted[b, n, slot], wanted, atol=1e-5, rtol=1e-5)


def test_a_slot_depends_on_no_later_token(target: Target) -> None:
    drafter, context = make(target), make_context(target)
    previous = torch.randint(211, (BATCH, 1, K))
    before = drafter.predict(context, previous).hidden
    previous[..., 2] += 1
    after = drafter.predict(context, previous).hidden
    assert torch.equal(after[:, :2], before[:, :2]) and not torch.isclose(after[:, 2:], before[:, 2:]).any(-1).all()


def test_the_chain_takes_the_best_of_each_slot(target: Target) -> None:
    drafter, context = make(target, vocabulary=9), make_context(target)
    draft, naive = drafter.propose(context, K), Naive(drafter)
    assert draft.trees is None and draft.probabilities is None
    for b, tokens in enumerate(draft.tokens.tolist()):
        known = context.anchors[b].tolist()
        for token in tokens:
            assert token == int(drafter.draft_ids[naive.log_probabilities(context.taps[b, 0, -1], known).argmax()])
            known.append(token)


def test_k_has_its_limits(target: Target) -> None:
    for beam in (1, 3):
        with pytest.raises(UsageError, match="k = 5 drafted tokens"):
            make(target, beam).propose(make_context(target), K + 1)


# -- the beam ------------------------------------------------------------------------------------------------------------


def scores(drafter: ReDrafter, context: DraftContext, row: int, depth: int) -> dict[tuple[int, ...], float]:
    """Of every sequence of ``depth`` drafts (target ids) and of what they begin with."""
    naive, ids = Naive(drafter), drafter.draft_ids.tolist()
    known: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(depth):
        for path in [p for p in known if len(p) == length]:
            rows = naive.log_probabilities(context.taps[row, 0, -1], [int(context.anchors[row, 0]), *path]).tolist()
            known |= {(*path, token): known[path] + value for token, value in zip(ids, rows, strict=True)}
    return known


@pytest.mark.parametrize("beam", [2, 3, 5])
def test_the_beam_keeps_the_best(target: Target, beam: int) -> None:
    drafter, context = make(target, beam, vocabulary=5), make_context(target)
    found = drafter.candidates(context, 3)
    assert found.shape == (BATCH, beam, 3)
    for row in range(BATCH):
        known, best = scores(drafter, context, row, 3), [()]
        for _ in range(3):
            grown = [(*b, t) for b in best for t in drafter.draft_ids.tolist()]
            best = sorted(grown, key=lambda path: -known[path])[:beam]
        assert [tuple(path) for path in found[row].tolist()] == best


def test_a_beam_as_wide_as_the_vocabulary_misses_no_pair(target: Target) -> None:
    """Trying everything, with no word of how a beam grows."""
    drafter, context = make(target, 7, vocabulary=7), make_context(target)
    found = drafter.candidates(context, 2)
    for row in range(BATCH):
        known = scores(drafter, context, row, 2)
        pairs = sorted((p for p in known if len(p) == 2), key=lambda path: -known[path])
        assert [tuple(path) for path in found[row].tolist()] == pairs[:7]


def test_what_candidates_begin_with_alike_is_drafted_once(target: Target) -> None:
    drafter, context = make(target, 6), make_context(target)
    draft, shared = drafter.propose(context, K), 0
    assert draft.trees is not None and draft.tokens.numel() == 0 and draft.probabilities is None
    for tree, candidates in zip(draft.trees, drafter.candidates(context, K).tolist(), strict=True):
        beginnings = {tuple(c[:n]) for c in candidates for n in range(1, K + 1)}
        paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
        assert len(paths) == len(set(paths)) and set(paths) == beginnings
        assert max(tree.depths) == K and len(tree) <= drafter.max_nodes == 6 * K
        shared += 6 * K - len(tree)
        assert tree.tokens[0] == candidates[0][0], "the best candidate's is the preferred child"
    assert shared > 0


def test_beams_do_not_depend_on_their_batch(target: Target) -> None:
    drafter, context = make(target, 4).prepare(half=False), make_context(target)
    together = drafter.candidates(context, K)
    for row in range(BATCH):
        one = slice(row, row + 1)
        alone = DraftContext(context.anchors[one], context.positions[one], context.taps[one], NOTHING)
        assert torch.equal(drafter.candidates(alone, K), together[one])


# -- in the loop -----------------------------------------------------------------------------------------------------------

PROMPTS = [(7, 20, 33), (9, 8, 7, 6, 5, 4), tuple(range(40, 60)), (3,)]


def requests(**params: Any) -> list[Request]:
    return [
        Request(p, SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "seed": i} | params)))
        for i, p in enumerate(PROMPTS)
    ]


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def trained(target: Target) -> ReDrafter:
    """A chain that has half learned the target's greedy answers."""
    texts = [[*r.prompt, *result.tokens] for r, result in zip(requests(), Engine(target).generate(requests()), strict=True)]
    drafter = make(target, vocabulary=target.vocab_size).requires_grad_(True)
    blocks: list[tuple[Tensor, list[int], list[int]]] = []
    for request, text in zip(requests(), texts, strict=True):
        taps = target.forward(torch.tensor([text]), target.new_cache(1, len(text)), drafter.taps).taps[0]
        for p in range(len(request.prompt), len(text) - K):
            blocks.append((taps[p - 1], text[p : p + K], text[p + 1 : p + K + 1]))
    taps, previous, wanted = torch.stack([b[0] for b in blocks]), *(torch.tensor([b[i] for b in blocks]) for i in (1, 2))
    context = DraftContext(previous[:, :1], torch.zeros(len(blocks), 1), taps[:, None], NOTHING)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(30):
        logits = drafter.base_logits(drafter.predict(context, previous[:, None]).hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False)


@pytest.mark.parametrize("beam", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2, K])
def test_greedy_text_is_the_targets(target: Target, trained: ReDrafter, beam: int, k: int) -> None:
    drafter = with_beam(target, trained, beam)
    results = Engine(target, drafter, k).generate(requests())
    assert tokens(results) == tokens(Engine(target).generate(requests()))
    assert max(len(r.counters.reached) for r in results) == k, "k limits the depth"
    assert sum(sum(r.counters.accepted) for r in results) > 0


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.2}], ids=str
)
def test_sampled_text_with_a_beam_is_the_text_without(target: Target, trained: ReDrafter, params: dict[str, Any]) -> None:
    """A tree's acceptance is the target's own draw."""
    results = Engine(target, with_beam(target, trained, 6)).generate(requests(**params))
    assert tokens(results) == tokens(Engine(target).generate(requests(**params)))
    assert sum(sum(r.counters.accepted) for r in results) > 0


def test_a_chain_samples_where_the_request_does(target: Target, trained: ReDrafter) -> None:
    drawn = set()

    def choose(slot: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        drawn.add(slot)
        return logits.argmin(-1), logits.softmax(-1)

    chooser: Any = choose
    draft = trained.propose(make_context(target), K, chooser)
    assert drawn == {1, 2, 3, 4} and draft.probabilities is not None and draft.probabilities.shape == (BATCH, K, 211)
    branching = with_beam(target, trained, 3)
    assert branching.propose(make_context(target), K, chooser).trees == branching.propose(make_context(target), K).trees


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_does_not_depend_on_its_neighbours(target: Target, trained: ReDrafter, beam: int, temperature: float) -> None:
    drafter, asked = with_beam(target, trained, beam).prepare(half=False), requests(temperature=temperature)
    alone = [Engine(target, drafter).generate([request])[0] for request in asked]
    assert Engine(target, drafter, max_batch=3).generate(asked) == alone


def test_more_beams_accept_more(target: Target, trained: ReDrafter) -> None:
    tau = []
    for beam in (1, 2, 6):
        pooled = Counters()
        for result in Engine(target, with_beam(target, trained, beam)).generate(requests()):
            pooled.add(result.counters)
        tau.append(pooled.tau)
    assert tau[2] > 1.2 * tau[0] and tau[2] > tau[1] > tau[0] > 1.5, tau

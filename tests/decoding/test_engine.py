"""The decoding loop end to end on tiny random targets: nothing that a drafter does changes what is written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from hspec.decoding.engine import Drafter, Engine, Step
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Counters, Request, Result
from hspec.decoding.state import DecodingState
from hspec.drafters.context import Chooser, Draft, DraftContext
from hspec.drafters.lookup_first import LookupFirst
from hspec.drafters.ngram import NgramDrafter
from hspec.drafters.while_sure import WhileSure
from hspec.errors import UsageError
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from tests.decoding.replay import ReplayDrafter, SelfDrafter, all_in_turn, random_plan
from tests.decoding.test_processors import reference as processed_by_transformers
from tests.tiny import randomise, tiny_drafter, tiny_target

FAMILIES = ["llama", "qwen3"]
LENGTH = 32
SIZE: dict[str, Any] = {"layers": 3, "hidden": 48}


def prompts(*lengths: int, vocab: int = 211, seed: int = 5) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, vocab, (n,), generator=generator).tolist()) for n in lengths]


PROMPTS = prompts(1, 9, 26)


def requests(of: Sequence[tuple[int, ...]] = PROMPTS, **params: Any) -> list[Request]:
    return [Request(p, SamplingParams(**({"max_tokens": LENGTH, "ignore_eos": True} | params))) for p in of]


def texts(asked: list[Request], results: list[Result]) -> list[list[int]]:
    return [[*request.prompt, *result.tokens] for request, result in zip(asked, results, strict=True)]


def replay(target: Target, asked: list[Request], k: int = 7, seed: int = 0, **settings: Any) -> ReplayDrafter:
    """A drafter that knows the answers and goes wrong after 0..k drafts."""
    return ReplayDrafter(target, texts(asked, Engine(target).generate(asked)), all_in_turn(k, seed), **settings)


def accepted_lengths(results: list[Result]) -> set[int]:
    """Of all steps but the last of each request, which may have been cut."""
    return {run - 1 for result in results for run in result.runs[:-1]}


def same_answers(mine: list[Result], others: list[Result]) -> None:
    for a, b in zip(mine, others, strict=True):
        assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)


@pytest.fixture(scope="module", params=FAMILIES)
def either(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param, **SIZE)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", **SIZE)


def transformers_greedy(target: Target, prompt: tuple[int, ...], count: int, **settings: Any) -> list[int]:
    """The answer of transformers' own loop on an untouched model with the same weights."""
    model = tiny_target(target.config.model_type, linears="plain", **SIZE).model
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **settings)
    return out[0, len(prompt) :].tolist()


# -- greedy ----------------------------------------------------------------------------------------------------------


def test_greedy_equals_transformers_with_and_without_drafts(either: Target) -> None:
    asked = requests()
    plain = Engine(either).generate(asked)
    assert [r.tokens for r in plain] == [transformers_greedy(either, p, LENGTH) for p in PROMPTS]
    assert all(r.counters.tau == 1.0 and not any(r.drafted) for r in plain)
    for k in range(1, 8):
        drafter = replay(either, asked, k)
        results = Engine(either, drafter, k).generate(asked)
        same_answers(results, plain)
        assert accepted_lengths(results) == drafter.seen == set(range(k + 1))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_greedy_with_an_untrained_drafter(either: Target, k: int) -> None:
    asked = requests()
    results = Engine(either, tiny_drafter(either), k).generate(asked)
    same_answers(results, Engine(either).generate(asked))


def test_a_perfect_drafter_is_accepted_whole(target: Target) -> None:
    asked = requests(max_tokens=LENGTH + 1)  # one of the prefill, then whole blocks
    drafter = replay(target, asked)
    drafter.right = lambda position: 7
    for result in Engine(target, drafter).generate(asked):
        assert result.runs == [8] * (LENGTH // 8) and result.counters.tau == 8.0
        assert result.counters.acceptance == [1.0] * 7
        assert result.drafted == [False, *([True] * 7 + [False]) * (LENGTH // 8)]


def test_greedy_with_drafts_that_ask_nobody(target: Target) -> None:
    """Drafters with a one-hot q (a prompt lookup, say) need not use the chooser."""
    asked = requests()
    results = Engine(target, replay(target, asked, fixed=True)).generate(asked)
    same_answers(results, Engine(target).generate(asked))
    assert accepted_lengths(results) == set(range(8))


def test_drafts_of_a_smaller_vocabulary(target: Target) -> None:
    asked = requests()
    ids = torch.arange(0, 211, 2)
    drafter = ReplayDrafter(target, texts(asked, Engine(target).generate(asked)), draft_ids=ids)
    results = Engine(target, drafter).generate(asked)
    same_answers(results, Engine(target).generate(asked))
    drafted = [t for r in results for t, d in zip(r.tokens, r.drafted, strict=True) if d]
    assert drafted and all(t % 2 == 0 for t in drafted)


def test_repetition_penalty_with_drafts(either: Target) -> None:
    asked = requests(repetition_penalty=1.4)
    plain = Engine(either).generate(asked)
    assert [r.tokens for r in plain] == [transformers_greedy(either, p, LENGTH, repetition_penalty=1.4) for p in PROMPTS]
    assert [r.tokens for r in plain] != [r.tokens for r in Engine(either).generate(requests())]
    results = Engine(either, replay(either, asked)).generate(asked)
    same_answers(results, plain)
    assert accepted_lengths(results) == set(range(8))


# -- where requests end ------------------------------------------------------------------------------------------------


def test_eos_inside_accepted_blocks() -> None:
    target = tiny_target("llama", **SIZE)
    longer = requests(ignore_eos=True)
    knowing = texts(longer, Engine(target).generate(longer))  # drafts run on behind the end
    ends = frozenset(text[len(r.prompt) + 10 + 3 * i] for i, (r, text) in enumerate(zip(longer, knowing, strict=True)))
    target.template = ChatTemplate(target.tokenizer, extra_eos=ends)
    asked = requests(ignore_eos=False)
    plain = Engine(target).generate(asked)
    assert all(r.finish_reason == "stop" and r.tokens[-1] in target.eos_ids for r in plain)
    assert not any(target.eos_ids & {*r.tokens[:-1]} for r in plain)
    inside = 0
    for seed in range(4):
        results = Engine(target, ReplayDrafter(target, knowing, all_in_turn(7, seed))).generate(asked)
        same_answers(results, plain)
        inside += sum(r.drafted[-1] for r in results)
        for r in results:
            assert r.counters.emitted == len(r.tokens) - 1 == sum(r.runs)
    assert inside > 0


def test_stop_strings_and_max_tokens_inside_accepted_blocks(target: Target) -> None:
    longer = Engine(target).generate(requests())
    stop = tuple(result.text[20:22] for result in longer)
    for params in ({"stop": stop}, {"max_tokens": 13}, {"stop": stop[:1], "max_tokens": 25}):
        asked = requests(**params)
        plain = Engine(target).generate(asked)
        knowing = texts(requests(), longer)
        for seed in range(3):
            same_answers(Engine(target, ReplayDrafter(target, knowing, all_in_turn(7, seed))).generate(asked), plain)
    assert {r.finish_reason for r in plain} == {"stop", "length"}


# -- batches -----------------------------------------------------------------------------------------------------------


def mixed() -> list[Request]:
    """Different prompts, lengths, seeds and settings."""
    settings: list[dict[str, Any]] = [
        {"max_tokens": 5},
        {"max_tokens": 25, "temperature": 1.0, "seed": 1},
        {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 2, "draft": "greedy"},
        {"max_tokens": 1},
        {"max_tokens": 20, "repetition_penalty": 1.3},
        {"max_tokens": 14, "temperature": 1.3, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 3},
        {"max_tokens": 22, "temperature": 0.9, "seed": 4, "draft": "sample"},
    ]
    of = prompts(3, 17, 8, 30, 12, 21, 5)
    return [Request(p, SamplingParams(ignore_eos=True, **s)) for p, s in zip(of, settings, strict=True)]


@pytest.mark.parametrize("kind", ["none", "replay", "noise", "hspec"])
def test_a_request_does_not_depend_on_its_neighbours(target: Target, kind: str) -> None:
    asked = mixed()
    known = texts(asked, Engine(target).generate(asked))
    drafter: Drafter | None = {
        "none": lambda: None,
        "replay": lambda: ReplayDrafter(target, known, random_plan(5), max_draft=5, certainty=6.0),
        "noise": lambda: ReplayDrafter(target, max_draft=5),
        "hspec": lambda: tiny_drafter(target),
    }[kind]()
    alone = [Engine(target, drafter).generate([request])[0] for request in asked]
    for max_batch, step in ((2, 1), (3, -1), (16, 1)):
        results = Engine(target, drafter, max_batch=max_batch).generate(asked[::step])
        assert results == alone[::step], "text, counters and all"
    if kind == "replay":
        assert len({run - 1 for r in alone for run in r.runs}) >= 5


def test_sampled_text_depends_on_the_seed_only(target: Target) -> None:
    drafter = tiny_drafter(target)
    [a, b, c] = Engine(target, drafter).generate(
        [Request(PROMPTS[1], SamplingParams(temperature=1.0, max_tokens=20, seed=s, ignore_eos=True)) for s in (1, 1, 2)]
    )
    assert a == b and a.tokens != c.tokens


def test_steps_add_up_to_the_results(target: Target) -> None:
    asked = mixed()
    engine = Engine(target, replay(target, asked, k=5, max_draft=5, certainty=6.0), max_batch=2)
    steps: dict[int, list[Step]] = {}
    finished: list[int] = []
    begun_after: dict[int, int] = {}
    for step in engine.stream(asked):
        begun_after.setdefault(step.index, len(finished))
        assert step.index not in finished, "nothing comes after the end"
        steps.setdefault(step.index, []).append(step)
        if step.result is not None:
            finished.append(step.index)
    assert sorted(finished) == list(range(len(asked)))
    assert begun_after[0] == begun_after[1] == 0 and begun_after[6] >= 5, "with two at a time, later ones join as others end"
    for index, own in steps.items():
        result = own[-1].result
        assert result is not None
        assert [t for s in own for t in s.tokens] == result.tokens
        assert [d for s in own for d in s.drafted] == result.drafted
        assert "".join(s.text for s in own) == result.text
        assert [len(s.tokens) for s in own] == [1, *result.runs]
        assert len(result.tokens) == asked[index].params.max_tokens
        pooled = Counters()
        pooled.add(result.counters)
        assert pooled.emitted == len(result.tokens) - 1 and pooled.steps == len(result.runs)


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_drafter_with_the_targets_distribution_is_always_accepted(target: Target, max_batch: int) -> None:
    """At any temperature, with every processor: q went through what p goes through, and the rule takes q for what it is."""
    asked = [Request(r.prompt, r.params.model_copy(update={"draft": "sample"})) for r in mixed()]
    pooled = Counters()
    for result in Engine(target, SelfDrafter(target), max_batch=max_batch).generate(asked):
        pooled.add(result.counters)
    assert pooled.accepted == pooled.reached and len(pooled.reached) == 4
    same_answers(Engine(target, SelfDrafter(target)).generate(requests()), Engine(target).generate(requests()))


def test_no_requests(target: Target) -> None:
    assert Engine(target).generate([]) == []


# -- the distribution at temperature > 0 ---------------------------------------------------------------------------------

SMALL = 4


class Letters:
    """As much of a tokenizer as the loop needs, for a vocabulary of four."""

    eos_token_id = None
    chat_template = None

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join("abcd"[t] for t in tokens)


def small_model() -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SMALL,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    randomise(model, 2)
    return model.eval()


@torch.no_grad()
def exact_distribution(prompt: tuple[int, ...], count: int, params: SamplingParams) -> np.ndarray:
    """Of the first ``count`` tokens, by enumeration on an untouched model with transformers' processors."""
    model = small_model()
    endings = list(itertools.product(range(SMALL), repeat=count))
    logits = model(torch.tensor([[*prompt, *e] for e in endings])).logits[:, len(prompt) - 1 : -1]
    out = np.ones(len(endings))
    for n, ending in enumerate(endings):
        for i, token in enumerate(ending):
            row = processed_by_transformers([*prompt, *ending[:i]], logits[n, i], params)
            out[n] *= row.double().softmax(-1)[token].item()
    return out


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """P-value; cells that expect fewer than 5 are pooled."""
    expected = counts.sum() * p
    assert counts[p == 0].sum() == 0
    large = expected >= 5
    observed = [*counts[large], counts[~large].sum()]
    wanted = [*expected[large], expected[~large].sum()]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return float(stats.chisquare(observed, wanted).pvalue)


DISTRIBUTIONS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"temperature": 1.0}),
    ("sampled", {"temperature": 1.0, "draft": "sample"}),
    ("one-hot", {"temperature": 1.0, "draft": "greedy"}),
    ("half", {"temperature": 0.8, "draft": "sample"}),
    ("fixed", {"temperature": 1.3}),
    ("sampled", {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.5, "draft": "sample"}),
    ("copying", {"temperature": 1.0, "draft": "sample"}),
    ("doubting", {"temperature": 1.0, "draft": "sample"}),
]


class Doubting(ReplayDrafter):
    """Doubts what stands behind an odd token; if it peeks, an odd token itself, which it has picked already."""

    confidence, embedding = object(), torch.zeros(SMALL, 1)

    def __init__(self, target: Target, peeks: bool = False):
        super().__init__(target)
        self.peeks = peeks

    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft:
        draft = super().propose(context, k, choose)
        before = torch.cat((context.anchors, draft.tokens[:, :-1]), dim=1)
        doubtful = (draft.tokens if self.peeks else before) % 2 == 1
        return replace(draft, chances=torch.where(doubtful, 0.4, 0.95).cumprod(1))


def answers(
    target: Target, drafter: Drafter | None, prompt: tuple[int, ...], count: int, draws: int, settings: dict[str, Any]
) -> list[Result]:
    asked = [Request(prompt, SamplingParams(max_tokens=count, seed=seed, **settings)) for seed in range(1000, 1000 + draws)]
    return Engine(target, drafter, None if drafter is None else 3, max_batch=50).generate(asked)


def counted(results: list[Result], count: int) -> np.ndarray:
    counts = np.zeros(SMALL**count)
    for result in results:
        counts[int("".join(map(str, result.tokens)), SMALL)] += 1
    return counts


def test_a_drafter_that_doubts_what_it_has_picked_would_be_seen() -> None:
    """Drafts may be left out for the tokens before them, not for what they are: the test below is sharp enough to tell."""
    count, settings = 4, {"temperature": 1.0, "draft": "sample"}
    target = Target(small_model(), ChatTemplate(Letters()), "small").prepare()
    exact = exact_distribution((0, 2, 1), count, SamplingParams(**settings))
    drafter = WhileSure(Doubting(target, peeks=True), 0.5)  # type: ignore[arg-type]
    assert chi_square(counted(answers(target, drafter, (0, 2, 1), count, 500, settings), count), exact) < 1e-3


@pytest.mark.parametrize("kind, settings", DISTRIBUTIONS, ids=str)
def test_the_distribution_is_the_targets(kind: str, settings: dict[str, Any]) -> None:
    count, draws, prompt = 4, 500, (0, 2, 1)
    target = Target(small_model(), ChatTemplate(Letters()), "small").prepare()
    exact = exact_distribution(prompt, count, SamplingParams(**settings))
    drafter: ReplayDrafter | LookupFirst | WhileSure | None = None
    if kind == "fixed":
        ends = list(itertools.product(range(SMALL), repeat=count))
        likely = [max((e for e in ends if e[0] == first), key=lambda e: exact[ends.index(e)]) for first in range(SMALL)]
        drafter = ReplayDrafter(target, [[*prompt, *e] for e in likely], fixed=True)
    elif kind == "copying":  # the same requests draft what is likely, or what stood behind the last token before
        drafter = LookupFirst(ReplayDrafter(target), NgramDrafter(SMALL, longest=2, shortest=1))  # type: ignore[arg-type]
    elif kind == "doubting":
        drafter = WhileSure(Doubting(target), 0.5)  # type: ignore[arg-type]
    elif kind != "plain":
        drafter = ReplayDrafter(target, draft_ids=torch.tensor([1, 3]) if kind == "half" else None)
    results = answers(target, drafter, prompt, count, draws, settings)
    counts = counted(results, count)
    assert chi_square(counts, exact) > 1e-3
    assert chi_square(counts.reshape(SMALL, -1).sum(0), exact.reshape(SMALL, -1).sum(0)) > 1e-3, "without the prefill's"
    if drafter is not None:
        pooled = Counters()
        for result in results:
            pooled.add(result.counters)
        often = pooled.acceptance[:2] if kind == "doubting" else pooled.acceptance  # it seldom gets to the third
        assert pooled.tau > 1.1 and all(0 < rate < 1 for rate in often), "both branches were taken"


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short() -> Target:
    return tiny_target("llama", max_positions=48, **SIZE)


def test_an_impossible_request_is_refused(short: Target) -> None:
    engine = Engine(short)
    for prompt, message in [
        ((), "empty"),
        (prompts(48)[0], "48 tokens, the target's context is 48: shorten it by at least 1"),
        (prompts(60)[0], "shorten it by at least 13"),
        ((5, 211), "token 211 is not in"),
        ((-1,), "token -1 is not in"),
    ]:
        with pytest.raises(UsageError, match=message):
            engine.generate([Request((5, 6)), Request(prompt)])


def test_an_impossible_engine_is_refused(target: Target) -> None:
    drafter = tiny_drafter(target)
    for k in (0, 6, -1):
        with pytest.raises(UsageError, match=f"k = {k} .* 1 to 5"):
            Engine(target, drafter, k)
    assert Engine(target, drafter).k == 5 and Engine(target).k == 0
    with pytest.raises(UsageError, match="max_batch = 0"):
        Engine(target, max_batch=0)


@pytest.mark.parametrize("length", [1, 20, 40, 45, 46, 47])
def test_generation_up_to_the_context_limit(short: Target, length: int) -> None:
    asked = requests(prompts(length), max_tokens=500)
    plain = Engine(short).generate(asked)
    assert plain[0].finish_reason == "length" and len(plain[0].tokens) == 48 - length
    drafter = replay(short, asked)
    for seed in range(3):
        drafter.right = all_in_turn(7, seed)
        same_answers(Engine(short, drafter).generate(asked), plain)
    drafter.right = lambda position: 7
    same_answers(Engine(short, drafter).generate(asked), plain)
    same_answers(Engine(short, tiny_drafter(short)).generate(asked), plain)


@pytest.mark.parametrize("kind", ["replay", "hspec"])
def test_a_neighbour_at_its_limit_changes_nothing(short: Target, kind: str) -> None:
    """Its last blocks are shorter; the others' are not."""
    asked = [
        Request(p, SamplingParams(temperature=1.0, max_tokens=500, seed=i, ignore_eos=True))
        for i, p in enumerate(prompts(44, 4, 38, 20))
    ]
    known = texts(asked, Engine(short).generate(asked))
    drafter = ReplayDrafter(short, known, random_plan(7), certainty=5.0) if kind == "replay" else tiny_drafter(short)
    alone = [Engine(short, drafter).generate([request])[0] for request in asked]
    assert Engine(short, drafter, max_batch=4).generate(asked) == alone
    assert Engine(short, drafter, max_batch=2).generate(asked) == alone
    assert all(len(r.tokens) + len(q.prompt) == 48 for r, q in zip(alone, asked, strict=True))


# -- a kept cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["none", "noise", "hspec"])
def test_a_kept_cache_gives_the_same_text(short: Target, kind: str, temperature: float) -> None:
    """A dialogue: every prompt begins with the last prompt and answer, or with a part of them."""
    [first] = prompts(9)
    more, other = prompts(5, 30)
    prompt, kept = first, ()
    state: DecodingState | None = None
    for extra, keep in [(more, 100), (other[:4], 100), (other, 12), ((7, 8), 0)]:
        [asked] = requests([prompt], max_tokens=9, temperature=temperature, seed=len(prompt))
        drafter: Drafter | None = {
            "none": lambda asked=asked: None,
            "noise": lambda asked=asked: ReplayDrafter(short, certainty=5.0),
            "hspec": lambda asked=asked: tiny_drafter(short),
        }[kind]()
        engine = Engine(short, drafter)
        state = state or engine.new_state(1, short.max_positions)
        [fresh] = engine.generate([asked])
        reuse = min(sum(1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(kept, prompt))), len(prompt) - 1)
        result = [step.result for step in engine.stream([asked], state, reuse)][-1]
        assert result == fresh
        assert state.cache.lengths == [len(prompt) + len(fresh.tokens) - 1]
        kept = (*prompt, *fresh.tokens)[: state.cache.lengths[0]]
        prompt = (*(*prompt, *fresh.tokens)[:keep], *extra)


def test_a_kept_cache_after_an_end_inside_a_block(short: Target) -> None:
    """It holds the emitted tokens but the last, not what the block had behind the end."""
    [asked] = requests(prompts(9), max_tokens=20)
    [longer] = Engine(short).generate([asked])
    drafter = ReplayDrafter(short, texts([asked], [longer]))
    engine = Engine(short, drafter)
    state = engine.new_state(1, short.max_positions)
    [cut] = requests(prompts(9), max_tokens=5)
    for step in engine.stream([cut], state):
        result = step.result
    assert result is not None and result.drafted[-1] and state.cache.lengths == [9 + 5 - 1]


def test_a_kept_cache_is_for_one_request(short: Target) -> None:
    two = requests(prompts(4, 5))
    with pytest.raises(AssertionError, match="one request"):
        list(Engine(short).stream(two, Engine(short).new_state(2, 48)))
    with pytest.raises(AssertionError, match="to reuse"):
        list(Engine(short).stream(two[:1], Engine(short).new_state(1, 48), reuse=3))


def test_an_interrupted_prefill_leaves_nothing_that_looks_valid(short: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Engine(short).new_state(1, 48)
    [asked] = requests(prompts(20), max_tokens=3)
    list(Engine(short).stream([asked], state))
    monkeypatch.setattr(short, "prefill_chunks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(Engine(short).stream([asked], state, reuse=6))
    assert state.cache.lengths == [6]

"""Where a request ends inside an accepted block, and what is counted."""

from __future__ import annotations

import pytest

from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Counters, Request, Sequence
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
A, B, C, D, E = (TOKENIZER(c, add_special_tokens=False).input_ids[0] for c in "12345")


def started(first: int = A, **params: object) -> Sequence:
    sequence = Sequence(Request((A, B), SamplingParams(**params)), TOKENIZER, frozenset([EOS]))  # type: ignore[arg-type]
    sequence.emit_first(first)
    return sequence


def test_a_step_emits_accepted_drafts_and_the_targets_token() -> None:
    sequence = started()
    assert sequence.emit_step([B, C], E, [A]) == 3
    assert sequence.emit_step([], A, [A]) == 1
    assert sequence.emit_step([B, C], D, []) == 3
    assert sequence.tokens == [A, B, C, E, A, B, C, D]
    assert sequence.drafted == [False, True, True, False, False, True, True, False]
    assert sequence.finish_reason is None
    assert sequence.runs == [3, 1, 3]
    assert sequence.refused == [[A], [A], []]
    counters = sequence.counters
    assert (counters.steps, counters.emitted) == (3, 7), "the prefill's token is not counted"
    assert counters.tau == pytest.approx(7 / 3)
    assert (counters.reached, counters.accepted) == ([3, 2, 1], [2, 2, 0])
    assert counters.acceptance == [2 / 3, 1.0, 0.0]
    assert sequence.length == 2 + 8 - 1 and sequence.anchor == D


@pytest.mark.parametrize("at", [0, 1, 2])
def test_eos_inside_an_accepted_block(at: int) -> None:
    drafts = [B, C, D]
    drafts[at] = EOS
    sequence = started()
    assert sequence.emit_step(drafts, E, []) == at + 1
    assert sequence.tokens == [A, *drafts[: at + 1]]
    assert sequence.drafted == [False, *[True] * (at + 1)]
    assert (sequence.finish_reason, sequence.result().text) == ("stop", "1" + "23"[:at])
    counters = sequence.counters
    assert (counters.steps, counters.emitted) == (1, at + 1)
    assert counters.reached == counters.accepted == [1] * (at + 1), "positions after it were not reached"


def test_eos_accepted_right_before_a_rejection() -> None:
    """The draft behind it failed, but was never reached."""
    sequence = started()
    assert sequence.emit_step([EOS], E, [A]) == 1
    assert (sequence.counters.reached, sequence.counters.accepted) == ([1], [1])
    assert sequence.refused == [[]]


def test_eos_as_the_targets_token() -> None:
    sequence = started()
    assert sequence.emit_step([B], EOS, [A]) == 2
    assert sequence.tokens == [A, B, EOS] and sequence.finish_reason == "stop"
    assert (sequence.counters.reached, sequence.counters.accepted) == ([1, 1], [1, 0])


def test_eos_at_once() -> None:
    sequence = started(EOS)
    assert sequence.finish_reason == "stop" and sequence.result().text == ""
    assert sequence.counters == Counters() and sequence.counters.tau == 0.0


def test_eos_ignored() -> None:
    sequence = started(ignore_eos=True)
    assert sequence.emit_step([EOS, C], D, []) == 3
    assert sequence.finish_reason is None and sequence.text.text == "134"


@pytest.mark.parametrize("most, emitted", [(2, 1), (3, 2), (4, 3), (5, 4)])
def test_max_tokens_inside_a_block(most: int, emitted: int) -> None:
    sequence = started(max_tokens=most)
    assert sequence.emit_step([B, C, D], E, []) == emitted
    assert len(sequence.tokens) == most and sequence.finish_reason == "length"
    assert sequence.counters.emitted == emitted
    assert sequence.counters.accepted == sequence.counters.reached == [1] * min(emitted, 3)


def test_max_tokens_of_one_is_the_prefills() -> None:
    sequence = started(max_tokens=1)
    assert sequence.finish_reason == "length" and sequence.result().tokens == [A]


def test_a_stop_string_inside_a_block() -> None:
    sequence = started(stop=("34",))
    assert sequence.emit_step([B, C, D, E], A, []) == 3
    assert sequence.tokens == [A, B, C, D] and sequence.finish_reason == "stop"
    assert sequence.result().text == "12", "the stop string itself is cut, its tokens are emitted and counted"
    assert sequence.counters.emitted == 3 and sequence.counters.accepted == [1, 1, 1]


@pytest.mark.parametrize(
    "params, block, text, reason",
    [
        ({"stop": ("3",), "max_tokens": 4}, [B, C, EOS], "12", "stop"),
        ({"stop": ("4",), "max_tokens": 3}, [B, C, D], "123", "length"),
        ({"stop": ("4",), "max_tokens": 4}, [B, EOS, D], "12", "stop"),
        ({"stop": ("3",), "max_tokens": 3}, [B, C, D], "12", "stop"),  # both at one token: it did stop
    ],
)
def test_the_earliest_end_wins(params: dict[str, object], block: list[int], text: str, reason: str) -> None:
    sequence = started(**params)
    sequence.emit_step(block, E, [])
    result = sequence.result()
    assert (result.text, result.finish_reason) == (text, reason)


def test_counters_pool() -> None:
    total = Counters()
    for accepted, rejected, emitted in [(0, True, 1), (2, True, 3), (3, False, 4)]:
        one = Counters()
        one.count(accepted, rejected, emitted)
        total.add(one)
    assert (total.steps, total.emitted, total.tau) == (3, 8, 8 / 3)
    assert (total.reached, total.accepted) == ([3, 2, 2], [2, 2, 1])


def test_plain_steps_count_as_steps_of_one() -> None:
    sequence = started()
    for token in (B, C, D):
        assert sequence.emit_step([], token, []) == 1
    assert sequence.counters.tau == 1.0 and sequence.counters.reached == []

"""Which tokens a drafter can draft, and which one stands for "not known yet"."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.errors import UsageError
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from hspec.training.corpus import Example
from hspec.training.initialise import check_draft_vocabulary, draft_vocabulary, mask_token
from tests.tiny import tiny_target, tiny_tokenizer

TARGET = tiny_target(layers=1, hidden=32, heads=2, kv_heads=1)
SPECIAL = {0, 1, 2}


@settings(deadline=None, max_examples=50)
@given(
    tokens=st.lists(st.tuples(st.integers(0, 210), st.booleans()), min_size=1, max_size=200),
    size=st.integers(3, 211),
)
def test_the_most_frequent_of_the_assistants_tokens_with_all_special_ones(tokens: list[tuple[int, bool]], size: int) -> None:
    example = Example("", [t for t, _ in tokens], [own for _, own in tokens])
    chosen = draft_vocabulary([example], TARGET, size).tolist()
    assert len(chosen) == len(set(chosen)) == size and chosen == sorted(chosen)
    assert set(chosen) >= SPECIAL
    count = {t: sum(token == t and own for token, own in tokens) for t in range(211)}
    left_out = set(range(211)) - set(chosen)
    assert min((count[t] for t in set(chosen) - SPECIAL), default=999) >= max((count[t] for t in left_out), default=0)


def test_a_size_without_room_for_the_special_tokens_or_beyond_the_target() -> None:
    example = Example("", [5, 6, 7], [True] * 3)
    with pytest.raises(UsageError, match="of 2 has no room for the target's 3 special tokens"):
        draft_vocabulary([example], TARGET, 2)
    with pytest.raises(UsageError, match="of 212 exceeds the target's 211"):
        draft_vocabulary([example], TARGET, 212)


def test_special_tokens_beyond_the_targets_rows_are_no_trouble() -> None:
    """A tokenizer may know more tokens than the model has rows."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|late|>"]})
    assert max(tokenizer.all_special_ids) == 211
    target = tiny_target(layers=1, hidden=32, heads=2, kv_heads=1)
    target.template = ChatTemplate(tokenizer)
    assert max(draft_vocabulary([Example("", [5], [True])], target, 5).tolist()) < 211


def test_a_drafter_that_cannot_end_a_turn_is_refused() -> None:
    check_draft_vocabulary(torch.tensor([0, 7]), TARGET)
    with pytest.raises(UsageError, match=r"none of the target's EOS tokens \[0\]"):
        check_draft_vocabulary(torch.tensor([1, 7]), TARGET)


def test_the_mask_is_the_tokenizers_or_a_special_token_that_chats_never_have() -> None:
    def with_tokens(**changes: object) -> Target:
        target = tiny_target(layers=1, hidden=32, heads=2, kv_heads=1)
        target.template = ChatTemplate(tiny_tokenizer())
        for name, value in changes.items():
            setattr(target.tokenizer, name, value)
        return target

    assert mask_token(with_tokens()) == 2  # <|begin|>: 0 and 1 are what turns are made of
    assert mask_token(with_tokens(mask_token="a")) == with_tokens().tokenizer.convert_tokens_to_ids("a")
    empty = with_tokens()
    with torch.no_grad():
        empty.embedding_weight[2] = 0.0
    assert mask_token(empty) is None  # a row of zeros would say nothing; the drafter then learns a vector of its own

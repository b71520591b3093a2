"""Text as it comes equals all tokens decoded at once, and stop strings end it wherever they fall."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hspec.decoding.text import Detokeniser
from tests.tiny import VOCABULARY, tiny_tokenizer


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Of the sentencepiece kind: a word's token carries its space, the first word's is dropped; bytes for the rest."""
    pieces = ["<unk>", "</s>", "<tool>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁cat", "▁sat", "s", "at", "."]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("</s>", "<tool>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


BYTES = tiny_tokenizer()
SPACED = spaced_tokenizer()


def encode(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False).input_ids


def at_once(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def run(tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[Detokeniser, list[str]]:
    """Push until stopped; what each push gave, and at the end what was left."""
    text, given_out = Detokeniser(tokenizer, stop), []
    for token in tokens:
        text.push(token)
        given_out.append(text.take())
        if text.stopped:
            break
    text.finish()
    given_out.append(text.take(final=True))
    assert "".join(given_out) == text.text
    return text, given_out


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=20))
def test_byte_level_tokens_in_any_order(tokens: list[int]) -> None:
    assert run(BYTES, tokens)[0].text == at_once(BYTES, tokens)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([(1,), (2,), (3 + 0xC3, 3 + 0xA9), (3 + 65,), *((t,) for t in range(259, 266))]), max_size=20))
def test_spaced_tokens_in_any_order(parts: list[tuple[int, ...]]) -> None:
    """Whole characters only: that decoder lets a wrong byte spoil right ones before it, which may be long gone."""
    tokens = [token for part in parts for token in part]
    assert run(SPACED, tokens)[0].text == at_once(SPACED, tokens)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(st.sampled_from("ab é€中🙂\n"), max_size=15))
def test_text_comes_back(text: str) -> None:
    _, pieces = run(BYTES, encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces), "a character is given when it is whole"


def test_a_character_split_over_tokens_waits() -> None:
    tokens = encode("a🙂b")
    assert len(tokens) == 6
    assert run(BYTES, tokens)[1] == ["a", "", "", "", "🙂", "b", ""]


def test_what_still_waited_is_given_at_the_end() -> None:
    text, pieces = run(BYTES, encode("a🙂")[:-1])
    assert pieces == ["a", "", "", "", "\ufffd"]
    assert text.text == "a\ufffd"


@pytest.mark.parametrize("stop, kept", [(("cde",), "ab"), (("efg", "cd"), "ab"), (("h",), "abcdefg"), (("abcdefgh",), "")])
def test_stop_strings_cut(stop: tuple[str, ...], kept: str) -> None:
    text, _ = run(BYTES, encode("a b c d e f g h".replace(" ", "")), stop)
    assert text.text == kept and text.stopped


def test_the_earliest_stop_string_wins() -> None:
    """One token completes two of them; what counts is where each begins."""
    tokens = [*encode("x"), *encode("ab")]
    assert run(BYTES, tokens, ("b", "ab", "xab!"))[0].text == "x"


def test_a_stop_string_over_several_tokens_and_characters() -> None:
    text, pieces = run(BYTES, encode("ja 中🙂 nein"), ("中🙂",))
    assert text.text == "ja " and text.stopped
    assert all("中" not in piece for piece in pieces), "held back while it may be the beginning of a stop string"


def test_held_back_text_is_given_once_it_cannot_stop() -> None:
    tokens = [t for c in "1234" for t in encode(c)]
    assert run(BYTES, tokens, ("235",))[1] == ["1", "", "", "234", ""]
    assert run(BYTES, tokens, ("45",))[1] == ["1", "2", "3", "", "4"]


def test_a_stop_string_inside_one_token() -> None:
    token = encode("ab")
    assert len(token) == 1
    assert run(BYTES, [*encode("x"), *token], ("b",))[0].text == "xa"


def test_a_stop_string_in_text_that_still_waited() -> None:
    """An incomplete character behind it must not let it through."""
    tokens = [*encode("1"), *encode("2"), *encode("中")[:1]]
    text = Detokeniser(BYTES, ("2\ufffd",))
    for token in tokens:
        text.push(token)
    text.finish()
    assert text.text == "1"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stop_strings_against_a_search(written: str, stop: list[str]) -> None:
    """Letter by letter, the first stop string to be complete ends the text where the earliest begins."""
    tokens = [t for c in written for t in encode(c)]
    text, _ = run(BYTES, tokens, tuple(stop))
    for end in range(1, len(written) + 1):
        hits = [at for s in stop if (at := written[:end].find(s)) >= 0]
        if hits:
            assert text.text == written[: min(hits)] and text.stopped
            return
    assert text.text == written and not text.stopped

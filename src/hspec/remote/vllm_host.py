"""vLLM's connector for hidden states where there is no CUDA: loaded by vLLM (``kv_connector_module_path``), never by hspec itself.

The one that ships with vLLM 0.32 copies by way of CUDA streams and pinned memory. Here the hidden states lie in main memory already, and
are written from there; all else is inherited.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """Stands for a CUDA event that has come."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class HostHiddenStatesConnector(ExampleHiddenStatesConnector):
    """As the one that it inherits from, for vLLM's CPU backend."""

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a request's hidden states out of the pages, and have them written while vLLM goes on."""
        first = torch.as_tensor(pending.block_ids).reshape(-1, 1) * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        write = self._executor.submit(self._write_tensors, tensors, _Done(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = _Done()
        self._req_futures[pending.req_id] = write

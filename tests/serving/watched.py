"""What tests add to vLLM's workers (``worker_extension_cls``), which are processes of their own with tensor parallelism."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

import hspec.drafters.drafter as drafter_module

drafter_module.has_bf16_products = lambda *_: False  # type: ignore[assignment]
"""So that drafts can be compared with the embedded engine's; see :mod:`tests.serving.engine`."""


class Watched:
    """A worker that keeps what is drafted; its methods are called by ``LLM.collective_rpc``."""

    def watch(self) -> None:
        """Begin to."""
        proposer = self.model_runner.drafter  # type: ignore[attr-defined]
        draft, self.drafts_of = proposer.draft, {}

        def watched(step: Any) -> Any:
            proposal = draft(step)
            q = {} if proposal.probabilities is None else dict(zip(proposal.ids, proposal.probabilities, strict=True))
            for name, sampled, known, drafts in zip(step.ids, step.sampled, step.known, proposal.tokens, strict=True):
                if sampled:
                    request = int(name.split("_")[-1].split("-")[0])
                    self.drafts_of.setdefault(request, []).append((known, drafts, _digest(q.get(name))))
            return proposal

        proposer.draft = watched

    def drafted(self, request: int) -> list[tuple[int, list[int], str]]:
        """Of one request, how many tokens there were at each draft, the draft, and a hash of all bits of the distributions that it was
        drawn from; it is forgotten then."""
        return self.drafts_of.pop(request, [])


def _digest(q: Tensor | None) -> str:
    return "" if q is None else hashlib.sha256(q.numpy().tobytes()).hexdigest()

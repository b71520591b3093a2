"""ReDrafter: a small recurrent cell that starts from the target's last hidden state (Cheng et al., 2024).

s_1 = embedding of the anchor, s_t = SiLU(U s_{t-1} + W e_t + b) with the embedding e_t of the token before; [s_t; h] goes through
a few MLP layers with skips. h is the target's hidden state of the token before the anchor. It keeps nothing per token.

With a beam of W > 1 it drafts the W continuations that score best, as one tree: what they begin with alike is verified once.
They are the same at any temperature, and are verified by the target's own draws. A beam of 1 is a chain of k drafts, drawn from
the drafter's distribution where the request's are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.beam import beam_search
from hspec.drafters.config import ReDrafterConfig
from hspec.drafters.context import Chooser, Draft, DraftContext, greedy_chooser
from hspec.drafters.drafter import Drafter, Prediction
from hspec.drafters.norm import RMSNorm
from hspec.drafters.tree import DraftTree


class ReDrafter(Drafter):
    """See :class:`hspec.drafters.drafter.Drafter` for the arguments."""

    config: ReDrafterConfig

    def __init__(self, config: ReDrafterConfig, embedding: Tensor, head: Tensor, draft_ids: Tensor):
        super().__init__(config, embedding, head, draft_ids)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(hidden, eps=eps)
        self.recurrent = nn.Linear(hidden, hidden, bias=False)  # U
        self.token = nn.Linear(hidden, hidden)  # W and b
        self.layers = nn.ModuleList(nn.Linear(2 * hidden, 2 * hidden) for _ in range(config.mlp_layers))
        self.out = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps=eps)

    @property
    def max_nodes(self) -> int:
        return self.config.beam * self.max_draft

    # -- the pure core -------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...]`` -> ``[..., hidden]``."""
        return F.embedding(tokens, self.embedding).to(self.norm.weight.dtype)

    def context_state(self, context: DraftContext) -> Tensor:
        """h of every block, ``[M, hidden]``."""
        return self.hidden_norm(context.taps[..., -1, :].to(self.norm.weight.dtype)).flatten(0, 1)

    def advance(self, state: Tensor | None, previous: Tensor) -> Tensor:
        """The cell: ``[..., hidden]`` (None before the first step), the token before ``[...]`` -> ``[..., hidden]``."""
        embedded = self.embed(previous)
        return embedded if state is None else F.silu(self.recurrent(state) + self.token(embedded))

    def read(self, state: Tensor, h: Tensor) -> Tensor:
        """What the LM head sees of a state: ``[..., hidden]`` twice -> ``[..., hidden]``."""
        x = torch.cat((state, h.expand_as(state)), dim=-1)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.norm(self.out(x))

    # -- drafting and training -----------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """A chain, step by step; or a tree of ``beam`` candidates, for which ``choose`` is not asked."""
        self.check_k(k)
        if self.config.beam > 1:
            return Draft.of_trees([DraftTree.of(candidates) for candidates in self.candidates(context, k).tolist()])
        h = self.context_state(context)
        state: Tensor | None = None

        def step(j: int, previous: Tensor) -> Tensor:
            nonlocal state
            state = self.advance(state, previous)
            return self.base_logits(self.read(state, h)).float()

        return self._follow(step, context.anchors[:, 0], k, choose)

    @torch.no_grad()
    def candidates(self, context: DraftContext, k: int) -> Tensor:
        """The beam behind each anchor (N = 1): target ids ``[B, W, k]``, the best first."""
        h = self.context_state(context)[:, None]
        state = self.advance(None, context.anchors)  # [B, beams, hidden]

        def log_probabilities() -> Tensor:
            return self.base_logits(self.read(state, h)).float().log_softmax(-1)

        def step(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal state
            before = state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
            state = self.advance(before, self.draft_ids[tokens])
            return log_probabilities()

        beams, _ = beam_search(log_probabilities()[:, 0], step, self.config.beam, k)
        return self.draft_ids[beams]

    def predict(self, context: DraftContext, previous: Tensor) -> Prediction:
        h, tokens = self.context_state(context), previous.flatten(0, 1)
        state: Tensor | None = None
        hidden = []
        for j in range(tokens.shape[1]):
            state = self.advance(state, tokens[:, j])
            hidden.append(self.read(state, h))
        return Prediction(torch.stack(hidden, dim=1))

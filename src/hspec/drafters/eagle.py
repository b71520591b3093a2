"""EAGLE-3 and P-EAGLE: attention layers of their own over a row (token behind i, hidden states of i) for every position i.

The row before the anchor holds the anchor; it is slot 0 of a block. EAGLE-3 drafts token by token: each step takes the drafted
token and its own last hidden state. P-EAGLE drafts all in one pass: slots behind the first have a mask token, and a learned
hidden state for the target's, which is not there yet. Rows before slot 0 are kept as K/V of the drafter's own.

A window counts the rows before a row; for a block the rows before slot 0, the same for all slots. The library ``speculators``
counts the row itself too, so that its W is W - 1 here. Its P-EAGLE's window moves with the slot, which no window here does: with
sliding layers, a P-EAGLE checkpoint of that library is another drafter behind contexts that fill the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.attention import BlockKV, PrefixAttention
from hspec.drafters.config import EagleConfig
from hspec.drafters.context import Chooser, Draft, DraftContext, KVSource, greedy_chooser
from hspec.drafters.drafter import Drafter, Prediction
from hspec.drafters.mlp import GatedMLP
from hspec.drafters.norm import RMSNorm
from hspec.drafters.rope import Rope, rotate
from hspec.targets.cache import CacheShape, KVView


@dataclass
class _Block:
    """Where blocks stand while they are drafted: they see the kept rows before ``stop`` and their own slots so far."""

    stop: Tensor
    """``[B, N]``: the row of slot 0."""
    memory: KVSource
    own: list[BlockKV]
    slots: int = field(default=0)


class EagleLayer(nn.Module):
    """A pre-norm layer; the first one's attention reads the token's embedding beside the hidden state."""

    def __init__(self, config: EagleConfig, index: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm = RMSNorm(hidden, eps=eps) if index == 0 else None
        self.norm = RMSNorm(hidden, eps=eps)
        width = 2 * hidden if index == 0 else hidden
        self.attention = PrefixAttention(hidden, config.attention, index, eps, input_size=width)
        self.mlp_norm = RMSNorm(hidden, eps=eps)
        self.mlp = GatedMLP(hidden, config.intermediate_size)
        self.normed_residual = index == 0 and config.norm_before_residual

    def enter(self, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """State and embedding ``[..., hidden]`` -> what attention reads, and where the residual stream starts."""
        y = self.norm(x)
        residual = y if self.normed_residual else x
        return (y if self.embed_norm is None else torch.cat((self.embed_norm(embedded), y), dim=-1)), residual

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + attended
        return x + self.mlp(self.mlp_norm(x))


class EagleDrafter(Drafter):
    """See :class:`hspec.drafters.drafter.Drafter` for the arguments."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, embedding: Tensor, head: Tensor, draft_ids: Tensor):
        super().__init__(config, embedding, head, draft_ids)
        hidden, eps, taps = config.hidden_size, config.rms_norm_eps, len(config.taps)
        self.fusion_norm = RMSNorm(taps * hidden, eps=eps) if config.norm_before_fc else None
        self.tap_norms = nn.ModuleList(RMSNorm(hidden, eps=eps) for _ in range(taps)) if config.fc_norm else None
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(EagleLayer(config, i) for i in range(config.layers))
        self.ropes = nn.ModuleList(Rope(p, config.attention.head_dim) for p in config.attention.rope)
        self.norm = RMSNorm(hidden, eps=eps)
        self.parallel = config.method == "peagle"
        self.mask_embedding = nn.Parameter(embedding.float().mean(0).clone()) if self.parallel else None
        self.mask_hidden = nn.Parameter(torch.randn(taps, hidden) * 0.02) if self.parallel else None

    # -- the pure core -------------------------------------------------------------------------------------------

    def fuse(self, taps: Tensor) -> Tensor:
        """``[..., F, hidden]`` -> ``[..., hidden]``."""
        taps = taps.to(self.norm.weight.dtype)
        if self.tap_norms is not None:
            taps = torch.stack([norm(taps[..., f, :]) for f, norm in enumerate(self.tap_norms)], dim=-2)
        flat = taps.flatten(-2)
        return self.fc(flat if self.fusion_norm is None else self.fusion_norm(flat))

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self.norm.weight.dtype)

    def _rotations(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """EAGLE-3 rotates a row as its token's position, P-EAGLE as its hidden state's."""
        return [rope(rows if self.parallel else rows + 1) for rope in self.ropes]

    def _run(self, block: _Block, x: Tensor, embedded: Tensor) -> Tensor:
        """The next slots of every block: state and embedding ``[B, N, S, hidden]`` -> the layers' output."""
        rows = block.stop[..., None] + block.slots + torch.arange(x.shape[2], device=x.device)
        block.slots += x.shape[2]
        for i, (layer, rotation) in enumerate(zip(self.layers, self._rotations(rows), strict=True)):
            assert isinstance(layer, EagleLayer)
            y, residual = layer.enter(x, embedded)
            x = layer.leave(residual, layer.attention(y, rotation, block.memory.layer(i), block.stop, block.own[i]))
        return x

    def _block(self, context: DraftContext) -> _Block:
        assert context.memory is not None
        return _Block(context.positions - 1, context.memory, [BlockKV() for _ in self.layers])

    # -- what it keeps -------------------------------------------------------------------------------------------

    @property
    def memory_shape(self) -> CacheShape:
        a = self.config.attention
        return CacheShape(self.config.layers, a.kv_heads, a.head_dim)

    def remember(self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None) -> list[tuple[Tensor, Tensor]]:
        """The layers over the rows of these positions, causally; the last one's K/V need no attention."""
        x, embedded, kept = self.fuse(taps), self.embed(following), []
        for i, (layer, rotation) in enumerate(zip(self.layers, self._rotations(positions), strict=True)):
            assert isinstance(layer, EagleLayer)
            y, residual = layer.enter(x, embedded)
            kept.append(layer.attention.project(y, rotation))
            if i + 1 < len(self.layers):
                before = None if past is None else past.layer(i)
                x = layer.leave(residual, _over_rows(layer.attention, y, rotation, kept[-1], before, positions))
        return kept

    # -- drafting and training -----------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """EAGLE-3: k passes of one slot; P-EAGLE: one of k."""
        self.check_k(k)
        anchors, block, state = context.anchors, self._block(context), self.fuse(context.taps)[:, :, None]
        if self.parallel:
            logits = self.base_logits(self.norm(self._all_slots(context, state, block, k))[:, 0]).float()
            return self._follow(lambda j, _: logits[:, j], anchors[:, 0], k, choose)

        def step(j: int, previous: Tensor) -> Tensor:
            nonlocal state
            out = self._run(block, state, self.embed(previous[:, None, None]))
            normed = self.norm(out)
            state = normed if self.config.norm_output else out
            return self.base_logits(normed[:, 0, 0]).float()

        return self._follow(step, anchors[:, 0], k, choose)

    def predict(self, context: DraftContext, previous: Tensor) -> Prediction:
        """EAGLE-3's is the training-time test: each step takes the true token and the state of its own last step."""
        k, block, state = previous.shape[-1], self._block(context), self.fuse(context.taps)[:, :, None]
        if self.parallel:
            return Prediction(self.norm(self._all_slots(context, state, block, k)).flatten(0, 1))
        hidden = []
        for j in range(k):
            out = self._run(block, state, self.embed(previous[..., j : j + 1]))
            hidden.append(self.norm(out))
            state = hidden[-1] if self.config.norm_output else out
        return Prediction(torch.cat(hidden, dim=2).flatten(0, 1))

    def _all_slots(self, context: DraftContext, state: Tensor, block: _Block, k: int) -> Tensor:
        """P-EAGLE's one pass: slot 0 with what is known, the others with what is learned, ``[B, N, k, hidden]``."""
        assert self.mask_embedding is not None and self.mask_hidden is not None
        B, N = context.shape
        unseen = self.fuse(self.mask_hidden).expand(B, N, k - 1, -1).to(state.dtype)
        masks = self.mask_embedding.expand(B, N, k - 1, -1)
        embedded = torch.cat((self.embed(context.anchors)[:, :, None], masks), dim=2)
        return self._run(block, torch.cat((state, unseen), dim=2), embedded)


def _over_rows(
    attention: PrefixAttention, y: Tensor, rope: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor],
    past: tuple[Tensor, Tensor] | None, positions: Tensor,
) -> Tensor:  # fmt: skip
    """Causal attention of rows ``[B, S, width]`` over themselves and the ``past`` ones; each sees ``window`` rows before it."""
    c = attention.config
    cos, sin = (t[:, None].to(y.dtype) for t in rope)
    q = rotate(attention.q_norm(attention.q_proj(y).unflatten(-1, (-1, c.head_dim))).transpose(1, 2), cos, sin)
    keys, values, at = *own, positions
    if past is not None:
        length = int(positions[:, 0].max())
        before = torch.arange(length, device=y.device).expand(y.shape[0], -1)
        # Rows of a shorter sequence end sooner; what lies behind its end is not there.
        before = torch.where(before < positions[:, :1], before, torch.iinfo(before.dtype).max)
        keys = torch.cat((past[0][:, :, :length].to(keys.dtype), keys), dim=2)
        values = torch.cat((past[1][:, :, :length].to(values.dtype), values), dim=2)
        at = torch.cat((before, positions), dim=1)
    distance = positions[:, :, None] - at[:, None, :]  # [B, S, T]
    visible = (distance >= 0) & (distance <= (distance.numel() if attention.window is None else attention.window))
    out = F.scaled_dot_product_attention(q.to(values.dtype), keys, values, attn_mask=visible[:, None], enable_gqa=True)
    return attention.o_proj(out.transpose(1, 2).flatten(-2))

"""The H-Spec drafter: a hybrid Mamba-attention block over the target's state, with no cache of its own.

A block is the anchor and k mask tokens. Slot j stands at position anchor + j and predicts the token at its own position;
slot 0 is the known anchor. The backbone is a flat list of pre-norm residual sub-layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.attention import PrefixAttention
from hspec.drafters.config import DrafterConfig
from hspec.drafters.context import Chooser, Draft, DraftContext, Prefix, greedy_chooser
from hspec.drafters.heads import ConfidenceHead, MarkovHead, StateSeed
from hspec.drafters.mamba import MambaMixer
from hspec.drafters.norm import RMSNorm
from hspec.drafters.rope import Rope
from hspec.errors import UsageError
from hspec.targets.packing import PackedHalfLinear, PackedLinear, can_pack, has_bf16_products, pack_linears


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HSpecDrafter(nn.Module):
    """Trainable parts are parameters; the target's embedding and LM-head rows are buffers, shared and frozen.

    Args:
        config: see :class:`DrafterConfig`.
        embedding: the target's ``[vocabulary, hidden]``.
        head: the LM head's rows of the draft vocabulary, ``[draft vocabulary, hidden]``.
        draft_ids: target id of each draft id, ascending, ``[draft vocabulary]`` int64.
    """

    embedding: Tensor
    head: Tensor
    draft_ids: Tensor

    def __init__(self, config: DrafterConfig, embedding: Tensor, head: Tensor, draft_ids: Tensor):
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.mask_embedding = nn.Parameter(embedding.float().mean(0).clone())
        self.seed = StateSeed(config) if config.use_state and "mamba" in config.pattern else None
        self.norms = nn.ModuleList(RMSNorm(hidden, eps=eps) for _ in config.pattern)
        self.layers = nn.ModuleList(self._sub_layer(kind) for kind in config.pattern)
        attention = config.attention
        self.ropes = nn.ModuleList(Rope(p, attention.head_dim) for p in attention.rope) if attention else nn.ModuleList()
        self.norm = RMSNorm(hidden, eps=eps)
        self.markov = (
            MarkovHead(config.target.vocab_size, config.draft_vocab_size, config.markov_rank) if config.markov_rank else None
        )
        markov_rank = config.markov_rank if config.confidence_with_markov else 0
        self.confidence = ConfidenceHead(hidden, markov_rank) if config.confidence_head else None
        self._head_linear: nn.Module | None = None

    def _sub_layer(self, kind: str) -> nn.Module:
        c = self.config
        if kind == "mamba":
            assert c.mamba is not None
            return MambaMixer(c.hidden_size, c.mamba)
        if kind == "attention":
            assert c.attention is not None
            return PrefixAttention(c.hidden_size, c.attention, c.rms_norm_eps)
        return GatedMLP(c.hidden_size, c.intermediate_size)

    # -- the pure core -------------------------------------------------------------------------------------------

    def embed_block(self, anchors: Tensor, slots: int) -> Tensor:
        """Anchors ``[B, N]`` -> ``[B, N, slots, hidden]``: the anchor's embedding, then masks."""
        anchor = F.embedding(anchors, self.embedding).to(self.mask_embedding.dtype)[:, :, None]
        masks = self.mask_embedding.expand(*anchors.shape, slots - 1, -1)
        return torch.cat((anchor, masks), dim=2)

    def backbone(self, context: DraftContext, slots: int, trace: list[Tensor] | None = None) -> Tensor:
        """All slots' hidden states after the final norm, ``[B, N, slots, hidden]``.

        ``trace``, if given, receives the residual stream after every sub-layer.
        """
        c = self.config
        B, N = context.shape
        x = self.embed_block(context.anchors, slots)
        states = iter(self._states(context.taps.reshape(B * N, len(c.taps), -1)))
        positions = context.positions[..., None] + torch.arange(slots, device=x.device)
        rotations = iter([rope(positions) for rope in self.ropes])
        kv_layers = iter(c.kv_layers)
        prefix = Prefix.before(context.positions, c.attention.window if c.attention else None)
        for kind, norm, layer in zip(c.pattern, self.norms, self.layers, strict=True):
            y = norm(x)
            if kind == "mamba":
                y = layer(y.view(B * N, slots, -1), next(states)).view(B, N, slots, -1)
            elif kind == "attention":
                kv = context.kv.layer(next(kv_layers)) if c.use_target_kv else None
                y = layer(y, next(rotations), kv, prefix)
            else:
                y = layer(y)
            x = x + y
            if trace is not None:
                trace.append(x)
        return self.norm(x)

    def _states(self, taps: Tensor) -> list[Tensor | None]:
        mambas = self.config.pattern.count("mamba")
        return [None] * mambas if self.seed is None else self.seed(taps.to(self.mask_embedding.dtype), mambas)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` -> ``[..., draft vocabulary]``, without the causal head."""
        return self._head_linear(hidden) if self._head_linear is not None else F.linear(hidden, self.head.to(hidden.dtype))

    def prepare(self, half: bool | None = None) -> HSpecDrafter:
        """Freeze, and swap in the fast inference modules of :mod:`hspec.targets.packing`; not for training.

        Args:
            half: multiply in bf16; None does where the processor has bf16 products. Drafts may then differ in rare ties, the
                text that comes of them does not.
        """
        self.eval().requires_grad_(False)
        head = nn.Linear(self.head.shape[1], self.head.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(self.head, requires_grad=False)
        if can_pack(head):
            half = has_bf16_products(self.head.device) if half is None else half
            kind = PackedHalfLinear if half else PackedLinear
            self._head_linear = kind(head)
            pack_linears(self, kind)
        return self

    @property
    def taps(self) -> list[int]:
        return self.config.taps

    @property
    def max_draft(self) -> int:
        return self.config.max_draft

    # -- drafting ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """Draft k tokens behind each anchor (N = 1): one pass of the backbone, then a walk along the Markov head.

        Raises:
            UsageError: k is not in 1 .. block_size - 1.
        """
        self.check_k(k)
        hidden = self.backbone(context, k + 1)[:, 0, 1:]
        base = self.base_logits(hidden).float()
        previous = context.anchors[:, 0]
        tokens, distributions = [], []
        for slot in range(1, k + 1):
            logits = base[:, slot - 1]
            if self.markov is not None:
                logits = logits + self.markov(previous).float()
            draft_id, q = choose(slot, logits)
            previous = self.draft_ids[draft_id]
            tokens.append(previous)
            distributions.append(q)
        one_hot = any(q is None for q in distributions)
        return Draft(torch.stack(tokens, 1), None if one_hot else torch.stack(distributions, 1))  # type: ignore[arg-type]

    def check_k(self, k: int) -> None:
        if not 1 <= k <= self.config.max_draft:
            raise UsageError(
                f"k = {k} drafted tokens, but this drafter was trained for 1 to {self.config.max_draft}: choose k in that range"
            )

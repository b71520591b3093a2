"""Parallel drafters: all slots of a block in one pass over the target's state.

A block is the anchor and mask tokens (see ``sample_from_anchor`` in the configuration for which slot predicts what). The
backbone is a flat list of pre-norm residual sub-layers: Mamba mixers, attentions, MLPs. H-Spec is the choice that reads the
target's own K/V and seeds its Mamba states, so that it keeps nothing; DFlash and its kin keep K/V of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.attention import PrefixAttention
from hspec.drafters.config import GruConfig, LatentConfig, MarkovConfig, ParallelConfig, SelectorConfig
from hspec.drafters.context import Chooser, Draft, DraftContext, LayerKV, greedy_chooser
from hspec.drafters.convolution import BlockConvolution
from hspec.drafters.drafter import Drafter, Prediction
from hspec.drafters.fusion import Fusion, StateSeed
from hspec.drafters.heads.causal import CausalHead, LowRankHead
from hspec.drafters.heads.confidence import ConfidenceHead
from hspec.drafters.heads.gru import GruHead
from hspec.drafters.heads.latent import LatentHead
from hspec.drafters.heads.markov import markov_head
from hspec.drafters.heads.selector import PathSelector
from hspec.drafters.mamba import MambaMixer
from hspec.drafters.mlp import GatedMLP
from hspec.drafters.norm import RMSNorm
from hspec.drafters.rope import Rope
from hspec.targets.cache import CacheShape, KVView


class ParallelDrafter(Drafter):
    """See :class:`hspec.drafters.drafter.Drafter` for the arguments."""

    config: ParallelConfig
    mask_embedding: Tensor

    def __init__(self, config: ParallelConfig, embedding: Tensor, head: Tensor, draft_ids: Tensor):
        super().__init__(config, embedding, head, draft_ids)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(embedding.float().mean(0).clone())
        else:  # the target's row: nothing to train, nothing to store
            self.register_buffer("mask_embedding", embedding[config.mask_token_id].float().clone(), persistent=False)
        self.seed = StateSeed(config) if config.seeds_state else None
        self.fusion = Fusion(len(config.taps), hidden, config.fusion_rank, eps, config.fusion_norm) if config.injects else None
        self.norms = nn.ModuleList(RMSNorm(hidden, eps=eps) for _ in config.pattern)
        attentions = iter(range(len(config.kv_layers)))
        self.layers = nn.ModuleList(self._sub_layer(kind, attentions) for kind in config.pattern)
        self.convolutions = nn.ModuleList(
            BlockConvolution(hidden, config.convolution) if kind != "mamba" else nn.Identity() for kind in config.pattern
        ) if config.convolution else None  # fmt: skip
        attention = config.attention
        self.ropes = nn.ModuleList(Rope(p, attention.head_dim) for p in attention.rope) if attention else nn.ModuleList()
        self.norm = RMSNorm(hidden, eps=eps)
        self.causal = self._causal_head()
        seen = config.markov_rank if config.confidence_with_markov else 0
        self.confidence = ConfidenceHead(hidden, seen) if config.confidence_head else None

    def _sub_layer(self, kind: str, attentions: Iterator[int]) -> nn.Module:
        c = self.config
        if kind == "mamba":
            assert c.mamba is not None
            return MambaMixer(c.hidden_size, c.mamba)
        if kind == "attention":
            assert c.attention is not None
            return PrefixAttention(c.hidden_size, c.attention, next(attentions), c.rms_norm_eps)
        return GatedMLP(c.hidden_size, c.intermediate_size)

    def _causal_head(self) -> CausalHead | None:
        c, vocabulary = self.config, self.config.target.vocab_size
        if isinstance(c.head, MarkovConfig):
            return markov_head(c.head, vocabulary, c.draft_vocab_size, c.hidden_size, leads=not c.sample_from_anchor)
        if isinstance(c.head, GruConfig):
            return GruHead(c.head, self.embedding, c.draft_vocab_size, c.hidden_size)
        if isinstance(c.head, SelectorConfig):
            return PathSelector(c.head, vocabulary, c.draft_vocab_size, c.hidden_size)
        return LatentHead(c.head, c.hidden_size) if isinstance(c.head, LatentConfig) else None

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
        B, N = context.shape
        x = self.embed_block(context.anchors, slots)
        states = iter(self._states(context.taps.reshape(B * N, len(self.config.taps), -1)))
        positions = context.positions[..., None] + torch.arange(slots, device=x.device)
        attentions = iter(range(len(self.ropes)))
        for index, (kind, norm, layer) in enumerate(zip(self.config.pattern, self.norms, self.layers, strict=True)):
            y = norm(x)
            filters = None if self.convolutions is None or kind == "mamba" else self.convolutions[index](y)
            y = y if filters is None else filters(y, 0)
            if kind == "mamba":
                y = layer(y.view(B * N, slots, -1), next(states)).view(B, N, slots, -1)
            elif kind == "attention":
                i = next(attentions)
                y = layer(y, self.ropes[i](positions), self._prefix_kv(context, i), context.positions)
            else:
                y = layer(y)
            x = x + (y if filters is None else filters(y, 1))
            if trace is not None:
                trace.append(x)
        return self.norm(x)

    def _prefix_kv(self, context: DraftContext, i: int) -> LayerKV | None:
        """What attention sub-layer ``i`` sees before the anchor."""
        assert self.config.attention is not None
        if self.config.attention.context == "target":
            return context.kv.layer(self.config.kv_layers[i])
        return context.memory.layer(i) if context.memory is not None and self.config.injects else None

    def _states(self, taps: Tensor) -> list[Tensor | None]:
        mambas = self.config.pattern.count("mamba")
        return [None] * mambas if self.seed is None else self.seed(taps.to(self.mask_embedding.dtype), mambas)

    @property
    def confident_of_markov(self) -> bool:
        return self.config.confidence_with_markov and self.config.markov_rank > 0

    # -- what injection keeps ------------------------------------------------------------------------------------

    @property
    def memory_shape(self) -> CacheShape | None:
        attention = self.config.attention
        if attention is None or not self.config.injects:
            return None
        return CacheShape(len(self.ropes), attention.kv_heads, attention.head_dim)

    def remember(self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None) -> list[tuple[Tensor, Tensor]]:
        """DFlash's injection: fused features of every position through each attention's own K and V projections."""
        assert self.fusion is not None
        features = self.fusion.fuse(taps.to(self.mask_embedding.dtype))  # [B, S, hidden]
        attentions = [layer for layer in self.layers if isinstance(layer, PrefixAttention)]
        return [layer.project(features, rope(positions)) for layer, rope in zip(attentions, self.ropes, strict=True)]

    # -- drafting and training -----------------------------------------------------------------------------------

    def _slots(self, k: int) -> tuple[int, int]:
        """Slots of a block that drafts k tokens, and the first of them that predicts."""
        return (k, 0) if self.config.sample_from_anchor else (k + 1, 1)

    @torch.no_grad()
    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """One pass of the backbone, then a walk along the causal head."""
        self.check_k(k)
        slots, first = self._slots(k)
        block = self.backbone(context, slots)[:, 0]
        hidden = block[:, first:]
        if self.causal is None:
            logits = self.base_logits(hidden).float()
            return self._follow(lambda j, _: logits[:, j], context.anchors[:, 0], k, choose, hidden)
        walk = self.causal.walk(hidden, block[:, 0], self.base_logits, choose)
        return self._follow(walk, context.anchors[:, 0], k, choose, hidden)

    def predict(self, context: DraftContext, previous: Tensor) -> Prediction:
        k = previous.shape[-1]
        slots, first = self._slots(k)
        block = self.backbone(context, slots).flatten(0, 1)
        hidden = block[:, first:]
        features = None
        if isinstance(self.causal, LowRankHead):
            features = self.causal.features(hidden, previous.flatten(0, 1), block[:, 0])
        return Prediction(hidden, features, block[:, 0])

"""The frozen model: runs tokens through transformers' own modules, taps hidden states, fills the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hspec.errors import UsageError
from hspec.targets.attention import NAME as ATTENTION
from hspec.targets.attention import AttentionRows, TreeRows
from hspec.targets.cache import CacheShape, KVCache, head_dim_of
from hspec.targets.packing import fuse_norms, halve_linears, pack_linears
from hspec.targets.template import ChatTemplate
from hspec.targets.weight_hash import hash_weights, sampled_rows

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
"""Model types whose attention is known to be what :mod:`hspec.targets.attention` computes."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies are the same for every forward; others depend on what else is in the batch."""

PREFILL_CHUNK = 512


@dataclass(frozen=True)
class TargetOutput:
    """Of one forward over ``[batch, count]`` tokens."""

    hidden: Tensor
    """After the final norm, ``[batch, count, hidden]``."""
    taps: Tensor
    """The tapped residual streams, ``[batch, count, taps, hidden]``, in ascending tap order."""


@dataclass
class Target:
    """A frozen causal language model.

    A *tap* ``i`` is the residual stream that enters decoder layer ``i`` (0-based), that is the output of layer
    ``i - 1``; tap ``layers`` is the last layer's output before the final norm.
    """

    model: Any
    """A transformers causal language model."""
    template: ChatTemplate
    name: str
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config
        if config.model_type not in FAMILIES:
            raise UsageError(
                f"target {self.name!r} is of the family {config.model_type!r}; supported are {', '.join(FAMILIES)}"
            )
        for setting in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if getattr(config, setting, None):
                raise UsageError(f"target {self.name!r} has {setting} = {getattr(config, setting)}, which is not supported")
        for kind in _rope_types(config):
            if kind not in ROPE_TYPES:
                raise UsageError(f"target {self.name!r} has rope_type {kind!r}; supported are {', '.join(ROPE_TYPES)}")
        self.model.eval().requires_grad_(False)
        self.config = config
        self.model.set_attn_implementation(ATTENTION)
        self._tapped: dict[int, Tensor] = {}
        self._weight_hash: str | None = None

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        return self.template.tokenizer

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.model.layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def head_dim(self) -> int:
        return head_dim_of(self.config)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape.of(self.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.template.eos_ids

    @property
    def parameters(self) -> int:
        return self._parameters

    def weight_hash(self) -> str:
        """SHA-256 (16 hex digits) over some rows of every weight in fp32, to tell one set of weights from another."""
        if self._weight_hash is None:
            raise AssertionError("Target.prepare() records the hash before it packs the weights")
        return self._weight_hash

    def prepare(self, linears: Literal["packed", "bf16", "plain"] = "packed") -> Target:
        """Record what the swaps below make unreadable, then swap in faster modules. Called once, by the loader.

        Args:
            linears: ``packed`` for exact inference (a no-op where packing is impossible), ``bf16`` for training's frozen
                forward on hardware with bf16 products, ``plain`` to leave the modules as transformers made them.
        """
        self._parameters = sum(p.numel() for p in self.model.parameters())
        weights = sorted(self.model.state_dict().items())
        self._weight_hash = hash_weights((name, w[list(sampled_rows(w.shape[0]))]) for name, w in weights)
        self._head_weight = self.model.get_output_embeddings().weight.detach()
        self._layer_weights = {name: p.detach() for name, p in self.layers.named_parameters()}
        if linears != "plain":
            fuse_norms(self.model)
            (pack_linears if linears == "packed" else halve_linears)(self.model)
        return self

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        """Names (below the layer) and weights of one decoder layer as loaded, to initialise a drafter from."""
        prefix = f"{layer}."
        return {name[len(prefix) :]: w for name, w in self._layer_weights.items() if name.startswith(prefix)}

    @property
    def embedding_weight(self) -> Tensor:
        """``[vocabulary, hidden]``."""
        return self.model.get_input_embeddings().weight.detach()

    @property
    def head_weight(self) -> Tensor:
        """The LM head's ``[vocabulary, hidden]``."""
        return self._head_weight

    # -- running it ----------------------------------------------------------------------------------------------

    def read_kv(self, layers: Sequence[int]) -> None:
        """Say whose K/V will be read of caches that are made from now on; here all layers' are there
        (see :class:`hspec.targets.partial.PartialTarget`)."""

    def expect(self, tokens: Tensor, taps: Sequence[int] = ()) -> None:
        """Say what :meth:`forward` will be asked for soon, into an empty cache; a target whose layers run elsewhere has it begun."""

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.cache_shape, batch, capacity, self.dtype, self.device)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        taps: Sequence[int] = (),
        tree: Sequence[Sequence[int]] | None = None,
        bitwise: bool = True,
    ) -> TargetOutput:
        """Run ``tokens`` ``[batch, count]`` behind what lies in ``cache``; their K/V are staged there, not yet accepted.

        Args:
            tree: where the tokens are one draft tree a sequence: the depths of its rows in preorder, the anchor's 0 first
                (see :class:`hspec.targets.attention.TreeRows`). Trees of fewer than ``count`` rows are padded behind, with
                any token; what comes out there means nothing. :meth:`KVCache.keep_paths` then accepts.
            bitwise: of a tree on a CPU: the attention of every row equals plain decoding of its path in every bit, and so do
                the logits where the linears do not depend on the number of rows. Without, attention is one call a
                sequence, which is faster and rounds differently, as a chain of drafts does.

        Raises:
            AssertionError: depths that are no tree's, or do not fit ``tokens``.
            UsageError: the cache is too short.
        """
        batch, count = tokens.shape
        on_cpu = self.device.type == "cpu"
        rows: AttentionRows | TreeRows
        if tree is None:
            rows = AttentionRows(list(cache.lengths), count, exact=on_cpu)
            positions = torch.tensor(cache.lengths, device=self.device)[:, None] + torch.arange(count, device=self.device)
        else:
            rows = TreeRows(list(cache.lengths), tree, on_cpu, bitwise)
            if (len(tree), rows.count) != (batch, count):
                raise AssertionError(f"{len(tree)} trees of up to {rows.count} rows for {batch} x {count} tokens")
            positions = rows.positions(self.device)
        cache.stage(count)
        with self._tapping(taps):
            hidden = self.model.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                hspec_rows=rows,
            ).last_hidden_state
            tapped = [self._tapped[i] for i in taps]
        stacked = torch.stack(tapped, dim=2) if tapped else hidden.new_empty(batch, count, 0, self.hidden_size)
        return TargetOutput(hidden, stacked)

    def prefill_chunks(self, tokens: Tensor, cache: KVCache, taps: Sequence[int] = ()) -> Iterator[TargetOutput]:
        """Run a long input ``[batch, count]`` in chunks, accept all of it, and give each chunk's output.

        Raises:
            UsageError: no token to run.
        """
        if tokens.shape[1] == 0:
            raise UsageError("nothing to run: the prompt has no tokens")
        for chunk in tokens.split(PREFILL_CHUNK, dim=1):
            output = self.forward(chunk, cache, taps)
            cache.advance([chunk.shape[1]] * cache.batch)
            yield output

    def prefill(self, tokens: Tensor, cache: KVCache, taps: Sequence[int] = ()) -> TargetOutput:
        """As :meth:`prefill_chunks`; returns the last row only (``count`` = 1)."""
        for output in self.prefill_chunks(tokens, cache, taps):
            last = output
        return TargetOutput(last.hidden[:, -1:], last.taps[:, -1:])

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` after the final norm -> ``[..., vocabulary]`` in fp32."""
        logits = self.model.get_output_embeddings()(hidden).float()
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @contextmanager
    def _tapping(self, taps: Sequence[int]) -> Iterator[None]:
        """Hooks on the inputs of the tapped layers, for the time of one forward."""
        self._tapped = {}
        handles = []
        for tap in taps:
            if tap == len(self.layers):
                handles.append(self.layers[-1].register_forward_hook(self._keep_output(tap)))
            else:
                handles.append(self.layers[tap].register_forward_pre_hook(self._keep_input(tap)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep_input(self, tap: int):  # type: ignore[no-untyped-def]
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._tapped[tap] = args[0]

        return hook

    def _keep_output(self, tap: int):  # type: ignore[no-untyped-def]
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            self._tapped[tap] = output

        return hook


def _rope_types(config: Any) -> set[str]:
    """Of all layers: some families have one set of rotary parameters, others one for each kind of layer."""
    parameters = config.rope_parameters
    sets = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return {p.get("rope_type", "default") for p in sets}

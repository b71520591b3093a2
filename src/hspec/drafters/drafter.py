"""What all trained drafters share: the target's frozen parts, the interface to the loop and to training, fast inference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hspec.drafters.config import DrafterConfig
from hspec.drafters.context import Chooser, Draft, DraftContext, greedy_chooser
from hspec.drafters.heads.causal import CausalHead, Walk
from hspec.drafters.heads.confidence import ConfidenceHead
from hspec.drafters.heads.markov import MarkovHead
from hspec.errors import UsageError
from hspec.targets.cache import CacheShape, KVView
from hspec.targets.packing import PackedHalfLinear, PackedLinear, can_pack, has_bf16_products, pack_linears


@dataclass(frozen=True)
class Prediction:
    """Of M = B x N blocks in training, each slot behind its true token."""

    hidden: Tensor
    """``[M, k, hidden]``; the LM head makes the slots' base logits of it."""
    features: Tensor | None = None
    """What a low-rank causal head adds through its W_2, ``[M, k, rank]``."""
    anchor_hidden: Tensor | None = None
    """Slot 0's hidden state, ``[M, hidden]``, for heads that look at it."""


class Drafter(nn.Module, ABC):
    """A trained drafter. Its own weights are parameters; the target's embedding and LM-head rows are buffers, shared and frozen.

    Args:
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
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._head_linear: nn.Module | None = None
        self.causal: CausalHead | None = None
        self.confidence: ConfidenceHead | None = None
        self.says_chances = False
        """Whether drafts come with what the confidence head makes of them; nobody else should pay for it."""

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def taps(self) -> list[int]:
        return self.config.taps

    @property
    def max_draft(self) -> int:
        return self.config.max_draft

    @property
    def max_nodes(self) -> int:
        """The most drafts of one step, all branches of a tree together."""
        return self.max_draft

    @property
    def memory_shape(self) -> CacheShape | None:
        """What the drafter keeps for every context token; None for one that keeps nothing, as H-Spec."""
        return None

    @property
    def reads_history(self) -> bool:
        """Whether it looks at all tokens so far, and not only at what the target makes of them."""
        return False

    @property
    def confident_of_markov(self) -> bool:
        """Whether the confidence head also sees the Markov embedding."""
        return False

    def check_k(self, k: int) -> None:
        if not 1 <= k <= self.max_draft:
            raise UsageError(
                f"k = {k} drafted tokens, but this drafter was trained for 1 to {self.max_draft}: choose k in that range"
            )

    # -- its parts -----------------------------------------------------------------------------------------------

    def base_logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` -> ``[..., draft vocabulary]``, without a causal head."""
        return self._head_linear(hidden) if self._head_linear is not None else F.linear(hidden, self.head.to(hidden.dtype))

    def prepare(self, half: bool | None = None) -> Self:
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

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What the confidence head makes of slots ``[..., hidden]`` and the tokens before them ``[...]`` (target ids): ``[...]``.
        Nothing but the head learns from it, if ``hidden`` is detached."""
        assert self.confidence is not None
        seen = self.causal.embed(previous) if isinstance(self.causal, MarkovHead) and self.confident_of_markov else None
        return self.confidence(hidden, None if seen is None else seen.detach())

    # -- what it does --------------------------------------------------------------------------------------------

    def remember(self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that the drafter keeps of tokens which the target has just run; for those with a ``memory_shape``.

        Args:
            taps: their tapped hidden states ``[B, S, F, hidden]``. following: the token behind each, ``[B, S]``.
            positions: theirs, ``[B, S]``, each row consecutive.
            past: what is kept of the tokens before them; None for none.

        Returns:
            For each layer of the memory, K and V ``[B, kv_heads, S, head_dim]``; differentiable.
        """
        raise AssertionError(f"{type(self).__name__} keeps nothing")

    @abstractmethod
    def propose(self, context: DraftContext, k: int, choose: Chooser = greedy_chooser) -> Draft:
        """Draft k tokens behind each anchor (N = 1).

        Raises:
            UsageError: k is not in 1 .. ``max_draft``.
        """

    @abstractmethod
    def predict(self, context: DraftContext, previous: Tensor) -> Prediction:
        """Training's view of B x N blocks of k slots; ``previous`` is the true token before each slot, ``[B, N, k]``."""

    def _follow(self, walk: Walk, anchors: Tensor, k: int, choose: Chooser, hidden: Tensor | None = None) -> Draft:
        """Pick slot by slot: anchors ``[B]``; ``hidden`` ``[B, k, hidden]`` is what the confidence head looks at, if it is asked."""
        previous = anchors
        tokens, distributions, confident = [], [], []
        for slot in range(k):
            if self.says_chances and self.confidence is not None and hidden is not None:
                confident.append(self.confidence_logits(hidden[:, slot], previous).float().sigmoid())
            draft_id, q = choose(slot + 1, walk(slot, previous))
            previous = self.draft_ids[draft_id]
            tokens.append(previous)
            distributions.append(q)
        return Draft(
            torch.stack(tokens, 1),
            None if any(q is None for q in distributions) else torch.stack(distributions, 1),  # type: ignore[arg-type]
            chances=torch.stack(confident, 1).cumprod(1) if confident else None,
        )

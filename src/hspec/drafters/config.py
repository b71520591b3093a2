"""What a drafter is, as one strict schema: the source of presets, checkpoints and saved runs.

A parallel drafter is a choice of parts: what it sees of the target (``attention.context``, ``use_state``), a backbone
(``pattern``, ``convolution``) and a causal head (``head``). Its ``method`` is the name under which the choice is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

SubLayer = Literal["mamba", "attention", "mlp"]
Context = Literal["target", "features", "none"]
ParallelMethod = Literal[
    "hspec", "dspark", "dflash", "dflash-kv", "dflash2", "domino", "dblast",
    "hspec-no-state", "hspec-no-kv", "mamba-only", "attention-only", "hspec-dflash2", "hspec-domino",
]  # fmt: skip


class Strict(BaseModel):
    """Unknown keys are errors; instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetIdentity(Strict):
    """Which target a drafter was made for; checked when the two meet."""

    name: str
    family: str
    layers: int
    hidden_size: int
    vocab_size: int
    weight_hash: str | None = None
    template_hash: str | None = None


class MambaConfig(Strict):
    """The Mamba-2 mixer. The inner width is ``heads * head_dim``; it need not be the hidden size."""

    heads: int = Field(gt=0)
    head_dim: int = Field(64, gt=0)
    state_dim: int = Field(4, gt=0)
    groups: int = Field(4, gt=0)
    conv_kernel: int = Field(4, gt=0)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_dim

    @model_validator(mode="after")
    def _groups_divide_heads(self) -> MambaConfig:
        if self.heads % self.groups:
            raise ValueError(f"mamba.heads ({self.heads}) must be a multiple of mamba.groups ({self.groups})")
        return self


class AttentionConfig(Strict):
    """The drafter's attention: what it sees before the anchor, and how."""

    context: Context = "target"
    """``target``: the target's K/V in place (heads and head size are then its own). ``features``: K/V that the drafter projects
    from tapped hidden states of every position, and keeps. ``none``: the block alone."""
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    qk_norm: bool = True
    window: Annotated[int, Field(gt=0)] | list[Annotated[int, Field(gt=0)] | None] | None = 2048
    """How many tokens before the anchor every slot sees; None is all of them. A list has one entry for each sub-layer."""
    causal_block: bool | list[bool] = True
    """Whether slot j sees only slots <= j of its own block. A list has one entry for each sub-layer."""
    rope: list[dict[str, Any]]
    """RoPE parameters, one entry for each attention sub-layer (transformers' names); those of the reused target layer."""

    @model_validator(mode="after")
    def _consistent(self) -> AttentionConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"attention.heads ({self.heads}) must be a multiple of attention.kv_heads ({self.kv_heads})")
        for name in ("window", "causal_block"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != len(self.rope):
                raise ValueError(f"attention.{name} has {len(value)} entries for {len(self.rope)} attention sub-layers")
        return self

    def window_of(self, index: int) -> int | None:
        return self.window[index] if isinstance(self.window, list) else self.window

    def causal_of(self, index: int) -> bool:
        return self.causal_block[index] if isinstance(self.causal_block, list) else self.causal_block


class ConvolutionConfig(Strict):
    """The dynamic convolution of DFlash-2, round every attention and MLP."""

    kernel: int = Field(2, ge=2)
    group: int = Field(16, gt=0)
    """Channels that share what the convolution adds to its base."""


class MarkovConfig(Strict):
    """A first-order bias on the logits, from the token before."""

    kind: Literal["markov"] = "markov"
    rank: int = Field(256, gt=0)
    variant: Literal["vanilla", "gated", "recurrent"] = "vanilla"


class GruConfig(Strict):
    """Domino's: a GRU over the embeddings of the block's tokens, and a low-rank addition to the logits."""

    kind: Literal["gru"] = "gru"
    size: int = Field(1024, gt=0)
    rank: int = Field(256, gt=0)


class SelectorConfig(Strict):
    """DFlash-2's: a walk over the best candidates of every slot."""

    kind: Literal["selector"] = "selector"
    rank: int = Field(256, gt=0)
    candidates: int = Field(16, ge=2)


class LatentConfig(Strict):
    """DBLAST's: one category for the whole block, which shifts every slot's hidden state."""

    kind: Literal["latent"] = "latent"
    values: int = Field(4, ge=2)
    rank: int = Field(64, gt=0)


HeadConfig = Annotated[MarkovConfig | GruConfig | SelectorConfig | LatentConfig, Field(discriminator="kind")]


class DrafterConfig(Strict, ABC):
    """What every drafter's configuration has."""

    format: Literal[2] = 2
    method: str
    target: TargetIdentity
    hidden_size: int = Field(gt=0)
    rms_norm_eps: float = 1e-6
    block_size: int = Field(8, ge=1, le=17)
    taps: list[int] = Field(min_length=1)
    """Target residual streams (inputs of these layers) that the drafter sees, ascending."""
    draft_vocab_size: int = Field(gt=0)

    @model_validator(mode="after")
    def _fits_target(self) -> DrafterConfig:
        if self.hidden_size != self.target.hidden_size:
            raise ValueError(f"hidden_size {self.hidden_size} must be the target's, {self.target.hidden_size}: they share it")
        if list(self.taps) != sorted(set(self.taps)) or self.taps[-1] > self.target.layers or self.taps[0] < 0:
            raise ValueError(f"taps {self.taps} must ascend within 0..{self.target.layers}")
        if self.draft_vocab_size > self.target.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.target.vocab_size}")
        return self

    @property
    @abstractmethod
    def max_draft(self) -> int:
        """The largest k this drafter can serve."""


class ParallelConfig(DrafterConfig):
    """A parallel drafter and everything that must be known to run it."""

    method: ParallelMethod = "hspec"
    pattern: list[SubLayer] = Field(min_length=1)
    intermediate_size: int = Field(gt=0)
    sample_from_anchor: bool = False
    """False: a block is the anchor and k masks, and slot j predicts the token at its own position. True: it is the anchor and
    k - 1 masks, and slot j predicts the token behind it."""
    mask_token_id: int | None = Field(None, ge=0)
    """None: what mask slots start from is a trained vector. A token: it is the target's frozen embedding of that token, as in
    the layout of speculators, which stores none; a drafter that is to be written there is trained so."""
    mamba: MambaConfig | None
    attention: AttentionConfig | None
    kv_layers: list[int]
    """Target layer whose K/V each attention sub-layer reads, or (with another context) whose weights it starts from."""
    fusion_rank: int = Field(gt=0)
    fusion_norm: bool = False
    """Whether every tap has an RMSNorm of its own before the fusion."""
    seed_mode: Literal["shared", "per_layer", "once"] = "shared"
    use_state: bool = True
    """Whether the taps before the anchor seed the Mamba states; otherwise they start at zero."""
    convolution: ConvolutionConfig | None = None
    head: HeadConfig | None = MarkovConfig()
    confidence_head: bool = True
    confidence_with_markov: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        attentions = self.pattern.count("attention")
        if "mamba" in self.pattern and self.mamba is None:
            raise ValueError("pattern has mamba sub-layers, but there is no mamba section")
        if attentions and self.attention is None:
            raise ValueError("pattern has attention sub-layers, but there is no attention section")
        if len(self.kv_layers) != attentions:
            raise ValueError(f"kv_layers has {len(self.kv_layers)} entries for {attentions} attention sub-layers")
        if self.attention is not None and len(self.attention.rope) != attentions:
            raise ValueError(f"attention.rope has {len(self.attention.rope)} entries for {attentions} attention sub-layers")
        if self.mask_token_id is not None and self.mask_token_id >= self.target.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not in the target's vocabulary of {self.target.vocab_size}"
            )
        if any(not 0 <= layer < self.target.layers for layer in self.kv_layers):
            raise ValueError(f"kv_layers {self.kv_layers} must lie in 0..{self.target.layers - 1}")
        if self.convolution is not None and self.hidden_size % self.convolution.group:
            raise ValueError(f"convolution.group ({self.convolution.group}) must divide hidden_size ({self.hidden_size})")
        if isinstance(self.head, SelectorConfig) and self.head.candidates > self.draft_vocab_size:
            raise ValueError(f"head.candidates ({self.head.candidates}) exceeds draft_vocab_size ({self.draft_vocab_size})")
        if self.confidence_with_markov and self.confidence_head and not isinstance(self.head, MarkovConfig):
            raise ValueError("confidence_with_markov needs a Markov head")
        if self.injects and self.fusion_rank != self.hidden_size:
            raise ValueError(
                f"fusion_rank ({self.fusion_rank}) must be hidden_size ({self.hidden_size}) where attention.context is 'features': "
                f"the projections of the block's own K and V read it too"
            )
        if self.max_draft < 1:
            raise ValueError(f"block_size {self.block_size} leaves no slot to draft")
        return self

    @property
    def max_draft(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def markov_rank(self) -> int:
        """0 for no Markov head."""
        return self.head.rank if isinstance(self.head, MarkovConfig) else 0

    @property
    def seeds_state(self) -> bool:
        return self.use_state and "mamba" in self.pattern

    @property
    def injects(self) -> bool:
        """Whether the drafter projects, and keeps, K/V of its own for every context token."""
        return self.attention is not None and self.attention.context == "features" and "attention" in self.pattern


class EagleConfig(DrafterConfig):
    """EAGLE-3 and P-EAGLE: own attention layers over (token, hidden state) pairs at every position.

    EAGLE-3 drafts one token a pass and feeds its own hidden state back; P-EAGLE drafts all in one pass, with a learned hidden
    state where the target's is not there yet. ``attention.window`` counts the rows before slot 0's, for all slots of a block.
    """

    method: Literal["eagle3", "peagle"] = "eagle3"
    layers: int = Field(1, gt=0)
    intermediate_size: int = Field(gt=0)
    attention: AttentionConfig
    kv_layers: list[int]
    """Target layer whose weights each attention layer starts from."""
    norm_before_residual: bool = False
    """Whether the residual stream starts from the normed fused state."""
    norm_before_fc: bool = False
    """An RMSNorm over all taps together, before the fusion ..."""
    fc_norm: bool = False
    """... or one for each of them."""
    norm_output: bool = False
    """Whether the state that EAGLE-3 feeds back is the one behind the final norm."""

    @model_validator(mode="after")
    def _consistent(self) -> EagleConfig:
        if not len(self.attention.rope) == len(self.kv_layers) == self.layers:
            raise ValueError(f"attention.rope and kv_layers must have an entry for each of {self.layers} layers")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        return self

    @property
    def max_draft(self) -> int:
        return self.block_size


class ReDrafterConfig(DrafterConfig):
    """ReDrafter: a recurrent cell from the target's last hidden state; beam search, or a chain."""

    method: Literal["redrafter"] = "redrafter"
    mlp_layers: int = Field(2, ge=0)
    beam: int = Field(1, ge=1)
    """Candidates a step; 1 is a chain."""

    @property
    def max_draft(self) -> int:
        return self.block_size


SCHEMAS: dict[str, type[DrafterConfig]] = {
    method: schema
    for schema in (ParallelConfig, EagleConfig, ReDrafterConfig)
    for method in get_args(schema.model_fields["method"].annotation)
}
"""The schema of each method that has a checkpoint."""

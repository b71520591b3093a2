"""What a drafter is, as one strict schema: the source of presets, checkpoints and saved runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SubLayer = Literal["mamba", "attention", "mlp"]


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
    """The drafter's attention; K/V heads and head size are those of the target, whose cache it reads."""

    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    qk_norm: bool = True
    window: int | None = Field(2048, gt=0)
    """How many tokens before the anchor every slot sees; None is all of them."""
    causal_block: bool = True
    """Whether slot j sees only slots <= j of its own block."""
    rope: list[dict[str, Any]]
    """RoPE parameters of the reused target layer, one entry for each attention sub-layer (transformers' names)."""

    @model_validator(mode="after")
    def _kv_heads_divide_heads(self) -> AttentionConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"attention.heads ({self.heads}) must be a multiple of attention.kv_heads ({self.kv_heads})")
        return self


class DrafterConfig(Strict):
    """An H-Spec drafter and everything that must be known to run it."""

    format: Literal[1] = 1
    method: Literal["hspec"] = "hspec"
    target: TargetIdentity
    pattern: list[SubLayer] = Field(min_length=1)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    rms_norm_eps: float = 1e-6
    block_size: int = Field(8, ge=2, le=17)
    """Anchor slot plus drafted slots: k is at most ``block_size - 1``."""
    mamba: MambaConfig | None
    attention: AttentionConfig | None
    taps: list[int] = Field(min_length=1)
    """Target residual streams (inputs of these layers) that seed the Mamba state, ascending."""
    kv_layers: list[int]
    """Target layer whose K/V each attention sub-layer reads."""
    fusion_rank: int = Field(gt=0)
    fusion_norm: bool = False
    """Whether every tap has an RMSNorm of its own before the fusion."""
    seed_mode: Literal["shared", "per_layer", "once"] = "shared"
    draft_vocab_size: int = Field(gt=0)
    markov_rank: int = Field(256, ge=0)
    """0 for no Markov head."""
    confidence_head: bool = True
    confidence_with_markov: bool = True
    use_state: bool = True
    use_target_kv: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        attentions = self.pattern.count("attention")
        if "mamba" in self.pattern and self.mamba is None:
            raise ValueError("pattern has mamba sub-layers, but there is no mamba section")
        if attentions and self.attention is None:
            raise ValueError("pattern has attention sub-layers, but there is no attention section")
        if self.hidden_size != self.target.hidden_size:
            raise ValueError(f"hidden_size {self.hidden_size} must be the target's, {self.target.hidden_size}: they share it")
        if len(self.kv_layers) != attentions:
            raise ValueError(f"kv_layers has {len(self.kv_layers)} entries for {attentions} attention sub-layers")
        if self.attention is not None and len(self.attention.rope) != attentions:
            raise ValueError(f"attention.rope has {len(self.attention.rope)} entries for {attentions} attention sub-layers")
        if list(self.taps) != sorted(set(self.taps)) or self.taps[-1] > self.target.layers or self.taps[0] < 0:
            raise ValueError(f"taps {self.taps} must ascend within 0..{self.target.layers}")
        if any(not 0 <= layer < self.target.layers for layer in self.kv_layers):
            raise ValueError(f"kv_layers {self.kv_layers} must lie in 0..{self.target.layers - 1}")
        if self.draft_vocab_size > self.target.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.target.vocab_size}")
        if self.confidence_with_markov and self.confidence_head and not self.markov_rank:
            raise ValueError("confidence_with_markov needs a Markov head (markov_rank > 0)")
        return self

    @property
    def max_draft(self) -> int:
        """The largest k this drafter can serve."""
        return self.block_size - 1

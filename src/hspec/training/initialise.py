"""Where a drafter's weights start: copies of the target's layers, and random ones where the target has no such part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hspec.drafters.attention import PrefixAttention
from hspec.drafters.checkpoint import build_drafter
from hspec.drafters.config import DrafterConfig, TargetIdentity
from hspec.drafters.drafter import Drafter
from hspec.drafters.eagle import EagleDrafter, EagleLayer
from hspec.drafters.mamba import MambaMixer
from hspec.drafters.mlp import GatedMLP
from hspec.drafters.norm import RMSNorm
from hspec.drafters.parallel import ParallelDrafter
from hspec.drafters.redrafter import ReDrafter
from hspec.errors import UsageError
from hspec.targets.target import Target
from hspec.training.corpus import Corpus, Example

FINAL_NORM_SCALE = 0.3
"""The target's final norm makes confident logits of a finished residual stream; a fresh drafter's is noise, and would begin far
above the loss of a uniform guess. Measured: 6.24 after 43 updates with 0.3, 6.62 after 60 with 1."""


EMBEDDED_STD = 0.02


def identity(target: Target) -> TargetIdentity:
    return TargetIdentity(
        name=target.name,
        family=target.config.model_type,
        layers=len(target.layers),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        weight_hash=target.weight_hash(),
        template_hash=target.template.hash,
    )


def mask_token(target: Target) -> int | None:
    """A token whose embedding can stand for "not known yet": the tokenizer's mask, or a special token that chats never have.

    Drafters of the formats that servers load have no mask vector of their own, but name a row of the target's embedding.
    """
    tokenizer = target.tokenizer
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return int(tokenizer.mask_token_id)
    said = set(target.template.encode([{"role": "user", "content": "a"}])) | target.eos_ids
    free = [i for i in sorted(tokenizer.all_special_ids, reverse=True) if i not in said and i < target.vocab_size]
    return next((i for i in free if float(target.embedding_weight[i].float().norm()) > 1e-3), None)


def draft_vocabulary(examples: Sequence[Example], target: Target, size: int) -> Tensor:
    """The ``size`` tokens that the assistant wrote most often, ascending ids, always with those that end or shape a turn. Of equally
    frequent ones the lowest ids, which a tokenizer gives to the most common pieces.

    Raises:
        UsageError: the size is above the target's vocabulary, or below the number of its special tokens.
    """
    if size > target.vocab_size:
        raise UsageError(f"a draft vocabulary of {size} exceeds the target's {target.vocab_size}")
    special = sorted(i for i in target.eos_ids | set(target.tokenizer.all_special_ids) if i < target.vocab_size)
    if size < len(special):
        raise UsageError(
            f"a draft vocabulary of {size} has no room for the target's {len(special)} special tokens: choose a larger one"
        )
    counts = Corpus.of(examples).supervised_counts(target.vocab_size)
    counts[special] = np.iinfo(counts.dtype).max
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def check_draft_vocabulary(draft_ids: Tensor, target: Target) -> None:
    """Whether a drafter can propose to end a turn.

    Raises:
        UsageError: none of the target's EOS tokens is among ``draft_ids`` ``[draft vocabulary]``.
    """
    if not target.eos_ids & set(draft_ids.tolist()):
        raise UsageError(
            f"the draft vocabulary has none of the target's EOS tokens {sorted(target.eos_ids)}, so that no draft could end: start from "
            f"the target's layers instead (leave --init-from out)"
        )


def initialise(
    config: DrafterConfig, target: Target, draft_ids: Tensor, seed: int, sample: Tensor | None = None, copy_layers: bool = True
) -> Drafter:
    """A new drafter on ``target``.

    Of a parallel drafter, attention sub-layers start as the reused target layer (norm, q, k, v, o), MLPs as the MLP of the
    attention before them (the first as that of the lowest of the three highest taps), wider ones with further units that begin
    without effect; where sizes do not agree, and all else, is random, norms at one.
    The layers of EAGLE start as the target's highest ones. A fusion whose output is as wide as a tap passes one of them on.

    Args:
        sample: token ids ``[1, T]`` of the target's text; where the target has no q/k norm, the drafter's norms start at the
            RMS that the reused layer's queries and keys have there, so that scores start at the target's scale. None: ones.
        copy_layers: False leaves all of it random.
    """
    torch.manual_seed(seed)
    drafter = build_drafter(config, target, draft_ids)
    if not copy_layers:
        return drafter
    if isinstance(drafter, ParallelDrafter):
        _initialise_parallel(drafter, target, sample)
    elif isinstance(drafter, EagleDrafter):
        _initialise_eagle(drafter, target, sample)
    elif isinstance(drafter, ReDrafter):
        _copy_final_norm(drafter.norm, target)
    return drafter


def _initialise_eagle(drafter: EagleDrafter, target: Target, sample: Tensor | None) -> None:
    _pass_on(drafter.fc, len(drafter.taps) - 1)
    for layer, source in zip(drafter.layers, drafter.config.kv_layers, strict=True):
        assert isinstance(layer, EagleLayer)
        _copy_attention(layer.attention, layer.norm, target, source, sample)
        _copy_mlp(layer.mlp, layer.mlp_norm, target, source)
    _copy_final_norm(drafter.norm, target)


def _pass_on(fc: nn.Linear, tap: int) -> None:
    """A fusion that begins as one of its taps, with a little of the others."""
    width = fc.in_features // fc.out_features
    if fc.in_features != width * fc.out_features:
        return
    with torch.no_grad():
        fc.weight.normal_(std=0.1 * fc.in_features**-0.5)
        fc.weight[:, tap * fc.out_features : (tap + 1) * fc.out_features] += torch.eye(fc.out_features, device=fc.weight.device)


def _copy_final_norm(norm: RMSNorm, target: Target) -> None:
    final = target.model.model.norm.weight
    if final.shape == norm.weight.shape:
        _copy(norm.weight, _scale(target, final) * FINAL_NORM_SCALE)


def _initialise_parallel(drafter: ParallelDrafter, target: Target, sample: Tensor | None) -> None:
    config = drafter.config
    if drafter.fusion is not None:
        _pass_on(drafter.fusion.fc, max(0, len(config.taps) - 2))
    depth = 1 / (2 * len(config.pattern)) ** 0.5
    for layer in drafter.layers:
        if isinstance(layer, MambaMixer):
            nn.init.normal_(layer.in_proj.weight, std=config.hidden_size**-0.5)
            nn.init.normal_(layer.out_proj.weight, std=depth * layer.config.inner**-0.5)
    sources = iter(config.kv_layers)
    layer_id = config.taps[-3] if len(config.taps) >= 3 else config.taps[0]
    for norm, layer in zip(drafter.norms, drafter.layers, strict=True):
        if isinstance(layer, PrefixAttention):
            layer_id = next(sources)
            _copy_attention(layer, norm, target, layer_id, sample)
        elif isinstance(layer, GatedMLP):
            _copy_mlp(layer, norm, target, layer_id)
    _copy_final_norm(drafter.norm, target)


def _scale(target: Target, weight: Tensor) -> Tensor:
    """What a norm of the target multiplies with: Gemma stores it less one."""
    return weight.float() + 1.0 if target.config.model_type.startswith("gemma") else weight.float()


def _copy(parameter: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(source.float())


def _copy_attention(layer: PrefixAttention, norm: nn.Module, target: Target, layer_id: int, sample: Tensor | None) -> None:
    weights = target.layer_weights(layer_id)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        source = weights[f"self_attn.{name}.weight"]
        linear = getattr(layer, name)
        if source.shape == linear.weight.shape:
            _copy(linear.weight, source)
        elif name != "o_proj" and linear.weight.shape == (source.shape[0], 2 * source.shape[1]):
            nn.init.normal_(linear.weight[:, : source.shape[1]], std=EMBEDDED_STD)
            _copy(linear.weight[:, source.shape[1] :], source)  # EAGLE's: the token's embedding, then the hidden state
    _copy(norm.weight, _scale(target, weights["input_layernorm.weight"]))  # type: ignore[arg-type]
    for name in ("q_norm", "k_norm"):
        own = getattr(layer, name)
        if f"self_attn.{name}.weight" in weights:
            _copy(own.weight, _scale(target, weights[f"self_attn.{name}.weight"]))
        elif sample is not None and not isinstance(own, nn.Identity):
            _copy(own.weight, _projection_rms(target, layer_id, sample, weights, name[0], layer.config.head_dim))


def _projection_rms(
    target: Target, layer_id: int, sample: Tensor, weights: dict[str, Tensor], which: str, head_dim: int
) -> Tensor:
    """RMS over heads and positions of the target's q or k before RoPE, the same for both halves of a rotated pair: ``[d]``."""
    tap = target.forward(sample.to(target.device), target.new_cache(1, sample.shape[1]), [layer_id]).taps[:, :, 0].float()
    weight = _scale(target, weights["input_layernorm.weight"])
    normed = torch.nn.functional.rms_norm(tap, tap.shape[-1:], weight, target.config.rms_norm_eps)
    projected = (normed @ weights[f"self_attn.{which}_proj.weight"].float().T).view(-1, head_dim)
    square = projected.square().mean(0)
    half = (square[: head_dim // 2] + square[head_dim // 2 :]) / 2
    return torch.cat((half, half)).sqrt()


def _copy_mlp(layer: GatedMLP, norm: nn.Module, target: Target, layer_id: int) -> None:
    """Units beyond the target's (an MLP widened to match parameters) add nothing until they have learnt: were all of it random instead,
    ablations that widen would begin far behind those that do not."""
    weights = target.layer_weights(layer_id)
    units, hidden = weights["mlp.gate_proj.weight"].shape
    if layer.gate_proj.in_features != hidden or layer.gate_proj.out_features < units:
        return
    for name in ("gate_proj", "up_proj"):
        _copy(getattr(layer, name).weight[:units], weights[f"mlp.{name}.weight"])
    nn.init.zeros_(layer.down_proj.weight)
    _copy(layer.down_proj.weight[:, :units], weights["mlp.down_proj.weight"])
    before = "pre_feedforward_layernorm.weight"  # Gemma's; its post_attention_layernorm is behind the attention
    source = weights[before] if before in weights else weights["post_attention_layernorm.weight"]
    _copy(norm.weight, _scale(target, source))  # type: ignore[arg-type]

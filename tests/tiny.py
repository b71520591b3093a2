"""Targets and drafters small enough for tests: random weights, a tokenizer made here, nothing downloaded.

The same arguments give the same weights, bit for bit.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hspec.drafters.checkpoint import build_drafter
from hspec.drafters.config import AttentionConfig, MambaConfig, MarkovConfig, ParallelConfig, TargetIdentity
from hspec.drafters.heads.markov import MarkovHead
from hspec.drafters.parallel import ParallelDrafter
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate

VOCABULARY = 211
END, START, BEGIN = "<|end|>", "<|start|>", "<|begin|>"
"""End of turn (the EOS token), start of turn, beginning of text (never added by itself)."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PATTERN = ("mamba", "mlp", "mamba", "attention", "mlp")

# Printable ASCII, newline and tab; of UTF-8 the continuation bytes and some lead bytes: é, €, 中 and 🙂 take 2 to 4 tokens.
_BYTES = [9, 10, *range(32, 127), *range(0x80, 0xC0), 0xC2, 0xC3, 0xE2, 0xE4, 0xF0]


def tiny_tokenizer(vocab: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly ``vocab`` tokens (172 at least): 3 special ones, bytes, then pairs of them."""
    names = _byte_names()
    tokens = [END, START, BEGIN, *(names[b] for b in _BYTES)]
    space, letters = names[ord(" ")], string.ascii_lowercase
    merges = [(space, c) for c in letters] + [(a, b) for a in letters for b in letters]
    merges = merges[: vocab - len(tokens)]
    if len(tokens) + len(merges) != vocab:
        raise ValueError(f"a tiny vocabulary has {len(tokens)} to {len(tokens) + 702} tokens, not {vocab}")
    ids = {token: i for i, token in enumerate([*tokens, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (END, START, BEGIN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, additional_special_tokens=[START, BEGIN], chat_template=CHAT_TEMPLATE
    )


def _byte_names() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def tiny_target(
    family: Literal["llama", "qwen3"] = "llama",
    layers: int = 6,
    vocab: int = VOCABULARY,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seed: int = 0,
    max_positions: int = 512,
    linears: Literal["packed", "bf16", "plain"] = "packed",
    name: str | None = None,
    **overrides: Any,
) -> Target:
    """A prepared fp32 target on the CPU with random weights, large enough for its answers to vary with the prompt.

    Args:
        overrides: further fields of the transformers configuration (``rope_parameters``, say).
    """
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    config_type, model_type = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[family]
    model = model_type(config_type(**(settings | overrides)))
    randomise(model, seed)
    return Target(model, ChatTemplate(tiny_tokenizer(vocab)), name or f"tiny-{family}").prepare(linears)


def randomise(module: nn.Module, seed: int) -> None:
    """Give every parameter a random value, none of them one that hides an error (no zeros, no norms at exactly one)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(module.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            last = name.rsplit(".", 1)[-1]
            if last == "A_log":
                p.copy_(0.5 * noise)
            elif p.dim() == 1 and last in ("weight", "D"):  # norms, and the direct path of a Mamba mixer
                p.copy_(1 + 0.2 * noise)
            elif p.dim() == 1:
                p.copy_(0.3 * noise)
            else:
                p.copy_(1.5 * p.shape[-1] ** -0.5 * noise)


def tiny_config(
    target: Target,
    pattern: Sequence[str] = PATTERN,
    block_size: int = 6,
    draft_vocab: int = 160,
    window: int | None = 12,
    markov_rank: int = 8,
    context: Literal["target", "features", "none"] = "target",
    **overrides: Any,
) -> ParallelConfig:
    """A valid configuration for ``target``; ``overrides`` are further fields of :class:`ParallelConfig`."""
    config, layers = target.config, len(target.layers)
    attentions = list(pattern).count("attention")
    fields: dict[str, Any] = {
        "target": TargetIdentity(
            name=target.name,
            family=config.model_type,
            layers=layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            weight_hash=target.weight_hash(),
            template_hash=target.template.hash,
        ),
        "pattern": list(pattern),
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "block_size": block_size,
        "mamba": MambaConfig(heads=4, head_dim=8, state_dim=4, groups=2),
        "attention": AttentionConfig(
            context=context,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=target.head_dim,
            window=window,
            rope=[dict(config.rope_parameters)] * attentions,
        ),
        "taps": sorted({1, layers // 2, layers - 1}),
        "kv_layers": [layers - attentions + i for i in range(attentions)],
        "fusion_rank": target.hidden_size,
        "draft_vocab_size": min(draft_vocab, target.vocab_size),
        "head": MarkovConfig(rank=markov_rank) if markov_rank else None,
    }
    return ParallelConfig(**(fields | overrides))


def tiny_drafter(target: Target, seed: int = 0, config: ParallelConfig | None = None, **settings: Any) -> ParallelDrafter:
    """A random drafter for ``target``, frozen and in eval mode; ``settings`` go to :func:`tiny_config`.

    Its draft vocabulary leaves out the highest ids but keeps the special tokens, so that ids outside of it exist.
    """
    config = config or tiny_config(target, **settings)
    drafter = build_drafter(config, target, torch.arange(config.draft_vocab_size))
    assert isinstance(drafter, ParallelDrafter)
    randomise(drafter, seed + 1)
    return drafter.eval().requires_grad_(False)


def markov_bias(drafter: ParallelDrafter, previous: Tensor) -> Tensor:
    """What a Markov head adds to the logits behind these tokens: ``[...]`` -> ``[..., draft vocabulary]``."""
    assert isinstance(drafter.causal, MarkovHead)
    return drafter.causal.w2(drafter.causal.embed(previous))

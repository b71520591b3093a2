"""A target whose decoder layers run elsewhere: of its weights there is here what turns residual streams into what a drafter reads.

That is the embedding, the final norm and the LM head, and of each layer whose K/V are read its input norm, ``k_proj``, ``v_proj`` and
k-norm. They are the modules that the whole target has, so that in one precision on one machine K/V and hidden states are the same in
every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

from hspec.errors import UsageError
from hspec.targets.cache import KVCache
from hspec.targets.packing import fuse_norms, halve_linears, pack_linears
from hspec.targets.sources import read_folder
from hspec.targets.target import Target, TargetOutput
from hspec.targets.template import ChatTemplate
from hspec.targets.weight_files import WeightFiles


class ResidualStreams(Protocol):
    """What runs the layers."""

    def __call__(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """Token ids ``[B, T]`` int64 on the CPU, each row from position 0 on -> the residual streams that enter the layers (ascending;
        the number of layers stands for what leaves the last one), ``[B, T, len(layers), hidden]``."""

    def expect(self, tokens: Tensor, layers: Sequence[int]) -> None:
        """Say what will be asked for soon."""

    asked_to_stop: Callable[[], bool]
    """Set by who may give up waiting."""

    @property
    def ahead(self) -> int:
        """So many batches before they are needed it is worth to say so."""

    @property
    def arithmetic(self) -> str | None:
        """What is otherwise than if this process ran the layers; None if nothing is."""


class PartialTarget(Target):
    """Runs whole documents only: there is no going on behind a prefix, so it cannot decode.

    Args:
        files: of the whole model. connect: finds who runs its layers, once all else of it is known.
        linears: as :meth:`Target.prepare` has it, for the few linears that are here.

    Raises:
        UsageError: as for :class:`Target`.
        HSpecError: weights are missing.
    """

    def __init__(
        self,
        config: Any,
        files: WeightFiles,
        template: ChatTemplate,
        name: str,
        connect: Callable[[PartialTarget], ResidualStreams],
        device: str | torch.device = "cpu",
        linears: Literal["packed", "bf16", "plain"] = "packed",
    ):
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        head, embedding = model.get_output_embeddings(), model.model.embed_tokens
        if config.tie_word_embeddings:
            head.weight = embedding.weight
        super().__init__(model, template, name)
        self.files, self._linears = files, linears
        self._parameters = sum(p.numel() for p in model.parameters())
        self._weight_hash = files.hash()
        self._whole_layers = list(model.model.layers)
        model.model.layers = nn.ModuleList(nn.Identity() for _ in self._whole_layers)
        _fill(embedding, files, "model.embed_tokens")
        _fill(model.model.norm, files, "model.norm")
        if config.tie_word_embeddings:
            head.weight = embedding.weight
        else:
            _fill(head, files, "lm_head")
        model.to(device)
        self._head_weight = head.weight.detach()
        self._swap(model)
        self.streams = connect(self)

    def _swap(self, module: nn.Module) -> None:
        """As :meth:`Target.prepare` does it."""
        if self._linears != "plain":
            fuse_norms(module)
            (pack_linears if self._linears == "packed" else halve_linears)(module)

    def layer_weights(self, layer: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{layer}."
        return {name[len(prefix) :]: self.files.read(name).float().to(self.device) for name in self.files.below(prefix)}

    def read_kv(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if isinstance(self.layers[layer], nn.Identity):
                kv = _KVOfLayer(self._whole_layers[layer], self.files, f"model.layers.{layer}", self.head_dim)
                self._swap(kv.to(self.device))
                self.layers[layer] = kv.requires_grad_(False)

    @property
    def _kv_layers(self) -> list[int]:
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, _KVOfLayer)]

    def _asked(self, taps: Sequence[int]) -> list[int]:
        """The streams that make taps, hidden states and K/V."""
        return sorted({*taps, *self._kv_layers, len(self.layers)})

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Only the layers named to :meth:`read_kv` have room in it."""
        return KVCache(self.cache_shape, batch, capacity, self.dtype, self.device, self._kv_layers)

    def expect(self, tokens: Tensor, taps: Sequence[int] = ()) -> None:
        self.streams.expect(tokens.cpu(), self._asked(taps))

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        taps: Sequence[int] = (),
        tree: Sequence[Sequence[int]] | None = None,
        bitwise: bool = True,
    ) -> TargetOutput:
        """As :meth:`Target.forward` into an empty cache.

        Raises:
            UsageError: the cache holds something, or ``tokens`` are a tree.
            HSpecError: who runs the layers does not answer, or not as it should.
        """
        if tree is not None or any(cache.lengths):
            raise UsageError(f"the layers of {self.name} run elsewhere, over whole documents only: it cannot decode here")
        asked = self._asked(taps)
        streams = self.streams(tokens.cpu(), asked).to(self.device, self.dtype)
        of_layer = dict(zip(asked, streams.unbind(2), strict=True))
        cache.stage(tokens.shape[1])
        for layer in self._kv_layers:
            cache.update(*self._kv(layer, of_layer[layer]), layer)
        hidden = self.final_norm(of_layer[len(self.layers)])
        taken = [of_layer[tap] for tap in taps]
        return TargetOutput(hidden, torch.stack(taken, dim=2) if taken else streams[:, :, :0])

    def final_norm(self, stream: Tensor) -> Tensor:
        """Of what leaves the last layer, ``[..., hidden]``."""
        return self.model.model.norm(stream)

    def _kv(self, layer: int, stream: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer makes of the stream that enters it ``[B, T, hidden]``: ``[B, kv_heads, T, head_dim]``, keys after RoPE."""
        positions = torch.arange(stream.shape[1], device=stream.device)[None]
        kinds = getattr(self.config, "layer_types", None)
        by_kind = isinstance(next(iter(self.config.rope_parameters.values()), None), dict)
        rope = (kinds[layer],) if by_kind and kinds else ()
        cos, sin = self.model.model.rotary_emb(stream, positions, *rope)
        keys, values = self.layers[layer](stream)
        return keys * cos.unsqueeze(1) + rotate_half(keys) * sin.unsqueeze(1), values


class _KVOfLayer(nn.Module):
    """Of a decoder layer, what makes K (before RoPE) and V."""

    def __init__(self, layer: Any, files: WeightFiles, prefix: str, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.norm = _fill(layer.input_layernorm, files, f"{prefix}.input_layernorm")
        self.k_proj = _fill(layer.self_attn.k_proj, files, f"{prefix}.self_attn.k_proj")
        self.v_proj = _fill(layer.self_attn.v_proj, files, f"{prefix}.self_attn.v_proj")
        own = getattr(layer.self_attn, "k_norm", None)
        self.k_norm = nn.Identity() if own is None else _fill(own, files, f"{prefix}.self_attn.k_norm")

    def forward(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, hidden]`` -> twice ``[B, kv_heads, T, head_dim]``."""
        normed = self.norm(stream)
        keys, values = (p(normed).unflatten(-1, (-1, self.head_dim)) for p in (self.k_proj, self.v_proj))
        return self.k_norm(keys).transpose(1, 2), values.transpose(1, 2)


def _fill(module: nn.Module, files: WeightFiles, prefix: str) -> nn.Module:
    """Read the module's weights in fp32."""
    for name, _ in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        weight = files.read(f"{prefix}.{name}").float()
        setattr(owner, name.rpartition(".")[2], nn.Parameter(weight, requires_grad=False))
    return module


def load_partial_target(
    source: str,
    connect: Callable[[PartialTarget], ResidualStreams],
    device: str | torch.device = "cpu",
    linears: Literal["packed", "bf16", "plain"] = "packed",
) -> PartialTarget:
    """As :func:`hspec.targets.sources.load_target`, without the layers.

    Raises:
        UsageError: no such model, or one whose weights are not in safetensors files.
        HSpecError: files are damaged, or a download failed.
    """
    folder, config, template, name = read_folder(source)
    return PartialTarget(config, WeightFiles(folder, config), template, name, connect, device, linears)

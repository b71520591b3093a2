"""What a step costs on this machine, over concurrency, input length and rows: the shapes of the paper's Figs. 3 and 8.

Time does not depend on what the weights are, so drafters, contexts and, for a target that is not here, one of its layers are
random; only their sizes are those of the method and the target. Every figure is a median, and what is compared is measured in
turn, so that a change in the machine's load meets all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.drafters.context import DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.family import make_drafter
from hspec.errors import UsageError
from hspec.evaluation.describe import memory_bytes
from hspec.targets.cache import CacheShape, KVCache, KVView
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate

SOME_TOKENS = 1024
"""Rows of the random embedding: only a block's own tokens are looked up."""
ACCEPTED = 3
"""Tokens that a step adds to every sequence, which a drafter with a cache of its own has to inject: about the paper's tau."""
_FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@dataclass(frozen=True)
class DraftingCost:
    """Of one step of a batch."""

    method: str
    concurrency: int
    length: int
    """Context tokens of every sequence."""
    propose_ms: float
    inject_ms: float
    """Bringing the tokens of the last step into the drafter's own cache; 0 for one that has none."""

    @property
    def total_ms(self) -> float:
        return self.propose_ms + self.inject_ms


@dataclass(frozen=True)
class VerificationCost:
    """Of one forward of the target over the rows of one sequence."""

    rows: int
    length: int
    ms: float


class DraftingCase:
    """A drafter of random weights in a batch of random contexts."""

    def __init__(self, config: DrafterConfig, concurrency: int, length: int, drafter: Drafter):
        generator = torch.Generator().manual_seed(0)
        device = drafter.draft_ids.device

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(device)

        self.drafter, self.k = drafter, drafter.max_draft
        B, F, H = concurrency, len(config.taps), config.target.hidden_size
        layers, shape = _layers_read(config)
        nothing = torch.empty(B, shape.kv_heads, 0, shape.head_dim, device=device)
        sides = [[nothing] * config.target.layers for _ in range(2)]
        for side in sides:
            for layer in layers:
                side[layer] = random(B, shape.kv_heads, length, shape.head_dim)
        self.memory: KVCache | None = None
        if drafter.memory_shape is not None:
            self.memory = KVCache(drafter.memory_shape, B, length + ACCEPTED, torch.float32, device)
            self.memory.lengths = [length] * B
        self.context = DraftContext(
            anchors=torch.randint(SOME_TOKENS, (B, 1), generator=generator).to(device),
            positions=torch.full((B, 1), length, device=device),
            taps=random(B, 1, F, H),
            kv=KVView(sides[0], sides[1], (length,) * B),
            memory=None if self.memory is None else self.memory.view(),
            history=tuple((0,) * (length + 1) for _ in range(B)) if drafter.reads_history else None,
        )
        self._new = random(B, ACCEPTED, F, H)
        self._following = torch.randint(SOME_TOKENS, (B, ACCEPTED), generator=generator).to(device)
        self._positions = torch.arange(length, length + ACCEPTED, device=device).expand(B, -1)

    @torch.no_grad()
    def propose(self) -> None:
        self.drafter.propose(self.context, self.k)

    @torch.no_grad()
    def inject(self) -> None:
        """What a step of the loop does for a drafter with a memory; the lengths stay, so it can be done again."""
        if self.memory is None:
            return
        kept = self.drafter.remember(self._new, self._following, self._positions, self.memory.view())
        self.memory.stage(ACCEPTED)
        for layer, (keys, values) in enumerate(kept):
            self.memory.update(keys, values, layer)


def random_drafter(config: DrafterConfig, device: str = "cpu") -> Drafter:
    """A drafter ready for inference, with random weights of the configuration's sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        embedding = torch.randn(SOME_TOKENS, config.target.hidden_size)
        head = torch.randn(config.draft_vocab_size, config.target.hidden_size) * config.target.hidden_size**-0.5
        # Ids in the embedding's range, so that every draft can be looked up.
        ids = torch.arange(config.draft_vocab_size) % SOME_TOKENS
        return make_drafter(config, embedding, head, ids).to(device).prepare()


def drafting_costs(
    configs: Mapping[str, DrafterConfig],
    concurrency: Sequence[int],
    lengths: Sequence[int],
    repeats: int = 7,
    device: str = "cpu",
    max_bytes: float = 8e9,
    on_case: Callable[[DraftingCost], None] = lambda _: None,
) -> list[DraftingCost]:
    """Median time of drafting and of injection, of every method at every concurrency and length, methods in turn.

    Raises:
        UsageError: contexts of one size would take more than ``max_bytes``.
    """
    for count in concurrency:
        for length in lengths:
            need = sum(_context_bytes(c, count, length) for c in configs.values())
            if need > max_bytes:
                raise UsageError(
                    f"contexts of {count} x {length:,} tokens take {need / 1e9:.1f} GB, more than {max_bytes / 1e9:.1f}: ask for "
                    f"fewer methods, a lower concurrency or shorter contexts"
                )
    drafters = {name: random_drafter(config, device) for name, config in configs.items()}
    costs = []
    for count in concurrency:
        for length in lengths:
            cases = {name: DraftingCase(configs[name], count, length, d) for name, d in drafters.items()}
            proposing = in_turn({name: case.propose for name, case in cases.items()}, repeats, device)
            keeping = {name: case.inject for name, case in cases.items() if case.memory is not None}
            injecting = in_turn(keeping, repeats, device)
            for name in cases:
                costs.append(DraftingCost(name, count, length, proposing[name], injecting.get(name, 0.0)))
                on_case(costs[-1])
    return costs


def verification_costs(target: Target, rows: Sequence[int], lengths: Sequence[int], repeats: int = 7) -> list[VerificationCost]:
    """Median time of the target's forward over so many rows behind so many tokens, row counts in turn."""
    costs = []
    for length in lengths:
        cache = target.new_cache(1, length + max(rows))
        cache.lengths = [length]
        calls = {str(n): _verification(target, cache, n) for n in rows}
        found = in_turn(calls, repeats, target.device.type)
        costs += [VerificationCost(n, length, found[str(n)]) for n in rows]
    return costs


def _verification(target: Target, cache: KVCache, rows: int) -> Callable[[], None]:
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=target.device)

    @torch.no_grad()
    def run() -> None:
        target.logits(target.forward(tokens, cache).hidden)

    return run


def layer_target(config: ParallelConfig, layers: int = 1, device: str = "cpu") -> Target:
    """So many layers of a target that is not here, of random weights and with a vocabulary of :data:`SOME_TOKENS`.

    Raises:
        UsageError: a family whose layers cannot be built from the drafter's configuration.
    """
    attention, family = config.attention, config.target.family
    if attention is None or family not in _FAMILIES:
        raise UsageError(f"a layer of {config.target.name} ({family}) cannot be made here: {', '.join(_FAMILIES)} can")
    settings = _FAMILIES[family](
        vocab_size=SOME_TOKENS, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, num_hidden_layers=layers,
        num_attention_heads=attention.heads, num_key_value_heads=attention.kv_heads, head_dim=attention.head_dim,
        max_position_embeddings=131072, rms_norm_eps=config.rms_norm_eps, rope_parameters=attention.rope[0], tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).to(device)
    name = f"{layers} random layer{'s' if layers > 1 else ''} of the size of {config.target.name}"
    return Target(model, ChatTemplate(None), name).prepare("packed")


def in_turn(calls: Mapping[str, Callable[[], None]], repeats: int, device: str = "cpu") -> dict[str, float]:
    """Median milliseconds of each call, after one that does not count; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            _wait(device)
            began = time.perf_counter()
            call()
            _wait(device)
            if round_:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(own) for name, own in times.items()}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _layers_read(config: DrafterConfig) -> tuple[list[int], CacheShape]:
    """Target layers whose K/V a drafter reads, and the shape of one of them."""
    if isinstance(config, ParallelConfig) and config.attention is not None and config.attention.context == "target":
        return sorted(set(config.kv_layers)), CacheShape(1, config.attention.kv_heads, config.attention.head_dim)
    return [], CacheShape(1, 1, 1)


def _context_bytes(config: DrafterConfig, concurrency: int, length: int) -> int:
    layers, shape = _layers_read(config)
    read = len(layers) * shape.bytes_per_token(torch.float32)
    return concurrency * length * (read + memory_bytes(config, torch.float32))

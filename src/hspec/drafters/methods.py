"""Every method by name: a choice of context, backbone and head, made from one H-Spec configuration of the same target.

All methods of a target share its taps, window, draft vocabulary and block, so that a comparison compares methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from hspec.drafters.config import DrafterConfig, EagleConfig, ParallelConfig, ReDrafterConfig
from hspec.drafters.parameters import parameters_by_part
from hspec.drafters.presets import PUBLISHED_INJECTION, attention_layers, nearest
from hspec.errors import UsageError

MATCH_STEP = 16
"""Widths that are searched to match parameters are multiples of this."""

MATCHED = 1.02
"""Parameters are matched if there are no more than so many times H-Spec's."""

MOST_LAYERS = 12


@dataclass(frozen=True)
class TargetLayers:
    """What a method must know of a target's layers to attend to others than H-Spec's."""

    rope: Callable[[int], dict[str, Any]]
    """RoPE parameters of a layer."""
    readable: Callable[[int], int]
    """The nearest layer whose K/V reach back as far as a drafter's window."""


Stacked = TypeVar("Stacked", bound=ParallelConfig | EagleConfig)

UNCONFIDENT = {"confidence_with_markov": False, "confidence_head": False}

Derive = Callable[[ParallelConfig, TargetLayers, int | None], DrafterConfig]
"""From H-Spec's configuration, the target's layers, and how many layers a stack of them has; None as many as DSpark."""


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    context: str
    backbone: str
    head: str
    derive: Derive | None
    """Its configuration from H-Spec's for the same target; None where there is nothing to train."""
    passes: int | None = 1
    """Passes of the drafter for k tokens; None for k of them."""


def _changed(config: ParallelConfig, **changes: Any) -> ParallelConfig:
    return ParallelConfig.model_validate({**config.model_dump(), **changes})


def parameters(config: DrafterConfig) -> int:
    """Trainable parameters."""
    return sum(parameters_by_part(config).values())


def _layered(base: ParallelConfig, layers: TargetLayers, count: int, **changes: Any) -> ParallelConfig:
    """``count`` times attention and MLP, bidirectional within the block, as DFlash has it."""
    assert base.attention is not None
    first, last = base.taps[0], min(base.taps[-1], base.target.layers - 1)
    spread = [layers.readable(round(first + (last - first) * i / max(count - 1, 1))) for i in range(count)]
    attention = {
        **base.attention.model_dump(),
        "context": "features",
        "causal_block": False,
        "rope": [layers.rope(layer) for layer in spread],
        **changes.pop("attention", {}),
    }
    values = {
        "pattern": ["attention", "mlp"] * count, "mamba": None, "attention": attention, "kv_layers": spread, "head": None,
        "fusion_norm": False, "fusion_rank": base.hidden_size, **UNCONFIDENT,
    }  # fmt: skip
    return _changed(base, **(values | changes))


def layer_count(base: ParallelConfig, layers: TargetLayers) -> int:
    """How many layers of DSpark come nearest to the parameters of H-Spec; five for the targets of the paper."""
    wanted = parameters(base)
    sizes = {n: abs(parameters(_dspark_of(base, layers, n)) - wanted) for n in range(1, MOST_LAYERS + 1)}
    return min(sizes, key=lambda n: sizes[n])


def _dspark_of(base: ParallelConfig, layers: TargetLayers, count: int) -> ParallelConfig:
    return _layered(
        base, layers, count, method="dspark", sample_from_anchor=True, block_size=base.max_draft, head=base.head,
        confidence_head=base.confidence_head, confidence_with_markov=base.confidence_with_markov,
    )  # fmt: skip


def _dspark(base: ParallelConfig, layers: TargetLayers, count: int | None) -> ParallelConfig:
    return _dspark_of(base, layers, count or layer_count(base, layers))


def _dflash(base: ParallelConfig, layers: TargetLayers, count: int | None, **changes: Any) -> ParallelConfig:
    changes = {"method": "dflash"} | changes
    if base.target.name in PUBLISHED_INJECTION and "attention" not in changes:
        published, kv_heads, head_dim = PUBLISHED_INJECTION[base.target.name]
        attention = {"kv_heads": kv_heads, "head_dim": head_dim}
        return _layered(base, layers, count or published, attention=attention, **changes)
    return _layered(base, layers, count or layer_count(base, layers), **changes)


def _small(base: ParallelConfig) -> bool:
    """Whether the target is of a laptop's size, so that heads are to be small too."""
    return base.hidden_size < 1024


def _gru(base: ParallelConfig) -> dict[str, Any]:
    return {"kind": "gru", "size": base.hidden_size // 2, "rank": 48} if _small(base) else {"kind": "gru"}


def _selector(base: ParallelConfig) -> dict[str, Any]:
    head = {"kind": "selector", "candidates": min(16, base.draft_vocab_size)}
    return {**head, "rank": 48} if _small(base) else head


def _convolution(base: ParallelConfig) -> dict[str, Any]:
    group = next(g for g in (16, 8, 4, 2, 1) if base.hidden_size % g == 0)
    return {"group": group}


def _widened(base: ParallelConfig, drop: str, name: str) -> ParallelConfig:
    """H-Spec without one kind of sub-layer, its MLPs widened until the parameters match."""
    kept = [kind for kind in base.pattern if kind != drop]
    changes: dict[str, Any] = {"method": name, "pattern": kept}
    if drop == "attention":
        changes |= {"attention": None, "kv_layers": []}
    else:
        changes |= {"mamba": None, "use_state": False}
    return _filled_up(_changed(base, **changes), parameters(base))


def _filled_up(config: Stacked, wanted: int) -> Stacked:
    """With MLPs so wide that a drafter has about so many parameters."""
    mlps = config.pattern.count("mlp") if isinstance(config, ParallelConfig) else config.layers
    width = (wanted - parameters(config)) / (3 * config.hidden_size * mlps)
    wider = config.intermediate_size + MATCH_STEP * round(width / MATCH_STEP)
    return cast(Stacked, type(config).model_validate({**config.model_dump(), "intermediate_size": wider}))


def _eagle(base: ParallelConfig, layers: TargetLayers, method: str, count: int) -> EagleConfig:
    assert base.attention is not None
    last = min(base.taps[-1], base.target.layers - 1)
    sources = [layers.readable(max(0, last - count + 1 + i)) for i in range(count)]
    taps = [base.taps[0], base.taps[len(base.taps) // 2], base.taps[-1]]
    attention = {
        **base.attention.model_dump(),
        "context": "features",
        "causal_block": True,
        "rope": [layers.rope(m) for m in sources],
    }
    return EagleConfig.model_validate(
        {
            "method": method, "target": base.target.model_dump(), "hidden_size": base.hidden_size, "rms_norm_eps": base.rms_norm_eps,
            "block_size": base.max_draft, "taps": sorted(set(taps)), "draft_vocab_size": base.draft_vocab_size, "layers": count,
            "intermediate_size": base.intermediate_size, "attention": attention, "kv_layers": sources,
        }
    )  # fmt: skip


def _redrafter(base: ParallelConfig, layers: TargetLayers) -> ReDrafterConfig:
    return ReDrafterConfig.model_validate(
        {
            "target": base.target.model_dump(), "hidden_size": base.hidden_size, "rms_norm_eps": base.rms_norm_eps,
            "block_size": base.max_draft, "taps": [base.target.layers], "draft_vocab_size": base.draft_vocab_size,
        }
    )  # fmt: skip


TARGET_KV, FEATURES = "target KV", "own KV"
HYBRID, LAYERS = "Mamba + attention + MLP", "attention + MLP"

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("ar", "none", "none", "none", None, passes=0),
        Method("hspec", f"state + {TARGET_KV}", HYBRID, "Markov", lambda b, t, n: b),
        Method("dspark", FEATURES, LAYERS, "Markov", _dspark),
        Method("dflash", FEATURES, LAYERS, "none", _dflash),
        Method("peagle", FEATURES, LAYERS, "none", lambda b, t, n: _eagle(b, t, "peagle", (n or layer_count(b, t)) - 1 or 1)),
        Method("dflash-kv", TARGET_KV, LAYERS, "none",
               lambda b, t, n: _dflash(b, t, n, method="dflash-kv", attention={"context": "target"})),
        Method("dflash2", FEATURES, f"{LAYERS} + convolution", "path selector",
               lambda b, t, n: _dflash(b, t, n, method="dflash2", head=_selector(b), convolution=_convolution(b))),
        Method("hspec-no-state", TARGET_KV, HYBRID, "Markov",
               lambda b, t, n: _changed(b, method="hspec-no-state", use_state=False)),
        Method("hspec-no-kv", "state", HYBRID, "Markov",
               lambda b, t, n: _changed(b, method="hspec-no-kv", attention={**b.model_dump()["attention"], "context": "none"})),
        Method("mamba-only", "state", "Mamba + MLP", "Markov", lambda b, t, n: _widened(b, "attention", "mamba-only")),
        Method("attention-only", TARGET_KV, LAYERS, "Markov", lambda b, t, n: _widened(b, "mamba", "attention-only")),
        Method("ngram", "text so far", "none", "none", None, passes=0),
        Method("eagle3", FEATURES, LAYERS, "own recurrence", lambda b, t, n: _eagle(b, t, "eagle3", 1), passes=None),
        Method("redrafter", "last hidden state", "recurrent cell", "own recurrence", lambda b, t, n: _redrafter(b, t), passes=None),
        Method("domino", FEATURES, LAYERS, "GRU", lambda b, t, n: _dflash(b, t, n, method="domino", head=_gru(b))),
        Method("dblast", FEATURES, LAYERS, "block latent",
               lambda b, t, n: _dflash(b, t, n, method="dblast", head={"kind": "latent"})),
        Method("hspec-dflash2", f"state + {TARGET_KV}", f"{HYBRID} + convolution", "path selector",
               lambda b, t, n: _changed(b, method="hspec-dflash2", head=_selector(b), convolution=_convolution(b), **UNCONFIDENT)),
        Method("hspec-domino", f"state + {TARGET_KV}", HYBRID, "GRU",
               lambda b, t, n: _changed(b, method="hspec-domino", head=_gru(b), **UNCONFIDENT)),
    )
}  # fmt: skip


def method(name: str) -> Method:
    """Raises:
    UsageError: no method of that name.
    """
    try:
        return METHODS[name]
    except KeyError:
        raise UsageError(f"no method {name!r}; there are {', '.join(METHODS)}") from None


def configuration(name: str, base: ParallelConfig, layers: TargetLayers | None = None, matched: bool = False) -> DrafterConfig:
    """A method's configuration for the target of ``base``, H-Spec's configuration there.

    Args:
        matched: as many layers as fit into H-Spec's parameters, and MLPs widened up to them.

    Raises:
        UsageError: no such method, one that has nothing to configure, or one whose size is part of it, to be matched.
    """
    found, layers = method(name), layers or known_layers(base)
    if found.derive is None:
        raise UsageError(f"{name} has no drafter to configure or train: it is used as it is")
    return _matched(found, found.derive, base, layers) if matched and name != "hspec" else found.derive(base, layers, None)


def _matched(found: Method, derive: Derive, base: ParallelConfig, layers: TargetLayers) -> DrafterConfig:
    if found.passes is None:
        raise UsageError(
            f"{found.name} is not matched in parameters: that it is small, and runs once for each draft, is the method"
        )
    wanted = parameters(base)
    sizes = [config for n in range(1, MOST_LAYERS + 1) if parameters(config := derive(base, layers, n)) <= wanted * MATCHED]
    best = max(sizes, key=parameters, default=derive(base, layers, 1))
    assert isinstance(best, ParallelConfig | EagleConfig)  # the others have several passes
    return best if parameters(best) >= wanted else _filled_up(best, wanted)


def known_layers(base: ParallelConfig) -> TargetLayers:
    """What is known of a target's layers from H-Spec's configuration alone: they rotate alike."""
    assert base.attention is not None
    rope, full = base.attention.rope[0], attention_layers(base.target)
    return TargetLayers(lambda layer: rope, lambda layer: nearest(full, layer))

"""The only file that reaches into vLLM's model runner (V1): five methods are wrapped, for H-Spec's proposer alone.

What comes out of the runner is put into a :class:`hspec.serving.step.Step` of plain tensors and numbers here, so that another
runner needs another of these files and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hspec.errors import UsageError
from hspec.serving.memory import Ran
from hspec.serving.ranks import ALONE, Ranks
from hspec.serving.step import Step
from hspec.targets.cache import CacheShape

_INSTALLED = "_hspec_installed"
OWN_LAYERS = "hspec_drafter.layers"
"""How the names of a drafter's own attention layers begin."""


def install() -> None:
    """Wrap the runner's methods, once a process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, _INSTALLED, False):
        return
    setattr(GPUModelRunner, _INSTALLED, True)
    _wrap_taps(GPUModelRunner)
    _wrap_cache(GPUModelRunner)
    _wrap_sample_tokens(GPUModelRunner)
    _wrap_propose(GPUModelRunner)
    _wrap_sample(GPUModelRunner)


def _ours(runner: Any) -> bool:
    from hspec.serving.proposer import HSpecProposer

    return isinstance(getattr(runner, "drafter", None), HSpecProposer)


def _wrap_taps(runner_class: Any) -> None:
    """Let the target give out the residual streams: the runner does so for EAGLE-3 and its kin, if this flag is set."""
    original = runner_class._setup_eagle3_aux_hidden_state_outputs

    @functools.wraps(original)
    def setup(self: Any) -> None:
        if _ours(self):
            self.use_aux_hidden_state_outputs = True
        original(self)

    runner_class._setup_eagle3_aux_hidden_state_outputs = setup


def _wrap_cache(runner_class: Any) -> None:
    original = runner_class.initialize_kv_cache

    @functools.wraps(original)
    def initialize(self: Any, kv_cache_config: Any, is_profiling: bool = False, **rest: Any) -> None:
        original(self, kv_cache_config, is_profiling, **rest)
        if _ours(self) and not is_profiling:
            self.drafter.bind(self)

    runner_class.initialize_kv_cache = initialize


def _wrap_sample_tokens(runner_class: Any) -> None:
    """What the target has run goes to a drafter that keeps something before anything is sampled. That is in every step, also in
    those for which vLLM asks for no drafts (some request is near the end of its context): its neighbours go on."""
    original = runner_class.sample_tokens

    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        if _ours(self) and self.execute_model_state is not None:
            self.drafter.remember(_ran(self, self.execute_model_state))
        return original(self, grammar_output)

    runner_class.sample_tokens = sample_tokens


def _wrap_propose(runner_class: Any) -> None:
    original = runner_class.propose_draft_token_ids

    @functools.wraps(original)
    def propose(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        if not _ours(self):
            return original(
                self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states,
                aux_hidden_states, spec_decode_metadata, common_attn_metadata, slot_mappings,
            )  # fmt: skip
        step = _step(self, scheduler_output, sampled_token_ids, aux_hidden_states, spec_decode_metadata, common_attn_metadata)
        proposal = self.drafter.draft(step)
        self._draft_probs = proposal.probabilities
        self._draft_prob_req_ids = None if proposal.probabilities is None else proposal.ids
        return proposal.tokens

    runner_class.propose_draft_token_ids = propose


def _wrap_sample(runner_class: Any) -> None:
    """A step without any draft is sampled as without speculation: the rejection sampler of 0.32.0 dies of it on a CPU, where
    all requests have a top-k and none a top-p (the largest top-k of no rows is taken)."""
    original = runner_class._sample

    @functools.wraps(original)
    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if _ours(self) and spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return original(self, logits, spec_decode_metadata)

    runner_class._sample = sample


def _step(runner: Any, scheduler_output: Any, sampled: list[list[int]], taps: Any, speculation: Any, attention: Any) -> Step:
    batch = runner.input_batch
    ids, count = batch.req_ids, batch.num_reqs
    if not isinstance(sampled, list) or taps is None:
        raise AssertionError(f"the runner gave {type(sampled).__name__} of tokens and {type(taps).__name__} of taps")
    return Step(
        ids=ids,
        params=[runner.requests[i].sampling_params for i in ids],
        sampled=sampled,
        drafted=[0] * count if speculation is None else speculation.num_draft_tokens,
        query_ends=attention.query_start_loc_cpu[1 : count + 1].tolist(),
        lengths=attention.seq_lens[:count].tolist(),
        known=batch.num_tokens_no_spec[:count].tolist(),
        tables=attention.block_table_tensor,
        taps=taps,
        k=scheduler_output.num_spec_tokens_to_schedule,
        history=lambda i: batch.token_ids_cpu[i, : batch.num_tokens_no_spec[i]].tolist(),
    )


def _ran(runner: Any, state: Any) -> Ran:
    attention, taps = state.spec_decode_common_attn_metadata, state.aux_hidden_states
    if attention is None or taps is None:
        raise AssertionError(f"the runner gave {type(attention).__name__} of metadata and {type(taps).__name__} of taps")
    rows = int(attention.query_start_loc_cpu[attention.num_reqs])  # what is behind them is padding
    return Ran([tap[:rows] for tap in taps], runner.positions[:rows], attention.slot_mapping[:rows])


def ranks() -> Ranks:
    """Those that share the target with this process."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Ranks(group) if group.world_size > 1 else ALONE


# -- attention layers --------------------------------------------------------------------------------------------


def attention_layers(runner: Any) -> dict[int, Any]:
    """The target's attention layers by index."""
    return _layers(runner, own=False)


def own_layers(runner: Any) -> list[Any]:
    """The drafter's, as :func:`make_own_layers` made them, in their order."""
    found = _layers(runner, own=True)
    return [found[index] for index in sorted(found)]


def _layers(runner: Any, own: bool) -> dict[int, Any]:
    from vllm.model_executor.models.utils import extract_layer_index

    context = runner.compilation_config.static_forward_context
    return {
        extract_layer_index(name): layer
        for name, layer in context.items()
        if isinstance(getattr(layer, "kv_cache", None), Tensor) and name.startswith(OWN_LAYERS) == own
    }


def make_own_layers(config: Any, shape: CacheShape, heads: int) -> None:
    """Attention layers that never run: vLLM gives each a KV cache, as it does for every layer that it finds registered.

    Args:
        config: ``vllm.config.VllmConfig``; the layers register themselves in it.
        shape: what a token costs in them. heads: of their queries.

    Raises:
        UsageError: this backend has no pages for heads of that size.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.utils.torch_utils import set_default_torch_dtype

    first = config.model_config.hf_text_config.num_hidden_layers  # numbered behind the target's, as vLLM's own drafters are
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        for index in range(first, first + shape.layers):
            layer = Attention(
                heads, shape.head_dim, shape.head_dim**-0.5, num_kv_heads=shape.kv_heads, cache_config=config.cache_config,
                prefix=f"{OWN_LAYERS}.{index}.attn",
            )  # fmt: skip
            if not layer.attn_backend.supports_head_size(shape.head_dim):
                raise UsageError(
                    f"the drafter keeps K/V of heads {shape.head_dim} wide, and the attention backend {layer.attn_backend.get_name()} "
                    f"has {', '.join(map(str, layer.attn_backend.get_supported_head_sizes()))}: choose another drafter"
                )
            layer.process_weights_after_loading(config.model_config.dtype)


def layout_name(layer: Any) -> str:
    """See :data:`hspec.serving.pages.LAYOUTS`."""
    backend = layer.attn_backend.get_name()
    return f"{backend}/{layer.isa}" if hasattr(layer, "isa") else backend


def writer(layer: Any) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The target's own way of writing K/V to a layer's pages."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots.to(torch.int64))

    return write

"""The only file that reaches into vLLM's model runner (V1): four methods are wrapped, for H-Spec's proposer alone.

What comes out of the runner is put into a :class:`hspec.serving.step.Step` of plain tensors and numbers here, so that another
runner needs another of these files and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hspec.serving.step import Step

_INSTALLED = "_hspec_installed"


def install() -> None:
    """Wrap the runner's methods, once a process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, _INSTALLED, False):
        return
    setattr(GPUModelRunner, _INSTALLED, True)
    _wrap_taps(GPUModelRunner)
    _wrap_cache(GPUModelRunner)
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


# -- attention layers --------------------------------------------------------------------------------------------


def attention_layers(runner: Any) -> dict[int, Any]:
    """The target's attention layers by index."""
    from vllm.model_executor.models.utils import extract_layer_index

    context = runner.compilation_config.static_forward_context
    return {
        extract_layer_index(name): layer
        for name, layer in context.items()
        if isinstance(getattr(layer, "kv_cache", None), Tensor)
    }


def layout_name(layer: Any) -> str:
    """See :data:`hspec.serving.pages.LAYOUTS`."""
    backend = layer.attn_backend.get_name()
    return f"{backend}/{layer.isa}" if hasattr(layer, "isa") else backend


def writer(layer: Any) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The target's own way of writing K/V to a layer's pages."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots.to(torch.int64))

    return write

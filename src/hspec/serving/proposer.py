"""What vLLM makes in each worker: joins the drafter to the target, finds and tries the pages, and drafts after each step."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from hspec.drafters.checkpoint import known_config, load_drafter
from hspec.drafters.config import ParallelConfig
from hspec.drafters.head_share import keep_share
from hspec.errors import HSpecError
from hspec.serving import hooks, plugin, versions
from hspec.serving.memory import Ran
from hspec.serving.pages import LAYOUTS, Pages
from hspec.serving.ranks import check_ranks
from hspec.serving.self_test import check_pages
from hspec.serving.settings import around_of, drafter_of
from hspec.serving.step import Proposal, Step, StepDrafter
from hspec.serving.targets import ServedTarget, TemplateHash, require_servable, require_supported

logger = logging.getLogger("vllm.hspec")


class HSpecProposer:
    """vLLM makes one in each worker (``method: custom_class``) and calls it through the hooks.

    Args:
        config: ``vllm.config.VllmConfig``.

    Raises:
        HSpecError: this vLLM is not known.
        UsageError: the target or the drafter cannot be served.
    """

    def __init__(self, config: Any):
        versions.require(plugin.has_native())
        plugin.require_registered()
        require_supported(config)
        self.vllm_config = config
        self.folder, self.around = drafter_of(config.additional_config), around_of(config.additional_config)
        self.k = config.speculative_config.num_speculative_tokens
        self.drafter_config = known_config(self.folder)
        require_servable(self.drafter_config, self.k, str(self.folder))
        self.ranks = hooks.ranks()
        check_ranks(self.drafter_config, self.ranks.count, str(self.folder))
        # The runner asks this configuration (the target's own, for the method custom_class) which residual streams to give out.
        config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = tuple(
            self.drafter_config.taps
        )
        hooks.install()
        self._drafter: StepDrafter | None = None

    # -- at start ------------------------------------------------------------------------------------------------

    def load_model(self, model: Any) -> None:
        """Join the drafter to the target's own embedding and LM head; the runner calls this when the target is loaded."""
        config = self.vllm_config.model_config
        embedding = self._whole(model.model.embed_tokens)
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        target = ServedTarget(
            name=config.model,
            config=config.hf_text_config,
            template=TemplateHash(_template_hash(config)),
            embedding_weight=embedding,
            head_weight=embedding if tied else self._whole(model.lm_head),
        )
        drafter = load_drafter(self.folder, target)
        if self.ranks.count > 1:
            keep_share(drafter, self.ranks.rank, self.ranks.count, self.ranks.sum)
        self._drafter = StepDrafter(drafter.prepare(), self.k, self.ranks, self.around)
        if drafter.memory_shape is not None:
            assert isinstance(drafter.config, ParallelConfig) and drafter.config.attention is not None
            hooks.make_own_layers(self.vllm_config, drafter.memory_shape, drafter.config.attention.heads)
        method = self.drafter_config.method + self.around.endings
        logger.info("H-Spec: %s with k = %d from %s", method, self.k, self.folder)

    def _whole(self, layer: Any) -> Tensor:
        """All rows of an embedding or LM head, whose vocabulary vLLM pads and spreads over the ranks: ``[vocabulary, hidden]``; its
        own tensor where there is one rank, else a copy."""
        own = layer.weight.detach()
        if self.ranks.count > 1:
            own = self.ranks.join(own[: layer.shard_indices.num_org_elements_padded])
        return own[: self.vllm_config.model_config.hf_text_config.vocab_size]

    def bind(self, runner: Any) -> None:
        """Find the pages that the drafter reads, and try them; the runner has just made its KV cache.

        Raises:
            HSpecError: they are not laid out as known.
        """
        assert self._drafter is not None
        if len(runner.kv_cache_config.kv_cache_groups) != 1:
            raise HSpecError(
                f"the layers are in {len(runner.kv_cache_config.kv_cache_groups)} KV groups, and this plugin reads one: "
                f"serve without --speculative-config"
            )
        found = hooks.attention_layers(runner)
        attention = getattr(self._drafter.drafter.config, "attention", None)
        heads = 0 if attention is None else attention.kv_heads
        self._drafter.pages = _tried({i: found[i] for i in self._drafter.target_layers}, "layer", heads)
        if self._drafter.memory is not None:
            own = dict(enumerate(hooks.own_layers(runner)))
            self._drafter.memory.pages = _tried(own, "the drafter's layer", heads)
            self._drafter.memory.writers = {i: hooks.writer(layer) for i, layer in own.items()}

    # -- each step -----------------------------------------------------------------------------------------------

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """What stock vLLM would call, with token ids alone; the hooks call :meth:`draft` instead."""
        raise HSpecError("H-Spec's hooks are not in vLLM's runner: was vLLM's module replaced after the proposer was made?")

    def remember(self, ran: Ran) -> None:
        """Take note of what the target has just run, if the drafter keeps anything; the hooks call this in each step."""
        assert self._drafter is not None
        if self._drafter.memory is not None:
            self._drafter.memory.remember(ran)

    def draft(self, step: Step) -> Proposal:
        """Draft behind every request that sampled a token; the hooks call this after each step of the target."""
        assert self._drafter is not None
        return self._drafter.draft(step)


def _tried(layers: dict[int, Any], what: str, heads: int) -> Pages:
    """The pages of attention layers by index, once the self-test has read from each what it wrote.

    Args:
        heads: KV heads whose K/V each holds, of this rank.

    Raises:
        HSpecError: they are not laid out as known.
    """
    pages = Pages()
    for index, layer in sorted(layers.items()):
        name = hooks.layout_name(layer)
        if name not in LAYOUTS:
            raise HSpecError(
                f"the attention backend is {name}, and this plugin reads the pages of {', '.join(LAYOUTS)}: choose one of these "
                f"with --attention-backend, or serve without --speculative-config"
            )
        check_pages(layer.kv_cache, LAYOUTS[name], hooks.writer(layer), heads, f"{what} {index}")
        pages.layers[index], pages.layout = layer.kv_cache, LAYOUTS[name]
    return pages


def _template_hash(config: Any) -> str:
    from transformers import AutoTokenizer

    from hspec.targets.template import ChatTemplate

    return ChatTemplate(AutoTokenizer.from_pretrained(config.tokenizer, revision=config.tokenizer_revision)).hash

"""vLLM's sampling parameters, as far as they shape drafts. The target's own rows are processed by vLLM."""

from __future__ import annotations

import random
from typing import Any, Literal

from hspec.decoding.params import LEAST, SamplingParams

GREEDY = 1e-5
"""Below this temperature vLLM takes the likeliest token."""


def draft_params(params: Any) -> SamplingParams:
    """What a request's drafts are drawn with; any choice is lossless, these are accepted most.

    A seeded request draws by (seed, position), so that nothing is kept between steps; another one from a seed made up for the
    step. Under a grammar drafts are greedy: vLLM cuts the draft at the first token that the grammar forbids, and draws the next one
    from the whole distribution there. That is exact for drafts that were not drawn, and only for these.

    Args:
        params: ``vllm.SamplingParams``.
    """
    greedy = params.temperature < GREEDY
    draft: Literal["auto", "greedy"] = "greedy" if params.structured_outputs is not None else "auto"
    return SamplingParams(
        temperature=0.0 if greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=max(params.top_p, LEAST),
        repetition_penalty=min(max(params.repetition_penalty, LEAST), 1 / LEAST),
        seed=random.getrandbits(62) if params.seed is None else params.seed,
        draft=draft,
    )

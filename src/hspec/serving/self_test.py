"""Whether what is read from the pages is what vLLM writes to them: tried at start, through vLLM's own writer."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec.errors import HSpecError
from hspec.serving.pages import Layout, Writer, gather


def check_pages(pages: Tensor, layout: Layout, write: Writer, kv_heads: int, name: str) -> None:
    """Write tokens with known K/V to a few blocks, out of order, and read them back. The blocks' contents are restored.

    Args:
        pages: one layer's cache, ``[blocks, kv_heads, block, 2 * d]``.
        kv_heads: that the layer must have: those of this rank.
        name: of the layer, for the message.

    Raises:
        HSpecError: something else is read, so the layout is not the one that is known; or the heads are others.
    """
    blocks, heads, block, both = pages.shape
    if heads != kv_heads:
        raise HSpecError(
            f"the pages of {name} hold {heads} KV heads, and the drafter attends to {kv_heads}: vLLM spreads heads over its ranks in a "
            f"way that the plugin does not know; serve without --speculative-config"
        )
    used = torch.tensor(sorted({1, blocks // 2, blocks - 1} & set(range(1, blocks)), reverse=True), device=pages.device)
    count = len(used) * block - block // 2  # the last block half full
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(count, heads, both // 2, generator=generator).to(pages.device, pages.dtype) for _ in range(2))
    places = torch.arange(count, device=pages.device)
    before = pages[used].clone()
    try:
        write(keys, values, used[places // block] * block + places % block)
        read = [gather(side, used, 0, count) for side in layout(pages)]
        worst = max(
            float((mine - theirs.transpose(0, 1)).abs().max()) for mine, theirs in zip(read, (keys, values), strict=True)
        )
    finally:
        pages[used] = before
    if worst != 0:
        raise HSpecError(
            f"the keys and values read from the pages of {name} are not those that vLLM writes (they differ by {worst:.3g}): "
            f"this backend lays its pages out in a way that the plugin does not know; serve without --speculative-config"
        )

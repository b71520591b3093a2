"""Which of a target's layers look back to what followed last time: how much of their attention heads give it on random tokens said twice.

    python benchmarks/induction_heads.py --target smollm2

A drafter that reads K/V of such layers might copy from its context as the target does (docs/recipe.md).
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from hspec.errors import HSpecError
from hspec.targets.sources import load_target
from hspec.targets.target import Target


@torch.no_grad()
def induction(target: Target, length: int = 150, rows: int = 4, seed: int = 0) -> Tensor:
    """Attention to the token behind the first saying of the one that stands here, a mean over the second saying: ``[layers, heads]``.

    Args:
        length: tokens that are said twice. rows: such texts. seed: of the tokens.
    """
    said = torch.randint(target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    target.model.set_attn_implementation("eager")  # the only one that gives its weights
    weights = target.model(torch.cat((said, said), dim=1), output_attentions=True).attentions
    here = torch.arange(length, 2 * length - 1)
    return torch.stack([layer[:, :, here, here - length + 1].mean((0, 2)) for layer in weights])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    given = parser.parse_args()
    try:
        found = induction(load_target(given.target))
    except HSpecError as error:
        sys.exit(f"induction_heads: {error}")
    for layer, heads in enumerate(found.tolist()):
        print(f"layer {layer:2}  most {max(heads):.2f}  heads {' '.join(f'{head:.2f}' for head in heads)}")


if __name__ == "__main__":
    main()

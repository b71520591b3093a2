"""From one checkpoint layout to another: read, written, read back, and compared before it counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter, read_raw, save_drafter
from hspec.drafters.context import Chooser, DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.formats.authors import is_authors
from hspec.drafters.formats.envelope import is_speculators, refuse, same_rows
from hspec.drafters.formats.files import check_free
from hspec.drafters.formats.speculators import write_authors, write_speculators
from hspec.errors import HSpecError, UsageError
from hspec.files import beside, reason
from hspec.targets.cache import KVView
from hspec.targets.target import Target

LAYOUTS = ("hspec", "speculators", "authors")
TOLERANCE = 0.01
"""Largest difference of a logit, as a share of the largest logit, that is the rounding of weights stored in a half type."""

_LENGTH = 48
_ANCHORS = (1, 2, 17, _LENGTH)


@dataclass(frozen=True)
class Conversion:
    """What was converted, and how well what was written agrees with what was read."""

    method: str
    source: str
    """Layout of what was read ..."""
    layout: str
    """... and of what was written."""
    parameters: int
    blocks: int
    """Blocks behind a random context whose logits were compared ..."""
    max_difference: float
    """... the largest difference ..."""
    max_logit: float
    """... and the largest logit, to judge it by."""


def layout_name(folder: Path) -> str:
    """``hspec``, ``authors`` or ``speculators``.

    Raises:
        UsageError: no such folder, or not a drafter's.
        HSpecError: its configuration is damaged.
    """
    raw = read_raw(folder)
    return "authors" if is_authors(raw) else "speculators" if is_speculators(raw) else "hspec"


def check_places(source: Path, out: Path, layout: str) -> None:
    """What can be said before anything is loaded.

    Raises:
        UsageError: no such layout, nothing to convert, or a place that is taken.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"no layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    check_free(out)
    layout_name(source)


def convert(source: Path, out: Path, layout: str, target: Target, mask_token_id: int | None = None) -> Conversion:
    """Write the drafter of a folder to another one in another layout.

    It is read back and its logits are compared before it appears; if anything goes wrong nothing is left behind.

    Args:
        source: a folder of any layout. out: a new one.
        layout: one of :data:`LAYOUTS`.
        mask_token_id: the token of the mask slots, for layouts that have one; by default the source's.

    Raises:
        UsageError: the layout cannot say what the drafter computes, or ``out`` is taken.
        HSpecError: files are damaged, the disk does not take it, or what is read back is another drafter.
    """
    check_places(source, out, layout)
    drafter = load_drafter(source, target)
    if mask_token_id is None:
        found = read_raw(source).get("mask_token_id")
        mask_token_id = found if type(found) is int else None
    writers: dict[str, Callable[[Path], None]] = {
        "hspec": lambda place: _write_own(drafter, target, place),
        "speculators": lambda place: write_speculators(drafter, target, place, mask_token_id),
        "authors": lambda place: write_authors(drafter, target, place, mask_token_id),
    }
    out = out.absolute()
    temporary = beside(out)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        writers[layout](temporary)
        difference, largest = _compare(drafter, load_drafter(temporary, target), target)
        if not difference <= TOLERANCE * largest:
            raise HSpecError(
                f"{source} written as {layout} and read back gives other logits: they differ by up to {difference:.2g} "
                f"(largest logit {largest:.3g}). Nothing was written to {out}; please report it"
            )
        temporary.replace(out)
    except OSError as error:
        raise HSpecError(f"cannot write the drafter to {out}: {reason(error)}. Nothing was changed there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    parameters = sum(p.numel() for p in drafter.parameters())
    return Conversion(drafter.config.method, layout_name(source), layout, parameters, len(_ANCHORS), difference, largest)


def _write_own(drafter: Drafter, target: Target, place: Path) -> None:
    wrong = []
    if not same_rows(drafter.embedding, target.embedding_weight):
        wrong.append("an embedding other than the target's")
    if not same_rows(drafter.head, target.head_weight[drafter.draft_ids]):
        wrong.append("LM-head rows other than the target's")
    refuse(drafter.config, "hspec", wrong)
    save_drafter(drafter, place)


# -- the comparison ----------------------------------------------------------------------------------------------


def _compare(one: Drafter, other: Drafter, target: Target) -> tuple[float, float]:
    """The largest difference of two drafters' logits behind a random context, and the largest logit."""
    if not torch.equal(one.draft_ids, other.draft_ids):
        return float("inf"), 0.0
    difference = largest = 0.0
    for anchor in _ANCHORS:
        a, b = (block_logits(drafter, target, anchor) for drafter in (one, other))
        apart = (a - b).abs().nan_to_num(float("inf"), float("inf")).masked_fill(a == b, 0.0)  # -inf where no candidate is
        difference = max(difference, float(apart.max()))
        largest = max(largest, float(a[a.isfinite()].abs().max()))
    return difference, largest


@torch.no_grad()
def block_logits(drafter: Drafter, target: Target, anchor: int, seed: int = 0) -> Tensor:
    """Logits of a whole block behind ``anchor`` random hidden states, drafting random tokens: ``[k, draft vocabulary]``.

    The same for every drafter with these weights, draft vocabulary and taps.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(target.device)

    shape, config = target.cache_shape, drafter.config
    tokens = torch.randint(config.target.vocab_size, (1, _LENGTH + 1), generator=generator).to(target.device)
    taps = random(1, _LENGTH, len(config.taps), config.hidden_size)[:, :anchor]
    kv = [random(1, shape.kv_heads, _LENGTH, shape.head_dim) for _ in range(2 * shape.layers)]
    memory = None
    if drafter.memory_shape is not None:
        positions = torch.arange(anchor, device=target.device)[None]
        kept = drafter.remember(taps, tokens[:, 1 : anchor + 1], positions, None)
        memory = KVView([k for k, _ in kept], [v for _, v in kept], (anchor,))
    context = DraftContext(
        anchors=tokens[:, anchor : anchor + 1],
        positions=torch.tensor([[anchor]], device=target.device),
        taps=taps[:, -1:],
        kv=KVView(kv[::2], kv[1::2], (anchor,)),
        memory=memory,
    )
    chosen = torch.randint(len(drafter.draft_ids), (drafter.max_draft,), generator=generator).to(target.device)
    follower = _Follower(chosen)
    drafter.propose(context, drafter.max_draft, follower)
    return torch.cat(follower.logits)


class _Follower(Chooser):
    """Drafts given tokens, and takes down the logits."""

    def __init__(self, chosen: Tensor):
        self.chosen = chosen
        self.logits: list[Tensor] = []

    def __call__(self, slot: int, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        self.logits.append(logits.float())
        return self.chosen[slot - 1 : slot], None

    def latent(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

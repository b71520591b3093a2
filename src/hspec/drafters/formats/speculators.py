"""Drafters in the layout of the library ``speculators``, one table of its types: read from folders, and written to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hspec.drafters.config import DrafterConfig, EagleConfig, ParallelConfig
from hspec.drafters.drafter import Drafter
from hspec.drafters.eagle import EagleDrafter
from hspec.drafters.formats import authors, dflash, eagle
from hspec.drafters.formats.envelope import (
    Checkpoint,
    check_token,
    envelope_fields,
    fitting,
    named_weights,
    read_draft_ids,
    refuse,
    same_rows,
    vocabulary_tensors,
)
from hspec.drafters.formats.files import CONFIG_FILE, WEIGHTS_FILE, read_json, read_tensors, write_folder
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import UsageError
from hspec.targets.target import Target


@dataclass(frozen=True)
class Layout:
    """One type of the library's: how it is read and written."""

    kind: str
    """``speculators_model_type``."""
    architecture: str
    read: Callable[[Mapping[str, Any], int, str | None, str], DrafterConfig]
    """config.json, the target's layers and family, and what errors name -> the configuration here."""
    names: Callable[[Any], dict[str, str]]
    """A configuration -> the layout's name of every tensor -> its name here."""
    refusals: Callable[[Any], list[str]]
    """What of a configuration it cannot say; nothing, if it can be written."""
    fields: Callable[[Any, Target], dict[str, Any]]
    """The type's own keys of a configuration that can be written."""
    own_vocabulary: bool
    """Whether it comes with an embedding and a head of its own. Otherwise the target's are meant, but for a head over part of
    the vocabulary."""
    has_mask: bool = True
    """Whether slots start from the embedding of a mask token."""


LAYOUTS: dict[str, Layout] = {
    layout.kind: layout
    for layout in (
        Layout(
            authors.MODEL_TYPE, authors.ARCHITECTURE, authors.authors_config, authors.weight_names, authors.refusals,
            authors.authors_fields, own_vocabulary=True,
        ),
        *(
            Layout(
                kind, architecture, dflash.dflash_config, dflash.weight_names, dflash.refusals, dflash.dflash_fields,
                own_vocabulary=False,
            )
            for kind, architecture in dflash.ARCHITECTURES.items()
        ),
        *(
            Layout(
                kind, architecture, eagle.eagle_config, eagle.weight_names, eagle.refusals, eagle.eagle_fields,
                own_vocabulary=True, has_mask=kind == "peagle",
            )
            for kind, architecture in eagle.ARCHITECTURES.items()
        ),
    )
}  # fmt: skip
"""By ``speculators_model_type``."""


# -- reading -----------------------------------------------------------------------------------------------------


def layout_of(raw: Mapping[str, Any], where: str = CONFIG_FILE) -> Layout:
    """The layout of a parsed ``config.json``.

    Raises:
        UsageError: a type that is not known.
    """
    kind = raw.get("speculators_model_type")
    if kind not in LAYOUTS:
        raise UsageError(
            f"{where}: a drafter of the type {kind!r}; of the layout of speculators {', '.join(LAYOUTS)} can be read"
        )
    return LAYOUTS[str(kind)]


def read_speculators(folder: Path, layers: int, family: str | None = None) -> Checkpoint:
    """Read a checkpoint folder.

    Args:
        layers: how many decoder layers the target has; the layout does not say.
        family: the target's model type; by default what the layout's verifier says.

    Raises:
        UsageError: no such folder, another drafter's, or one that needs what is not supported.
        HSpecError: files are damaged or do not fit each other.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UsageError(f"no drafter at {folder}: give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    raw = read_json(path)
    config = layout_of(raw, str(path)).read(raw, layers, family, str(path))
    return read_weights(raw, read_tensors(folder), config, str(folder))


def read_weights(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> Checkpoint:
    """Tensors under the layout's names -> those of the drafter, and what stands beside them.

    Args:
        raw: the ``config.json`` that ``config`` was read from.

    Raises:
        HSpecError: tensors are missing, surplus, of another shape or inconsistent.
    """
    layout = layout_of(raw, where)
    pruned = config.draft_vocab_size != config.target.vocab_size
    needed = ["lm_head.weight"] if pruned or layout.own_vocabulary else []
    if layout.kind in eagle.ARCHITECTURES:
        needed.append("embed_tokens.weight")
    weights = fitting(tensors, config, layout.names(config), needed, where)
    embedding = tensors.get("embed_tokens.weight")
    mask = check_token(raw.get("mask_token_id"), config, where) if layout.has_mask else None
    if embedding is not None and layout.own_vocabulary and mask is not None:
        weights["mask_embedding"] = embedding[mask]  # its own row: the authors replace one that is all zeros
    return Checkpoint(
        config,
        weights,
        embedding,
        tensors.get("lm_head.weight"),
        read_draft_ids(tensors, config, where),
        mask,
        layout.own_vocabulary,
    )


def described_config(raw: Mapping[str, Any], where: str) -> DrafterConfig:
    """A configuration for showing, without the target: it is taken to have just the layers that are named."""
    keys = (dflash.TAPS, eagle.TAPS, "attn_kv_layer_ids", "latent_fusion_layer_ids")
    named = [i for key in keys if isinstance(raw.get(key), list) for i in raw[key] if type(i) is int]
    fewest = 7  # with which the taps that EAGLE has by default ascend
    return layout_of(raw, where).read(raw, max(named, default=fewest) + 1, None, where)


# -- writing -----------------------------------------------------------------------------------------------------


def write_speculators(drafter: Drafter, target: Target, folder: Path, mask_token_id: int | None = None) -> None:
    """Write a drafter for the library ``speculators``, and servers that load its checkpoints: DFlash, DSpark, DFlash-2,
    EAGLE-3 or P-EAGLE.

    Args:
        folder: a new one.
        mask_token_id: of the DFlash types, a token whose embedding is the drafter's mask; by default the configuration's. Of
            P-EAGLE as for :func:`write_authors`.

    Raises:
        UsageError: the layout cannot say what the drafter computes, or the folder is taken.
        HSpecError: the disk does not take it; nothing is left of it.
    """
    config = drafter.config
    if isinstance(config, EagleConfig):
        _write_own_vocabulary(drafter, target, folder, LAYOUTS[config.method], mask_token_id)
        return
    if not isinstance(config, ParallelConfig):
        raise UsageError(f"{config.method} drafters have no place in the layout of speculators: keep it in that of hspec")
    layout = LAYOUTS[dflash.dflash_kind(config)]
    token = config.mask_token_id if mask_token_id is None else mask_token_id
    reasons = layout.refusals(config) + _vocabulary_refusals(drafter, target)
    if not _is_row(_mask_embedding(drafter), target, token):
        reasons.append(
            "a mask embedding of its own (theirs is the row of a token in the target's embedding; train with mask_token_id set "
            "to such a token)"
        )
    refuse(config, f"{layout.kind} of speculators", reasons)
    tensors = named_weights(drafter, layout.names(config)) | vocabulary_tensors(drafter)
    if config.draft_vocab_size != config.target.vocab_size:
        tensors["lm_head.weight"] = drafter.head
    _write(folder, layout, config, target, tensors, token)


def write_authors(drafter: Drafter, target: Target, folder: Path, mask_token_id: int | None = None) -> None:
    """Write an H-Spec drafter in its authors' layout.

    Args:
        folder: a new one.
        mask_token_id: the token whose row in the stored embedding becomes the drafter's mask embedding, one that no text has;
            by default the configuration's.

    Raises:
        UsageError: the layout cannot say what the drafter computes, no token is named, or the folder is taken.
        HSpecError: the disk does not take it; nothing is left of it.
    """
    config = drafter.config
    if not isinstance(config, ParallelConfig):
        refuse(config, "mamba_attn_hybrid, the authors' layout", [f"the backbone of {config.method}"])
    assert isinstance(config, ParallelConfig)
    token = config.mask_token_id if mask_token_id is None else mask_token_id
    _write_own_vocabulary(drafter, target, folder, LAYOUTS[authors.MODEL_TYPE], token)


def _write_own_vocabulary(drafter: Drafter, target: Target, folder: Path, layout: Layout, token: int | None) -> None:
    """Write a type that comes with an embedding: the mask is a row of it."""
    config = drafter.config
    refuse(
        config,
        f"{layout.kind}, the authors' layout" if layout.kind == authors.MODEL_TYPE else layout.kind,
        layout.refusals(config),
    )
    if layout.has_mask and (token is None or not 0 <= token < config.target.vocab_size):
        raise UsageError(
            f"the type {layout.kind} has the mask as a token of the vocabulary, and this drafter names none ({token}): name one "
            f"below {config.target.vocab_size} that never occurs in text, such as an unused or padding token (--mask-token)"
        )
    embedding = drafter.embedding.detach().float().clone()
    if layout.has_mask and token is not None:
        embedding[token] = _mask_embedding(drafter).detach().to(embedding)
    tensors = named_weights(drafter, layout.names(config)) | vocabulary_tensors(drafter)
    tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": drafter.head}
    _write(folder, layout, config, target, tensors, token if layout.has_mask else None)


def _write(
    folder: Path, layout: Layout, config: DrafterConfig, target: Target, tensors: dict[str, Tensor], mask_token_id: int | None
) -> None:
    fields = envelope_fields(layout.kind, layout.architecture, config, target) | layout.fields(config, target)
    write_folder(folder, fields if mask_token_id is None else fields | {"mask_token_id": mask_token_id}, tensors)


def _mask_embedding(drafter: Drafter) -> Tensor:
    assert isinstance(drafter, ParallelDrafter | EagleDrafter) and drafter.mask_embedding is not None
    return drafter.mask_embedding


def _is_row(mask: Tensor, target: Target, token: int | None) -> bool:
    if token is None or not 0 <= token < target.vocab_size:
        return False
    return bool((mask.cpu() == target.embedding_weight[token].to(mask.dtype).cpu()).all())


def _vocabulary_refusals(drafter: Drafter, target: Target) -> list[str]:
    """What of a drafter is the target's in a type that does not come with it."""
    wrong = []
    if not same_rows(drafter.embedding, target.embedding_weight):
        wrong.append("an embedding other than the target's")
    if len(drafter.draft_ids) == target.vocab_size and not same_rows(drafter.head, target.head_weight):
        wrong.append("an LM head over the whole vocabulary other than the target's")
    return wrong

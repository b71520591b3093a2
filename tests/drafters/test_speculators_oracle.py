"""The oracle itself: that it computes with what it is given, sees what the library's blocks see, and nothing else.

Each of these would also pass with an oracle that ignores its inputs, were it not for the exact sets and slots asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.drafters.speculators_oracle import (
    BLOCKS,
    CHAINS,
    DRAFT_VOCABULARY,
    HIDDEN,
    MASK_TOKEN,
    VOCABULARY,
    WINDOW,
    Kind,
    Oracle,
    draft_greedily,
    load_drafter,
    make_drafter,
    make_inputs,
    run,
    run_blocks,
    run_steps,
)

LENGTH, ANCHOR = 20, 11


def slots_changed(before: Tensor, after: Tensor) -> set[int]:
    """The slots whose numbers differ, of [A, S, ...]."""
    different = (before - after).abs().flatten(2).amax(-1) > 1e-4
    return set(different.any(0).nonzero().flatten().tolist())


def rows_read(compute: Callable[[Tensor, Tensor], Tensor]) -> list[set[int]]:
    """For each slot of the result [A, S, ...], the rows of the taps that it follows."""
    tokens, taps = make_inputs(LENGTH)
    before = compute(tokens, taps)
    found: list[set[int]] = [set() for _ in range(before.shape[1])]
    for row in range(LENGTH):
        changed = taps.clone()
        changed[0, row] += 1
        for slot in slots_changed(before, compute(tokens, changed)):
            found[slot].add(row)
    return found


def slots_reading_token(oracle: Oracle, position: int, slots: int | None = None) -> set[int]:
    """The slots (first_slot counted as 0) whose logits follow the token at ``position``."""
    tokens, taps = make_inputs(LENGTH)
    before = run(oracle, tokens, taps, [ANCHOR], slots).logits
    tokens[0, position] = (tokens[0, position] + 1) % VOCABULARY
    return slots_changed(before, run(oracle, tokens, taps, [ANCHOR], slots).logits)


@pytest.mark.parametrize("kind", [*BLOCKS, *CHAINS])
def test_checkpoint_holds_the_weights(kind: Kind, tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path / "a")
    state, stored = oracle.model.state_dict(), oracle.tensors
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored.items())
    assert not any(tensor.isnan().any() for tensor in state.values())
    assert ("embed_tokens.weight" in stored) == (kind in CHAINS)
    assert ("lm_head.weight" in stored) == (kind != "dflash2")
    assert not any(name.startswith("verifier") for name in stored)
    assert oracle.raw["speculators_model_type"] == kind
    again = make_drafter(kind, tmp_path / "b").tensors
    assert stored.keys() == again.keys() and all(torch.equal(stored[name], again[name]) for name in stored)
    other = make_drafter(kind, tmp_path / "c", seed=1).tensors
    assert not any(torch.equal(stored[name], other[name]) for name in stored)


def test_draft_ids_are_offsets(tmp_path: Path) -> None:
    oracle = make_drafter("dflash", tmp_path)
    ids = oracle.draft_ids
    assert len(ids) == DRAFT_VOCABULARY and torch.equal(oracle.tensors["t2d"].nonzero().flatten(), ids)
    assert not torch.equal(oracle.tensors["d2t"], ids)


@pytest.mark.parametrize("kind", BLOCKS)
def test_full_layer_reads_all_before_the_anchor(kind: Kind, tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path, layer_types=("full",))
    found = rows_read(lambda tokens, taps: run_blocks(oracle, tokens, taps, [ANCHOR]).logits)
    assert found == [set(range(ANCHOR))] * oracle.block_size


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("non_causal", [True, False])
def test_window_counts_from_the_anchor_for_every_slot(kind: Kind, non_causal: bool, tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path, layer_types=("sliding",) * 2, sliding_window_non_causal=non_causal)
    found = rows_read(lambda tokens, taps: run_blocks(oracle, tokens, taps, [ANCHOR]).logits)
    assert found == [set(range(ANCHOR - WINDOW, ANCHOR))] * oracle.block_size


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(
    ("layer", "non_causal", "causal"), [("full", False, False), ("sliding", True, False), ("sliding", False, True)]
)
def test_slots_see_later_ones(
    kind: Kind, layer: Literal["full", "sliding"], non_causal: bool, causal: bool, tmp_path: Path
) -> None:
    short = make_drafter(kind, tmp_path, layer_types=(layer,), sliding_window_non_causal=non_causal, block_size=4)
    long = load_drafter(short.folder, short.target_folder, block_size=7)
    inputs = make_inputs(LENGTH)
    before, after = (run_blocks(o, *inputs, [ANCHOR]).logits[:, :4] for o in (short, long))
    assert slots_changed(before, after) == (set() if causal else {0, 1, 2, 3})


def test_dflash_reads_the_anchor_and_the_mask_only(tmp_path: Path) -> None:
    oracle = make_drafter("dflash", tmp_path)
    assert slots_reading_token(oracle, ANCHOR) == {0, 1, 2, 3}
    for position in (ANCHOR - 1, *range(ANCHOR + 1, LENGTH)):
        assert slots_reading_token(oracle, position) == set()
    inputs = make_inputs(LENGTH)
    before = run_blocks(oracle, *inputs, [ANCHOR]).logits
    oracle.model.embed_tokens.weight[MASK_TOKEN] += 1
    assert slots_changed(before, run_blocks(oracle, *inputs, [ANCHOR]).logits) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_markov_head_reads_the_token_before(head: str, from_anchor: bool, tmp_path: Path) -> None:
    oracle = make_drafter("dspark", tmp_path, markov_head_type=head, sample_from_anchor=from_anchor)
    assert oracle.first_slot == (0 if from_anchor else 1)
    drafted = oracle.block_size - oracle.first_slot
    for ahead in range(1, drafted):
        expected = set(range(ahead, drafted)) if head == "rnn" else {ahead}
        assert slots_reading_token(oracle, ANCHOR + ahead) == expected
    assert slots_reading_token(oracle, ANCHOR + drafted) == set()


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence(with_markov: bool, tmp_path: Path) -> None:
    oracle = make_drafter("dspark", tmp_path, confidence_head_with_markov=with_markov)
    tokens, taps = make_inputs(LENGTH)
    before = run(oracle, tokens, taps, [ANCHOR]).confidence
    tokens[0, ANCHOR + 2] += 1
    after = run(oracle, tokens, taps, [ANCHOR]).confidence
    assert before is not None and after is not None
    assert slots_changed(before[..., None], after[..., None]) == ({2} if with_markov else set())
    none = make_drafter("dspark", tmp_path / "none", enable_confidence_head=False)
    assert run(none, tokens, taps, [ANCHOR]).confidence is None


def test_selector_scores_its_candidates(tmp_path: Path) -> None:
    oracle = make_drafter("dflash2", tmp_path)
    tokens, taps = make_inputs(LENGTH)
    before = run(oracle, tokens, taps, [ANCHOR])
    tokens[0, ANCHOR + 1] += 1
    after = run(oracle, tokens, taps, [ANCHOR])
    assert before.candidates is not None and before.scores is not None and after.scores is not None
    assert torch.equal(before.candidates, before.logits.topk(5).indices)
    assert slots_changed(before.scores, after.scores) == {1}
    unary = before.logits.gather(-1, before.candidates)
    assert slots_changed(before.scores, unary) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_do_not_meet(kind: Kind, tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path)
    inputs, anchors = make_inputs(LENGTH), [0, 3, 4, ANCHOR, LENGTH - 1]
    together = run_blocks(oracle, *inputs, anchors).logits
    for block, anchor in zip(together, anchors, strict=True):
        assert torch.allclose(block, run_blocks(oracle, *inputs, [anchor]).logits[0], atol=1e-5)


@pytest.mark.parametrize("kind", BLOCKS)
def test_packed_documents_are_apart(kind: Kind, tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path)
    (tokens, taps), start = make_inputs(LENGTH), 7
    documents = (torch.arange(LENGTH) >= start).long()[None]
    packed = run_blocks(oracle, tokens, taps, [ANCHOR], documents=documents).logits
    alone = run_blocks(oracle, tokens[:, start:], taps[:, start:], [ANCHOR - start]).logits
    assert torch.allclose(packed, alone, atol=1e-5)
    assert not torch.allclose(packed, run_blocks(oracle, tokens, taps, [ANCHOR]).logits, atol=1e-2)


@pytest.mark.parametrize("kind", [*BLOCKS, *CHAINS])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_slots_are_trained_towards_the_token_they_stand_for(kind: Kind, from_anchor: bool, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"sample_from_anchor": from_anchor} if kind in BLOCKS else {}
    oracle = make_drafter(kind, tmp_path, **fields)
    tokens, taps = make_inputs(LENGTH)
    last = torch.randn(1, LENGTH, HIDDEN)
    if kind in BLOCKS:
        output = run_blocks(oracle, tokens, taps, [ANCHOR], last_hidden=last)
    else:
        output = run_steps(oracle, tokens, taps, [ANCHOR], 4, last_hidden=last)
    assert output.targets is not None and output.loss is not None and output.loss > 0
    head = oracle.model.verifier_lm_head(oracle.model.verifier_norm(last))[0].detach()  # [T, Vd]: row i of the token i + 1
    slots = output.targets[0, oracle.first_slot :]
    assert torch.allclose(slots, head[ANCHOR : ANCHOR + len(slots)], atol=1e-5)


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("layer", ["full", "sliding"])
def test_steps_read_rows_before_the_anchor(kind: Kind, layer: Literal["full", "sliding"], tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path, layer_types=(layer,))
    found = rows_read(lambda tokens, taps: run_steps(oracle, tokens, taps, [ANCHOR], 4).logits)
    # peagle's window ends at the row's own position, eagle3's at the row that the chain started from.
    firsts = [ANCHOR - WINDOW + (step if kind == "peagle" else 0) if layer == "sliding" else 0 for step in range(4)]
    assert found == [set(range(first, ANCHOR)) for first in firsts]


def test_eagle3_reads_its_own_tokens(tmp_path: Path) -> None:
    oracle = make_drafter("eagle3", tmp_path)
    for ahead in range(5):
        assert slots_reading_token(oracle, ANCHOR + ahead, 4) == set(range(ahead, 4))
    assert slots_reading_token(oracle, ANCHOR - 1, 4) == {0, 1, 2, 3}
    assert slots_reading_token(oracle, 0, 4) == set()  # no row holds the first token


def test_peagle_reads_no_token_behind_the_anchor(tmp_path: Path) -> None:
    oracle = make_drafter("peagle", tmp_path)
    for position in (1, ANCHOR - 1, ANCHOR):
        assert slots_reading_token(oracle, position, 4) == {0, 1, 2, 3}
    for position in (0, *range(ANCHOR + 1, LENGTH)):
        assert slots_reading_token(oracle, position, 4) == set()


@pytest.mark.parametrize("kind", CHAINS)
def test_steps_do_not_depend_on_later_ones(kind: Kind, tmp_path: Path) -> None:
    oracle, inputs = make_drafter(kind, tmp_path), make_inputs(LENGTH)
    short, long = (run_steps(oracle, *inputs, [3, ANCHOR], steps).logits for steps in (2, 5))
    assert torch.allclose(short, long[:, :2], atol=1e-5)
    assert torch.allclose(long[1:], run_steps(oracle, *inputs, [ANCHOR], 5).logits, atol=1e-5)


@pytest.mark.parametrize("kind", [*BLOCKS, *CHAINS])
@pytest.mark.parametrize("slots", [1, 4])
def test_greedy_drafts_are_given_the_drafts_before(kind: Kind, slots: int, tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path)
    tokens, taps = make_inputs(LENGTH)
    drafts = draft_greedily(oracle, tokens, taps, ANCHOR, slots)
    tokens[0, ANCHOR + 1 : ANCHOR + 1 + slots] = torch.tensor(drafts)
    taps[0, ANCHOR:] = 9
    output = run(oracle, tokens, taps, [ANCHOR], slots)
    best = output.logits.argmax(-1)
    if output.candidates is not None and output.scores is not None:
        best = output.candidates.gather(-1, output.scores.argmax(-1, keepdim=True))[..., 0]
    assert oracle.draft_ids[best[0]].tolist() == drafts


def test_wrong_uses(tmp_path: Path) -> None:
    inputs = make_inputs(LENGTH)
    blocks, steps = make_drafter("dflash", tmp_path / "a"), make_drafter("eagle3", tmp_path / "b")
    with pytest.raises(ValueError, match="run_blocks"):
        run_steps(blocks, *inputs, [3], 2)
    with pytest.raises(ValueError, match="run_steps"):
        run_blocks(steps, *inputs, [3])
    for anchors in ([], [5, 4], [4, 4], [-1], [LENGTH]):
        with pytest.raises(ValueError, match="anchors"):
            run_blocks(blocks, *inputs, anchors)
    for anchors in ([0], [LENGTH]):
        with pytest.raises(ValueError, match="anchors"):
            run_steps(steps, *inputs, anchors, 2)

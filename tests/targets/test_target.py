"""The target computes what transformers computes, however its input is cut, and gives the hidden states it says."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hspec.errors import UsageError
from hspec.targets import target as target_module
from hspec.targets.target import FAMILIES, Target
from hspec.targets.template import ChatTemplate
from tests.targets.reference import CASES, LAYERS, random_tokens, reference_model, reference_target
from tests.tiny import tiny_tokenizer

TOLERANCE = 2e-4
TEXT = random_tokens(3, 40)
WINDOWED = ["qwen2-window", "mistral-window", "gemma3_text"]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(case: str) -> Target:
    return reference_target(case)


@pytest.fixture(scope="module")
def expected(case: str) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Logits, residual streams by tap, and hidden states after the final norm, of transformers over the whole text."""
    model = reference_model(case)
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _, __, output: last.append(output))
    with torch.no_grad():
        out = model(TEXT, output_hidden_states=True, use_cache=False)
    hook.remove()
    # The tuple's last entry is after the final norm; what the last layer gave is only seen by a hook.
    return out.logits, [*out.hidden_states[:-1], last[0]], out.hidden_states[-1]


def test_the_families_are_those_that_are_tested() -> None:
    assert {c[0].model_type for c in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [5, 1, 8, 8, 1, 17], [30, 2, 8]], ids=["whole", "ones", "mixed", "long"])
def test_logits_hidden_states_and_taps(
    target: Target, expected: tuple[torch.Tensor, list[torch.Tensor], torch.Tensor], cuts: list[int]
) -> None:
    logits, streams, final = expected
    cache = target.new_cache(3, 40)
    taps, start = [0, 2, LAYERS], 0
    for count in cuts:
        out = target.forward(TEXT[:, start : start + count], cache, taps)
        cache.advance([count] * 3)
        part = slice(start, start + count)
        torch.testing.assert_close(target.logits(out.hidden), logits[:, part], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(out.hidden, final[:, part], atol=TOLERANCE, rtol=0)
        assert out.taps.shape == (3, count, 3, target.hidden_size)
        for i, tap in enumerate(taps):
            torch.testing.assert_close(out.taps[:, :, i], streams[tap][:, part], atol=TOLERANCE, rtol=1e-4)
        start += count
    assert cache.lengths == [40] * 3


def test_rows_of_different_lengths(target: Target, expected: tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]) -> None:
    """Each row at its own place in the text, with blocks of k + 1, from a cache that has some rows rolled back."""
    logits, _, _ = expected
    cache = target.new_cache(3, 48)
    for row, length in enumerate((2, 11, 23)):
        own = cache.rows(row, row + 1)
        target.prefill(TEXT[row : row + 1, :length], own)
        cache.lengths[row] = own.lengths[0]
    for counts in ([3, 1, 4], [0, 2, 1], [4, 4, 4], [1, 1, 1]):
        block = torch.stack([TEXT[row, n : n + 4] for row, n in enumerate(cache.lengths)])
        block = torch.where(torch.arange(4) < torch.tensor(counts)[:, None], block, 7)  # wrong behind what is accepted
        out = target.logits(target.forward(block, cache).hidden)
        for row, (n, count) in enumerate(zip(cache.lengths, counts, strict=True)):
            torch.testing.assert_close(out[row, :count], logits[row, n : n + count], atol=TOLERANCE, rtol=0)
        cache.advance(counts)


def test_a_row_is_the_same_beside_any_neighbours(target: Target) -> None:
    """Bit for bit: the text of a request must not depend on what else runs."""
    lengths = (9, 4, 21)
    caches = [target.new_cache(1, 40) for _ in lengths]
    together = target.new_cache(3, 40)
    for row, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
        target.prefill(TEXT[row : row + 1, :length], cache, [1])
        own = together.rows(row, row + 1)
        target.prefill(TEXT[row : row + 1, :length], own, [1])
        together.lengths[row] = length
    block = TEXT[:, 30:35]
    out = target.forward(block, together, [1])
    for row, cache in enumerate(caches):
        alone = target.forward(block[row : row + 1], cache, [1])
        assert torch.equal(alone.hidden[0], out.hidden[row]) and torch.equal(alone.taps[0], out.taps[row])
        assert torch.equal(target.logits(alone.hidden)[0], target.logits(out.hidden)[row])


def test_rollback_by_length(target: Target) -> None:
    cache = target.new_cache(1, 40)
    target.prefill(TEXT[:1, :20], cache)
    wanted = target.forward(TEXT[:1, 20:23], cache).hidden
    target.forward(random_tokens(1, 12, seed=9), cache)  # staged, none accepted
    cache.advance([0])
    assert torch.equal(target.forward(TEXT[:1, 20:23], cache).hidden, wanted)
    target.prefill(random_tokens(1, 15, seed=8), cache)  # accepted, then taken back
    cache.truncate(0, 20)
    assert torch.equal(target.forward(TEXT[:1, 20:23], cache).hidden, wanted)


def test_prefill_in_chunks(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = target.new_cache(3, 40), target.new_cache(3, 40)
    one = target.prefill(TEXT, whole, [1, LAYERS])
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", 7)
    other = target.prefill(TEXT, cut, [1, LAYERS])
    assert one.hidden.shape == (3, 1, target.hidden_size) and one.taps.shape == (3, 1, 2, target.hidden_size)
    assert cut.lengths == whole.lengths == [40] * 3
    torch.testing.assert_close(other.hidden, one.hidden, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(other.taps, one.taps, atol=TOLERANCE, rtol=1e-4)
    for a, b in zip([*cut.keys, *cut.values], [*whole.keys, *whole.values], strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", [c for c in CASES if c not in WINDOWED])  # of windows, transformers keeps only the window
def test_the_cache_holds_what_transformers_cache_holds(case: str) -> None:
    target = reference_target(case)
    cache = target.new_cache(3, 40)
    target.prefill(TEXT, cache)
    with torch.no_grad():
        theirs = reference_model(case)(TEXT, use_cache=True).past_key_values
    for ours_k, ours_v, layer in zip(cache.keys, cache.values, theirs.layers, strict=True):
        torch.testing.assert_close(ours_k, layer.keys, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(ours_v, layer.values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", WINDOWED)
def test_the_window_matters(case: str) -> None:
    """Otherwise the tests of windowed layers would show nothing."""
    target = reference_target(case)
    with torch.no_grad():
        wide = reference_model(case, sliding_window=1000)(TEXT).logits
    out = target.logits(target.forward(TEXT, target.new_cache(3, 40)).hidden)
    assert (out - wide).abs().max() > 100 * TOLERANCE


def test_nothing_stays_on_the_model(target: Target) -> None:
    cache = target.new_cache(1, 40)
    target.forward(TEXT[:1, :3], cache, [0, LAYERS])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.layers)
    with pytest.raises(UsageError):
        target.forward(random_tokens(1, 41), cache, [0, LAYERS])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.layers)
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())


def test_nothing_to_run_is_refused(target: Target) -> None:
    with pytest.raises(UsageError, match="no tokens"):
        target.prefill(TEXT[:1, :0], target.new_cache(1, 4))


def test_weights_are_kept_for_initialising_a_drafter(case: str) -> None:
    plain, target = reference_model(case), reference_target(case)
    assert torch.equal(target.head_weight, plain.get_output_embeddings().weight)
    assert torch.equal(target.embedding_weight, plain.get_input_embeddings().weight)
    for layer in range(LAYERS):
        wanted = dict(plain.model.layers[layer].named_parameters())
        assert target.layer_weights(layer).keys() == wanted.keys()
        for name, weight in target.layer_weights(layer).items():
            assert torch.equal(weight, wanted[name])
    assert target.parameters == sum(p.numel() for p in plain.parameters())


def test_the_weight_hash_tells_weights_apart() -> None:
    first = reference_target("llama").weight_hash()
    assert first == reference_target("llama", "plain").weight_hash() and len(first) == 16
    model = reference_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 3] += 1e-3
    other = Target(model, ChatTemplate(tiny_tokenizer()), "other")
    with pytest.raises(AssertionError, match="prepare"):
        other.weight_hash()
    assert other.prepare().weight_hash() != first


def test_bf16_linears_are_close() -> None:
    exact, half = (reference_target("llama", linears) for linears in ("plain", "bf16"))
    a, b = (t.logits(t.forward(TEXT, t.new_cache(3, 40)).hidden) for t in (exact, half))
    assert b.dtype == torch.float32
    assert 0 < (a - b).abs().mean() < 0.05 * a.abs().mean()


def test_an_unsupported_family_is_refused() -> None:
    config = GPT2Config(vocab_size=211, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(UsageError, match="'small' is of the family 'gpt2'; supported are llama"):
        Target(GPT2LMHeadModel(config), ChatTemplate(tiny_tokenizer()), "small")


def test_an_unsupported_attention_is_refused() -> None:
    for setting in ({"attn_logit_softcapping": 30.0}, {"use_bidirectional_attention": True}):
        with pytest.raises(UsageError, match=f"{next(iter(setting))} = .* not supported"):
            reference_target("gemma3_text", **setting)


def test_rotary_frequencies_that_follow_the_batch_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )
    with pytest.raises(UsageError, match="rope_type 'dynamic'; supported are default"):
        Target(LlamaForCausalLM(config), ChatTemplate(tiny_tokenizer()), "small")

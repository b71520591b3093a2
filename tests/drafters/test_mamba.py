"""The Mamba mixer: its fast form against the plain recurrence, and what slots may know of each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hspec.drafters.config import MambaConfig
from hspec.drafters.mamba import MambaMixer, scan_dual, scan_recurrent
from tests.tiny import randomise

HIDDEN = 12


def make_mixer(seed: int = 0, kernel: int = 4) -> MambaMixer:
    mixer = MambaMixer(HIDDEN, MambaConfig(heads=6, head_dim=5, state_dim=3, groups=2, conv_kernel=kernel))
    randomise(mixer, seed)
    return mixer.requires_grad_(False)


def scan_inputs(
    blocks: int, slots: int, groups: int, per_group: int, head_dim: int, state_dim: int, seed: int
) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    heads = groups * per_group

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    x, dt = normal(blocks, slots, heads, head_dim), F.softplus(2 * normal(blocks, slots, heads))
    a = -torch.exp(normal(heads))
    b, c = normal(blocks, slots, groups, state_dim), normal(blocks, slots, groups, state_dim)
    return [x, dt, a, b, c, normal(heads)], normal(blocks, heads, head_dim, state_dim)


@given(
    blocks=st.integers(1, 3),
    slots=st.integers(1, 16),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    state_dim=st.integers(1, 5),
    with_state=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_dual_form_is_the_recurrence(
    blocks: int, slots: int, groups: int, per_group: int, head_dim: int, state_dim: int, with_state: bool, seed: int
) -> None:
    inputs, state = scan_inputs(blocks, slots, groups, per_group, head_dim, state_dim, seed)
    expected = scan_recurrent(*inputs, state if with_state else torch.zeros_like(state))
    found = scan_dual(*inputs, state if with_state else None)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_recurrence_by_hand() -> None:
    """One head, one channel, one state: S = exp(dt A) S + dt B x; y = C S + D x, the state updated before it is read."""
    x, dt, b, c = [3.0, -1.0], [0.5, 2.0], [0.7, -0.2], [1.5, 4.0]
    a, d, s = -0.3, 0.25, 2.0
    expected = []
    for t in range(2):
        s = 2.718281828459045 ** (dt[t] * a) * s + dt[t] * b[t] * x[t]
        expected.append(c[t] * s + d * x[t])

    def shaped(values: list[float], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(shape)

    arguments = (
        shaped(x, 1, 2, 1, 1),
        shaped(dt, 1, 2, 1),
        shaped([a], 1),
        shaped(b, 1, 2, 1, 1),
        shaped(c, 1, 2, 1, 1),
        shaped([d], 1),
        shaped([2.0], 1, 1, 1, 1),
    )
    for scan in (scan_recurrent, scan_dual):
        assert torch.allclose(scan(*arguments).flatten(), torch.tensor(expected, dtype=torch.float64))


def test_strong_decay_stays_finite() -> None:
    """exp(cum_t - cum_s) overflows above the diagonal if it is not masked before the exponential."""
    inputs, state = scan_inputs(2, 16, 2, 2, 3, 3, seed=1)
    x, dt, a, b, c, d = (v.float() for v in inputs)
    x, dt = x.requires_grad_(), (dt + 60).requires_grad_()
    y = scan_dual(x, dt, a - 5, b, c, d, state.float())
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all() and torch.isfinite(dt.grad).all()  # type: ignore[arg-type]
    assert torch.allclose(y, scan_recurrent(x, dt, a - 5, b, c, d, state.float()), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_convolution(kernel: int) -> None:
    """Depthwise, causal, zeros before the block: as torch's with the padding cut off behind."""
    mixer = make_mixer(kernel=kernel)
    x = torch.randn(3, 7, mixer.config.conv_channels)
    weight = mixer.conv_weight[:, None]
    expected = F.conv1d(x.transpose(1, 2), weight, mixer.conv_bias, padding=kernel - 1, groups=weight.shape[0])[..., :7]
    assert torch.allclose(mixer._convolve(x), expected.transpose(1, 2), atol=1e-6)


def test_convolution_knows_nothing_from_before_the_block() -> None:
    mixer = make_mixer()
    x = torch.randn(2, 5, mixer.config.conv_channels)
    first = mixer.conv_bias + mixer.conv_weight[:, -1] * x[:, 0]
    assert torch.allclose(mixer._convolve(x)[:, 0], first, atol=1e-6)
    assert torch.equal(mixer._convolve(x), mixer._convolve(x))  # no state is kept between calls


def test_mixer_is_its_formula() -> None:
    """Split order gate | x B C | dt; the gate before the norm; the norm over the whole width with eps 1e-5."""
    mixer, x, state = make_mixer(), torch.randn(2, 6, HIDDEN), torch.randn(2, 6, 5, 3)
    gate, xbc, dt = (x @ mixer.in_proj.weight.T).split([30, 30 + 12, 6], dim=-1)
    xbc = F.silu(mixer._convolve(xbc))
    inner, b, c = xbc[..., :30].view(2, 6, 6, 5), xbc[..., 30:36].view(2, 6, 2, 3), xbc[..., 36:].view(2, 6, 2, 3)
    y = scan_recurrent(inner, torch.log1p((dt + mixer.dt_bias).exp()), -mixer.A_log.exp(), b, c, mixer.D, state)
    y = y.reshape(2, 6, 30) * gate * torch.sigmoid(gate)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    assert torch.allclose(mixer(x, state), y @ mixer.out_proj.weight.T, atol=1e-5)


@pytest.mark.parametrize("slot", range(6))
def test_a_slot_changes_only_itself_and_those_behind(slot: int) -> None:
    mixer, x, state = make_mixer(), torch.randn(2, 6, HIDDEN), torch.randn(2, 6, 5, 3)
    changed = x.clone()
    changed[:, slot] += 1.0
    before, after = mixer(x, state), mixer(changed, state)
    assert torch.equal(before[:, :slot], after[:, :slot])
    assert (before[:, slot:] - after[:, slot:]).abs().amax(dim=(0, 2)).min() > 1e-4


def test_blocks_are_independent() -> None:
    mixer, x, state = make_mixer(), torch.randn(3, 6, HIDDEN), torch.randn(3, 6, 5, 3)
    together = mixer(x, state)
    for i in range(3):
        assert torch.allclose(together[i], mixer(x[i : i + 1], state[i : i + 1])[0], atol=1e-6)


def test_state_reaches_every_slot() -> None:
    mixer, x, state = make_mixer(), torch.randn(1, 6, HIDDEN), torch.randn(1, 6, 5, 3)
    zero = mixer(x, torch.zeros_like(state))
    assert torch.allclose(zero, mixer(x, None), atol=1e-6)
    assert (mixer(x, state) - zero).abs().amax(dim=(0, 2)).min() > 1e-4


def test_initial_values() -> None:
    """A from 1 to the number of heads, D = 1, no bias on dt: slow and fast heads from the start."""
    mixer = MambaMixer(HIDDEN, MambaConfig(heads=6, head_dim=5, state_dim=3, groups=2))
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 7.0))
    assert torch.equal(mixer.D, torch.ones(6)) and torch.equal(mixer.dt_bias, torch.zeros(6))

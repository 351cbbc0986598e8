"""Property test: fold is exact in fp64 for every geometry of a convolution."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deepcontrol import AGCConv1d, AGCConv2d, AGCConv3d, fold
from deepcontrol.convert.fold import _FoldedConv, window_means
from deepcontrol.nn.conv import _AGCConv

NEURONS = {1: AGCConv1d, 2: AGCConv2d, 3: AGCConv3d}


@st.composite
def neurons_and_inputs(draw: st.DrawFn) -> tuple[_AGCConv, Tensor]:
    d = draw(st.sampled_from([1, 2, 3]))

    def each(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return draw(st.tuples(*[values] * d))

    kernel, dilation = each(st.integers(1, 4)), each(st.integers(1, 3))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    stride, padding = each(st.integers(1, 3)), each(st.integers(0, 3))
    if draw(st.booleans()):
        stride, padding = (1,) * d, "same"
    size = each(st.integers(1, 9))
    reach = [dil * (k - 1) for k, dil in zip(kernel, dilation, strict=True)]
    pads = [(r // 2, r - r // 2) for r in reach] if padding == "same" else [(p, p) for p in padding]
    for side, r, (low, high) in zip(size, reach, pads, strict=True):
        assume(side + low + high > r)
        if mode == "reflect":
            assume(max(low, high) < side)
        if mode == "circular":
            assume(max(low, high) <= side)
    groups = draw(st.sampled_from([1, 2]))
    neuron = NEURONS[d](
        4, 6, kernel, stride, padding, dilation, groups,
        activation=draw(st.sampled_from(["relu", "none"])), padding_mode=mode,
    ).double()  # fmt: skip
    torch.manual_seed(draw(st.integers(0, 99)))
    for parameter in (neuron.gain, neuron.bias, neuron.mean_scale):
        nn.init.normal_(parameter)
    x = 3 + torch.randn(draw(st.sampled_from([1, 1, 2, 0])), 4, *size, dtype=torch.float64)
    return neuron.eval(), x


@settings(max_examples=120, deadline=None)
@given(neurons_and_inputs())
def test_folding_is_exact(pair: tuple[_AGCConv, Tensor]) -> None:
    neuron, x = pair
    layer = fold(neuron)
    assert isinstance(layer, _FoldedConv)
    torch.testing.assert_close(layer(x), neuron(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("stride", [1, 2])
def test_window_means_of_a_small_map(stride: int) -> None:
    """A map of 1..5, a kernel of 3 and one zero of padding on both sides."""
    x = torch.arange(1.0, 6.0).view(1, 1, 5)
    means = window_means(x, (3,), (stride,), (1,), (1,)).flatten()
    by_hand = {1: [10 / 5, 15 / 5, 14 / 5], 2: [6 / 3, 9 / 3, 6 / 3]}
    assert means.tolist() == pytest.approx(by_hand[stride])


def test_half_precision_sums_in_fp32() -> None:
    """The sum of ten thousand ones; in bf16 it would stop at 256."""
    x = torch.ones(1, 1, 100, 100, dtype=torch.bfloat16)
    for stride in (1, 2):
        means = window_means(x, (1, 1), (stride, stride), (0, 0), (1, 1))
        assert means.dtype == torch.float32
        assert means.item() == 1.0

"""The neuron fused with 2x2 pooling against the two ops one after the other."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from deepcontrol import AGCConv2d
from deepcontrol.nn import AGCConvPool2d, saved_bytes
from deepcontrol.ops import center_bias_act, center_bias_act_pool, dispatch, max_pool2x2

ACTIVATIONS = ["relu", "leaky_relu", "none", "gelu"]
SHAPES = [(2, 3, 4, 6), (1, 5, 7, 9), (2, 2, 2, 3), (1, 4, 16, 8)]


def inputs(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    v = torch.randn(shape, device=device)
    v = (v * 4).round() / 4  # rounded, to get ties
    if layout == "channels_last":
        v = v.to(memory_format=torch.channels_last)
    bias, scale = torch.randn(shape[1], device=device), torch.randn(shape[1], device=device)
    return [a.requires_grad_() for a in (v.to(dtype), bias, scale)]


def two_ops(v: Tensor, bias: Tensor, scale: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return max_pool2x2(center_bias_act(v, bias, scale, activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_two_ops(
    shape: tuple[int, ...], activation: str, layout: str, dtype: torch.dtype, device: str
) -> None:
    leaves = inputs(shape, layout, dtype, device)
    pooled, index = center_bias_act_pool(*leaves, activation)
    expected, expected_index = two_ops(*leaves, activation)
    assert torch.equal(pooled, expected)
    assert torch.equal(index, expected_index)
    assert pooled.stride() == expected.stride()
    g = torch.randn_like(pooled)
    grads = torch.autograd.grad(pooled, leaves, g)
    assert grads[0].stride() == leaves[0].stride()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(grads, torch.autograd.grad(expected, leaves, g), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives(activation: str) -> None:
    v = torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    p = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def pooled(*args: Tensor) -> Tensor:
        return center_bias_act_pool(*args, activation)[0]

    assert gradcheck(pooled, (v, *p))
    assert gradgradcheck(pooled, (v, *p))


@pytest.mark.parametrize("grad", [True, False])
def test_opcheck(grad: bool, device: str) -> None:
    pytest.importorskip("triton")
    dispatch.register_ops()
    leaves = [
        a.detach().requires_grad_(grad)
        for a in inputs((2, 3, 5, 4), "channels_last", torch.float32, device)
    ]
    torch.library.opcheck(torch.ops.deepcontrol.center_bias_act_pool, (*leaves, "relu"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compile(device: str) -> None:
    torch.compiler.reset()
    neuron = AGCConvPool2d(2, 3, 3, padding=1).to(device)
    x = torch.randn(2, 2, 6, 7, device=device)
    compiled = torch.compile(neuron, fullgraph=True)
    for a, b in zip(neuron(x), compiled(x), strict=True):
        torch.testing.assert_close(a, b)
    g = torch.randn_like(neuron(x)[0])
    leaves = list(neuron.parameters())
    grads = torch.autograd.grad(compiled(x)[0], leaves, g)
    for a, b in zip(grads, torch.autograd.grad(neuron(x)[0], leaves, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_neuron_saves_a_quarter_of_the_map() -> None:
    x = torch.randn(2, 3, 8, 8)
    neuron = AGCConvPool2d(3, 4, 3, padding=1)
    pooled, index = neuron(x)
    means = 2 * 4 * 4
    assert saved_bytes(neuron, x) == x.nbytes + pooled.nbytes + index.nbytes + means


def test_the_neuron_equals_agcconv2d_and_pooling() -> None:
    neuron = AGCConvPool2d(3, 4, 3, padding=1)
    plain = AGCConv2d(3, 4, 3, padding=1)
    plain.load_state_dict(neuron.state_dict())
    x = torch.randn(2, 3, 9, 8)
    for a, b in zip(neuron(x), max_pool2x2(plain(x)), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"3 channels.*\(2, 4, 9, 8\)"):
        neuron(torch.randn(2, 4, 9, 8))
    with pytest.raises(ValueError, match="at least 2x2"):
        AGCConvPool2d(3, 4, 3)(torch.randn(1, 3, 3, 8))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "activation"),
    [((2, 3, 4, 6), "relu"), ((1, 5, 5, 7), "leaky_relu"), ((1, 2, 3, 2), "none")],
    ids=str,
)
def test_kernels(shape: tuple[int, ...], activation: str, layout: str, device: str) -> None:
    kernels = pytest.importorskip("deepcontrol.ops.triton.agc_pool")
    leaves = inputs(shape, layout, torch.float32, device)
    v, bias, scale = (a.detach() for a in leaves)
    pooled, index, mean, _ = kernels.forward(v, bias, scale, activation)
    expected, expected_index = two_ops(*leaves, activation)
    torch.testing.assert_close(pooled, expected.detach(), rtol=1e-5, atol=1e-5)
    assert (index == expected_index).float().mean() > 0.9  # rounding may break ties differently
    g = torch.randn_like(pooled)
    size = (shape[2], shape[3])
    found = kernels.backward(
        g, pooled, expected_index, bias, scale, mean, size, activation, layout == "channels_last"
    )
    for a, b in zip(found, torch.autograd.grad(expected, leaves, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

"""First and second derivatives in fp64, and torch's opcheck of the registered ops."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from deepcontrol.ops import agc, center_bias_act, dispatch, gain_conv, reference
from deepcontrol.ops.activation import ACTIVATIONS

MAPS = [
    (1,), (2,), (7,), (1, 1), (1, 5), (2, 3), (3, 1), (3, 3),
    (1, 1, 1), (2, 2, 2), (1, 3, 2), (2, 1, 3), (),
]  # fmt: skip
SHAPES = [
    (n, c, *size) for (n, c), size in itertools.product([(1, 1), (1, 3), (2, 1), (2, 2)], MAPS)
]
assert len(SHAPES) >= 40


def maps(shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)


def filters(c: int, device: str = "cpu") -> Tensor:
    return torch.randn(c, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agc(shape: tuple[int, ...]) -> None:
    c = shape[1]
    inputs = (maps(shape), filters(c), filters(c), filters(c))
    assert gradcheck(agc, inputs)
    assert gradgradcheck(agc, inputs)


@pytest.mark.parametrize(
    ("shape", "activation"),
    [(shape, name) for i, shape in enumerate(SHAPES) for name in [list(ACTIVATIONS)[i % 5]]]
    + [((2, 2, 3, 2), name) for name in ACTIVATIONS],
    ids=str,
)
def test_center_bias_act(shape: tuple[int, ...], activation: str) -> None:
    c = shape[1]
    inputs = (maps(shape), filters(c), filters(c), activation)
    assert gradcheck(center_bias_act, inputs)
    assert gradgradcheck(center_bias_act, inputs)


CONVOLUTIONS = {
    "1d": ((2, 2, 6), (3, 2, 3), [1], [1], [1], 1),
    "1d strided": ((1, 2, 7), (2, 2, 2), [2], [0], [1], 1),
    "2d": ((2, 2, 4, 3), (3, 2, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    "2d grouped": ((1, 4, 3, 3), (4, 2, 2, 2), [1, 1], [1, 0], [1, 1], 2),
    "2d dilated, strided": ((1, 1, 7, 6), (2, 1, 3, 2), [2, 1], [2, 1], [2, 3], 1),
    "2d depthwise": ((2, 3, 3, 4), (3, 1, 3, 3), [1, 1], [1, 1], [1, 1], 3),
    "3d": ((1, 2, 3, 2, 3), (2, 2, 2, 1, 3), [1, 1, 1], [1, 0, 1], [1, 1, 1], 1),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gain_conv(case: str) -> None:
    x_shape, w_shape, *geometry = CONVOLUTIONS[case]
    inputs = (maps(x_shape), maps(w_shape), filters(w_shape[0]), *geometry)
    torch.testing.assert_close(gain_conv(*inputs), reference.gain_conv(*inputs))
    assert gradcheck(gain_conv, inputs)
    assert gradgradcheck(gain_conv, inputs)


def test_gradients_of_single_inputs() -> None:
    z, weight, bias, mean_scale = maps((2, 3, 4)), filters(3), filters(3), filters(3)
    for wanted in (z, weight, bias, mean_scale):
        args = [a if a is wanted else a.detach() for a in (z, weight, bias, mean_scale)]
        g = torch.randn(2, 3, 4, dtype=torch.float64)
        (got,) = torch.autograd.grad(agc(*args), wanted, g)
        (expected,) = torch.autograd.grad(reference.agc(*args), wanted, g)
        torch.testing.assert_close(got, expected)
        if wanted is not weight:
            args = [args[0], args[2], args[3]]
            (got,) = torch.autograd.grad(center_bias_act(*args), wanted, g)
            (expected,) = torch.autograd.grad(reference.center_bias_act(*args, "relu"), wanted, g)
            torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 2, 4, 3), (2, 1, 2, 2, 3), (0, 2, 3, 3)], ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [True, False])
def test_opcheck(
    shape: tuple[int, ...], grad: bool, dtype: torch.dtype, channels_last: bool, device: str
) -> None:
    pytest.importorskip("triton")
    dispatch.register_ops()
    c = shape[1]
    z = maps(shape, device).to(dtype).detach()
    if channels_last:
        z = z.movedim(1, -1).contiguous().movedim(-1, 1)
    z.requires_grad_(grad)
    params = [filters(c, device).float().detach().requires_grad_(grad) for _ in range(3)]
    torch.library.opcheck(torch.ops.deepcontrol.agc, (z, *params))
    for activation in ACTIVATIONS:
        op = torch.ops.deepcontrol.center_bias_act
        torch.library.opcheck(op, (z, *params[:2], activation, grad))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_fake_strides_are_real_strides(memory_format: torch.memory_format) -> None:
    pytest.importorskip("triton")
    dispatch.register_ops()
    z = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
    p = torch.randn(3)
    real = torch.ops.deepcontrol.agc(z, p, p, p)
    meta = torch.ops.deepcontrol.agc(*(a.to("meta") for a in (z, p, p, p)))
    assert [a.stride() for a in real] == [a.stride() for a in meta]
    assert [a.dtype for a in real] == [a.dtype for a in meta]

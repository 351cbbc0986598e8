"""Normalized filters: kernels, gradients and registered ops against the formula in fp64."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from deepcontrol.ops import dispatch, gain_conv, reference
from tests.ops.test_gradients import CONVOLUTIONS, filters, maps

NORM = math.sqrt(2)
SHAPES = [(5, 3, 3, 2), (1, 1, 1), (3, 7), (2, 5, 3, 1, 3), (4, 1, 3, 3), (2, 913, 3, 3)]


def exact_filters(weight: Tensor, gain: Tensor, norm: float) -> Tensor:
    """V = gamma c W / |W|, in fp64 and with torch's norm."""
    w = weight.double().flatten(1)
    w = norm * w / torch.linalg.vector_norm(w, dim=1, keepdim=True)
    return (gain.double()[:, None] * w).reshape(weight.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [1.0, NORM, 7.0])
def test_reference_is_the_formula(shape: tuple[int, ...], norm: float) -> None:
    weight, gain = maps(shape), filters(shape[0])
    scaled = reference.scaled_filters(weight, gain, torch.float64, norm)
    expected = exact_filters(weight, gain, norm)
    torch.testing.assert_close(scaled, expected, rtol=1e-14, atol=0)
    dscaled = torch.randn(shape, dtype=torch.float64)
    found = reference.scaled_filters_backward(weight, gain, dscaled, norm)
    autograd = torch.autograd.grad(expected, [weight, gain], dscaled)
    for a, b in zip(found, autograd, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


class TestKernels:
    @pytest.fixture(autouse=True)
    def _poison(self) -> Iterator[None]:
        """Fill the memory of torch.empty with NaN, so that unwritten elements show."""
        pytest.importorskip("triton")
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(before)

    # The filters of 913 x 3 x 3 are longer than the block of a program.
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("channels_last", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_match_the_reference(
        self, shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype, device: str
    ) -> None:
        from deepcontrol.ops.triton import gain as kernels

        weight, gain = torch.randn(shape, device=device), torch.randn(shape[0], device=device)
        if channels_last:
            weight = weight.movedim(1, -1).contiguous().movedim(-1, 1)
        assert kernels.supports(weight)
        scaled = kernels.scale(weight, gain, dtype, NORM)
        # Triton's interpreter cuts off where a device rounds.
        rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
        expected = exact_filters(weight, gain, NORM)
        torch.testing.assert_close(scaled.double(), expected, rtol=rounding, atol=0)
        assert scaled.stride() == weight.stride()
        assert scaled.dtype == dtype

        dscaled = torch.randn(shape, device=device).to(dtype)
        dweight, dgain = kernels.scale_backward(weight, gain, dscaled, NORM)
        exact = reference.scaled_filters_backward(
            weight.double(), gain.double(), dscaled.double(), NORM
        )
        for a, b in zip((dweight, dgain), exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        assert dweight.stride() == weight.stride()

    def test_half_precision_weights(self, device: str) -> None:
        from deepcontrol.ops.triton import gain as kernels

        weight = torch.randn(3, 5, 3, 3, device=device).bfloat16()
        gain = torch.randn(3, device=device).bfloat16()
        dscaled = torch.randn_like(weight)
        dweight, dgain = kernels.scale_backward(weight, gain, dscaled, NORM)
        doubles = (weight.double(), gain.double(), dscaled.double())
        exact = reference.scaled_filters_backward(*doubles, NORM)
        assert dweight.dtype == dgain.dtype == torch.bfloat16
        for a, b in zip((dweight, dgain), exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2**-7, atol=1e-3)

    def test_filters_of_zeros(self, device: str) -> None:
        from deepcontrol.ops.triton import gain as kernels

        weight = torch.randn(3, 2, 3, 3, device=device)
        weight[1] = 0
        gain = torch.randn(3, device=device)
        dscaled = torch.randn_like(weight)
        assert not kernels.scale(weight, gain, torch.float32, NORM)[1].any()
        found = kernels.scale_backward(weight, gain, dscaled, NORM)
        expected = reference.scaled_filters_backward(weight, gain, dscaled, NORM)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_filters_of_zeros_have_the_gradient_of_plain_filters() -> None:
    weight, gain = torch.zeros(2, 3, 3), torch.tensor([0.5, -2.0])
    weight[1] = torch.randn(3, 3)
    weight.requires_grad_()
    gain.requires_grad_()
    dscaled = torch.randn(2, 3, 3)
    scaled = reference.scaled_filters(weight, gain, torch.float32, NORM)
    assert not scaled[0].any()
    dweight, dgain = torch.autograd.grad(scaled, [weight, gain], dscaled)
    explicit = reference.scaled_filters_backward(weight, gain, dscaled, NORM)
    for found, found_gain in ((dweight, dgain), explicit):
        torch.testing.assert_close(found[0], 0.5 * dscaled[0])
        assert found_gain[0] == 0
        assert found.isfinite().all()
    torch.testing.assert_close(explicit[0], dweight)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gain_conv(case: str) -> None:
    x_shape, w_shape, *geometry = CONVOLUTIONS[case]
    inputs = (maps(x_shape), maps(w_shape), filters(w_shape[0]), *geometry, NORM)
    x, weight, gain = inputs[:3]
    expected = reference.conv(x, exact_filters(weight, gain, NORM), *geometry)
    torch.testing.assert_close(gain_conv(*inputs), expected)
    assert gradcheck(gain_conv, inputs)
    assert gradgradcheck(gain_conv, inputs)


def test_norm_must_be_positive() -> None:
    x, weight, gain = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.ones(4)
    for norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"positive filter_norm, or None, got {norm}"):
            gain_conv(x, weight, gain, (1, 1), (0, 0), (1, 1), 1, norm)


@pytest.mark.parametrize("norm", [None, 1.0, NORM])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [True, False])
def test_opcheck(
    norm: float | None, grad: bool, dtype: torch.dtype, channels_last: bool, device: str
) -> None:
    pytest.importorskip("triton")
    dispatch.register_ops()
    weight, gain = torch.randn(4, 3, 3, 2, device=device), torch.randn(4, device=device)
    if channels_last:
        weight = weight.to(memory_format=torch.channels_last)
    dscaled = torch.randn_like(weight).to(dtype)
    weight.requires_grad_(grad)
    gain.requires_grad_(grad)
    torch.library.opcheck(torch.ops.deepcontrol.scale_filters, (weight, gain, dtype, norm))
    backward = torch.ops.deepcontrol.scale_filters_backward
    torch.library.opcheck(backward, (weight.detach(), gain.detach(), dscaled, norm))

"""Normalized filters: kernels, gradients and registered ops against the formula in fp64."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from deepcontrol.ops import dispatch, gain_conv, reference
from deepcontrol.ops.reference import FilterNorm
from tests.ops.test_gradients import CONVOLUTIONS, filters, maps

NORM = FilterNorm(math.sqrt(2))
CENTERED = FilterNorm(math.sqrt(2), centered=True)
BOTH = pytest.mark.parametrize("norm", [NORM, CENTERED], ids=["normalized", "standardized"])
SHAPES = [(5, 3, 3, 2), (1, 1, 1), (3, 7), (2, 5, 3, 1, 3), (4, 1, 3, 3), (2, 913, 3, 3)]


def exact_filters(weight: Tensor, gain: Tensor, norm: FilterNorm) -> Tensor:
    """V = gamma c W / |W|, in fp64 and with torch's norm."""
    w = weight.double().flatten(1)
    if norm.centered:
        w = w - w.mean(1, keepdim=True)
    w = norm.norm * w / torch.linalg.vector_norm(w, dim=1, keepdim=True)
    return (gain.double()[:, None] * w).reshape(weight.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [FilterNorm(1.0), NORM, CENTERED, FilterNorm(7.0)], ids=str)
def test_reference_is_the_formula(shape: tuple[int, ...], norm: FilterNorm) -> None:
    if norm.centered and shape == (1, 1, 1):
        pytest.skip("a filter of one weight is 0 once it is centered")
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
    @BOTH
    def test_match_the_reference(
        self,
        shape: tuple[int, ...],
        channels_last: bool,
        dtype: torch.dtype,
        norm: FilterNorm,
        device: str,
    ) -> None:
        from deepcontrol.ops.triton import gain as kernels

        if norm.centered and shape == (1, 1, 1):
            pytest.skip("a filter of one weight is 0 once it is centered")
        weight, gain = torch.randn(shape, device=device), torch.randn(shape[0], device=device)
        if channels_last:
            weight = weight.movedim(1, -1).contiguous().movedim(-1, 1)
        assert kernels.supports(weight)
        scaled = kernels.scale(weight, gain, dtype, norm)
        # Triton's interpreter cuts off where a device rounds.
        rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
        expected = exact_filters(weight, gain, norm)
        torch.testing.assert_close(scaled.double(), expected, rtol=rounding, atol=1e-6)
        assert scaled.stride() == weight.stride()
        assert scaled.dtype == dtype

        dscaled = torch.randn(shape, device=device).to(dtype)
        dweight, dgain = kernels.scale_backward(weight, gain, dscaled, norm)
        exact = reference.scaled_filters_backward(
            weight.double(), gain.double(), dscaled.double(), norm
        )
        for a, b in zip((dweight, dgain), exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
        assert dweight.stride() == weight.stride()

    @BOTH
    def test_half_precision_weights(self, norm: FilterNorm, device: str) -> None:
        from deepcontrol.ops.triton import gain as kernels

        weight = torch.randn(3, 5, 3, 3, device=device).bfloat16()
        gain = torch.randn(3, device=device).bfloat16()
        dscaled = torch.randn_like(weight)
        dweight, dgain = kernels.scale_backward(weight, gain, dscaled, norm)
        doubles = (weight.double(), gain.double(), dscaled.double())
        exact = reference.scaled_filters_backward(*doubles, norm)
        assert dweight.dtype == dgain.dtype == torch.bfloat16
        for a, b in zip((dweight, dgain), exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2**-7, atol=1e-3)

    @BOTH
    def test_filters_of_zeros(self, norm: FilterNorm, device: str) -> None:
        from deepcontrol.ops.triton import gain as kernels

        weight = torch.randn(3, 2, 3, 3, device=device)
        weight[1] = 0
        gain = torch.randn(3, device=device)
        dscaled = torch.randn_like(weight)
        assert not kernels.scale(weight, gain, torch.float32, norm)[1].any()
        found = kernels.scale_backward(weight, gain, dscaled, norm)
        expected = reference.scaled_filters_backward(weight, gain, dscaled, norm)
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


@BOTH
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gain_conv(case: str, norm: FilterNorm) -> None:
    x_shape, w_shape, *geometry = CONVOLUTIONS[case]
    if norm.centered and math.prod(w_shape[1:]) == 1:
        pytest.skip("a filter of one weight is 0 once it is centered")
    x, weight, gain = maps(x_shape), maps(w_shape), filters(w_shape[0])

    def convolve(x: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
        return gain_conv(x, weight, gain, *geometry, norm)

    expected = reference.conv(x, exact_filters(weight, gain, norm), *geometry)
    torch.testing.assert_close(convolve(x, weight, gain), expected)
    assert gradcheck(convolve, (x, weight, gain))
    assert gradgradcheck(convolve, (x, weight, gain))


def test_norm_must_be_positive() -> None:
    x, weight, gain = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.ones(4)
    for norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"positive norm in filter_norm, got {norm}"):
            gain_conv(x, weight, gain, (1, 1), (0, 0), (1, 1), 1, FilterNorm(norm))


@pytest.mark.parametrize("norm", [(None, False), (1.0, False), (1.5, True)], ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [True, False])
def test_opcheck(
    norm: tuple[float | None, bool],
    grad: bool,
    dtype: torch.dtype,
    channels_last: bool,
    device: str,
) -> None:
    pytest.importorskip("triton")
    dispatch.register_ops()
    weight, gain = torch.randn(4, 3, 3, 2, device=device), torch.randn(4, device=device)
    if channels_last:
        weight = weight.to(memory_format=torch.channels_last)
    dscaled = torch.randn_like(weight).to(dtype)
    weight.requires_grad_(grad)
    gain.requires_grad_(grad)
    torch.library.opcheck(torch.ops.deepcontrol.scale_filters, (weight, gain, dtype, *norm))
    backward = torch.ops.deepcontrol.scale_filters_backward
    torch.library.opcheck(backward, (weight.detach(), gain.detach(), dscaled, *norm))

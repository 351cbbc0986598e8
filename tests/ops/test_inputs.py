"""Memory layouts are preserved, unusual inputs work, wrong inputs raise with their values."""

import pytest
import torch
from torch import Tensor

from deepcontrol.ops import agc, center_bias_act, gain_conv, reference
from deepcontrol.ops.activation import ACTIVATIONS


def channels_last(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device).movedim(1, -1).contiguous().movedim(-1, 1)


def layouts(device: str) -> dict[str, Tensor]:
    return {
        "contiguous": torch.randn(2, 3, 5, 7, device=device),
        "channels_last": channels_last(2, 3, 5, 7, device=device),
        "channels_last_3d": channels_last(2, 3, 5, 4, 7, device=device),
        "channels_last_1d": channels_last(2, 3, 5, device=device),
        "transposed": torch.randn(3, 2, 7, 5, device=device).transpose(2, 3).transpose(0, 1),
    }


@pytest.mark.parametrize("layout", layouts("cpu"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("upstream", ["like the input", "contiguous", "channels_last", "expanded"])
def test_strides_follow_the_input(layout: str, activation: str, upstream: str, device: str) -> None:
    z = layouts(device)[layout].requires_grad_()
    p = [torch.randn(3, device=device) for _ in range(3)]
    for y in (agc(z, *p), center_bias_act(z, *p[:2], activation)):
        assert y.stride() == z.stride()
        g = {
            "like the input": torch.randn_like(z),
            "contiguous": torch.randn(z.shape, device=device),
            "channels_last": channels_last(*z.shape, device=device),
            "expanded": torch.randn(z.shape[:2], device=device)
            .reshape(2, 3, *(1,) * (z.dim() - 2))
            .expand_as(z),
        }[upstream]
        (dz,) = torch.autograd.grad(y, z, g)
        assert dz.stride() == z.stride()


def odd_inputs(device: str) -> dict[str, Tensor]:
    return {
        "no samples": torch.randn(0, 3, 4, 4, device=device),
        "one position": torch.randn(2, 3, 1, 1, device=device),
        "no map": torch.randn(2, 3, device=device),
        "one channel": torch.randn(2, 1, 4, 5, device=device),
        "prime sizes": torch.randn(3, 5, 7, 13, device=device),
        "sliced": torch.randn(2, 6, 8, 10, device=device)[:, ::2, ::2, 1::3],
        "expanded over samples": torch.randn(1, 3, 4, 4, device=device).expand(5, 3, 4, 4),
        "expanded over positions": torch.randn(2, 3, 1, 1, device=device).expand(2, 3, 4, 4),
        "five map dimensions": torch.randn(1, 2, 2, 1, 3, 2, 2, device=device),
    }


@pytest.mark.parametrize("case", odd_inputs("cpu"))
def test_odd_inputs_match_the_reference(case: str, device: str) -> None:
    z = odd_inputs(device)[case].double().requires_grad_()
    p = [torch.randn(z.shape[1], device=device).double().requires_grad_() for _ in range(3)]
    pairs = [(agc(z, *p), reference.agc(z, *p))]
    pairs += [
        (center_bias_act(z, *p[:2], a), reference.center_bias_act(z, *p[:2], a))
        for a in ACTIVATIONS
    ]
    for y, expected in pairs:
        torch.testing.assert_close(y, expected)
        g = torch.randn_like(y)
        grads = torch.autograd.grad(y, [z, *p], g, allow_unused=True)
        expected_grads = torch.autograd.grad(expected, [z, *p], g, allow_unused=True)
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b)


def test_defaults_are_one_zero_one() -> None:
    z = torch.randn(2, 3, 4)
    one, zero = torch.ones(3), torch.zeros(3)
    torch.testing.assert_close(agc(z), agc(z, one, zero, one), rtol=0, atol=0)
    torch.testing.assert_close(agc(z), z - z.mean(-1, keepdim=True))


def test_input_is_not_written() -> None:
    v = torch.randn(2, 3, 4, 4)
    before = v.clone()
    for activation in ACTIVATIONS:
        center_bias_act(v, torch.randn(3), torch.randn(3), activation)
    agc(v, torch.randn(3), torch.randn(3), torch.randn(3))
    assert torch.equal(v, before)


P3, W = torch.ones(3), torch.ones(4, 3, 1, 1)
CONV = ([1, 1], [0, 0], [1, 1], 1)


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        (lambda: agc(torch.ones(2, 5, 4), P3, P3, P3), r"weight.*\(3,\).*\(2, 5, 4\).*5 channels"),
        (lambda: agc(torch.ones(2, 3, 4), P3, torch.ones(2), P3), r"bias.*\(2,\).*3 channels"),
        (lambda: agc(torch.ones(2, 3, 4), P3, P3, torch.ones(3, 1)), r"mean_scale.*\(3, 1\)"),
        (lambda: agc(torch.ones(2, 3, 4, dtype=torch.int64), P3, P3, P3), "int64"),
        (lambda: agc(torch.ones(3), P3, P3, P3), r"at least 2.*got 1: \(3,\)"),
        (lambda: agc(torch.ones(2, 3, 0, 4), P3, P3, P3), r"no positions.*\(2, 3, 0, 4\)"),
        (lambda: center_bias_act(torch.ones(2, 5, 4), P3, P3), r"bias.*5 channels"),
        (lambda: center_bias_act(torch.ones(2, 3, 4).byte(), P3, P3), "uint8"),
        (lambda: center_bias_act(torch.ones(3), P3, P3), r"at least 2.*got 1"),
        (lambda: center_bias_act(torch.ones(2, 3, 4), P3, P3, "tanh"), "'tanh'.*leaky_relu"),
        (lambda: gain_conv(torch.ones(1, 2, 5, 5), W, torch.ones(4), *CONV), "3 channels, got 2"),
        (lambda: gain_conv(torch.ones(1, 3, 5), W, torch.ones(4), *CONV), "4 dimensions, got 3"),
        (lambda: gain_conv(torch.ones(1, 3, 5, 5).int(), W, torch.ones(4), *CONV), "int32"),
        (lambda: gain_conv(torch.ones(1, 3, 5, 5).half(), W, torch.ones(4), *CONV), "float16"),
    ],
)
def test_wrong_inputs_are_named(call, numbers: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=numbers):
        call()

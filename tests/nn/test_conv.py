"""AGCConv computes the same function as convolution, AGC layer and activation."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from deepcontrol import (
    AGC1d,
    AGC2d,
    AGC3d,
    AGCConv1d,
    AGCConv2d,
    AGCConv3d,
    Quantile,
    TrimmedMean,
    WindowMean,
)
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.ops.activation import ACTIVATIONS

DIMENSIONS = {
    1: (AGCConv1d, nn.Conv1d, AGC1d),
    2: (AGCConv2d, nn.Conv2d, AGC2d),
    3: (AGCConv3d, nn.Conv3d, AGC3d),
}
GEOMETRIES = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": 2, "padding": 1, "dilation": 2, "groups": 2},
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 4, "padding": "same"},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2},
    {"kernel_size": 2, "padding": "same", "padding_mode": "replicate"},
]


class Separate(nn.Module):
    """Convolution without bias, AGC and activation as three layers with a neuron's weights."""

    def __init__(self, neuron: nn.Module, **geometry: object) -> None:
        super().__init__()
        _, conv, agc = DIMENSIONS[neuron.weight.dim() - 2]
        c_in, c_out = neuron.in_channels, neuron.out_channels
        self.conv = conv(c_in, c_out, bias=False, **geometry).double()
        self.agc = agc(c_out).double()
        self.activate = ACTIVATIONS[neuron.activation].apply
        self.conv.weight.data.copy_(neuron.weight)
        self.agc.weight.data.copy_(neuron.gain)
        self.agc.bias.data.copy_(neuron.bias)
        self.agc.mean_scale.data.copy_(neuron.mean_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(self.agc(self.conv(x)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own layer
@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_neuron_equals_separate_layers(d: int, geometry: dict, activation: str) -> None:
    if d == 3 and geometry.get("padding_mode") == "reflect":
        geometry = {**geometry, "padding": 1}  # the volume is too small for more
    neuron = DIMENSIONS[d][0](4, 6, activation=activation, **geometry).double()
    for parameter in (neuron.gain, neuron.bias, neuron.mean_scale):
        nn.init.normal_(parameter)
    layers = Separate(neuron, **geometry)
    size = {1: (11,), 2: (7, 8), 3: (5, 4, 6)}[d]
    x = torch.randn(2, 4, *size, dtype=torch.float64, requires_grad=True)
    y, expected = neuron(x), layers(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)

    g = torch.randn_like(y)
    ours = torch.autograd.grad(
        y, [x, neuron.weight, neuron.gain, neuron.bias, neuron.mean_scale], g
    )
    agc = layers.agc
    theirs = torch.autograd.grad(
        expected, [x, layers.conv.weight, agc.weight, agc.bias, agc.mean_scale], g
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("d", DIMENSIONS)
def test_is_a_convolution(d: int) -> None:
    neuron_type, conv_type, _ = DIMENSIONS[d]
    neuron = neuron_type(3, 8, 3, padding=1)
    assert isinstance(neuron, conv_type)
    parameters = inspect.signature(neuron_type).parameters
    assert list(parameters)[:8] == [
        "in_channels", "out_channels", "kernel_size", "stride",
        "padding", "dilation", "groups", "activation",
    ]  # fmt: skip
    positional = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == list(inspect.signature(conv_type).parameters)[:7]
    assert sorted(n for n, _ in neuron.named_parameters()) == [
        "bias", "gain", "mean_scale", "weight",
    ]  # fmt: skip
    assert "activation=relu" in repr(neuron)


def test_takes_maps_without_a_batch() -> None:
    neuron = AGCConv2d(3, 8, 3)
    x = torch.randn(3, 9, 9)
    assert torch.equal(neuron(x), neuron(x.unsqueeze(0)).squeeze(0))
    shapes = []
    neuron.register_forward_hook(lambda *args: shapes.append(tuple(args[2].shape)))
    neuron(x)
    assert shapes == [(8, 7, 7)]  # called once, with the output that the caller gets


def test_no_samples() -> None:
    neuron = AGCConv2d(3, 8, 3)
    x = torch.randn(0, 3, 9, 9, requires_grad=True)
    y = neuron(x)
    y.sum().backward()
    assert y.shape == (0, 8, 7, 7)
    assert all(not p.grad.any() for p in neuron.parameters())


@pytest.mark.parametrize("gain", [0.0, -1.5, 1e-30, -1e-30])
def test_gain_oracle(gain: float) -> None:
    """gamma * dgamma = <W, dW> for any gamma; at 0 gamma still has a gradient."""
    neuron = AGCConv2d(3, 4, 3).double()
    nn.init.constant_(neuron.gain, gain)
    nn.init.uniform_(neuron.bias, 0.5, 1.0)
    nn.init.normal_(neuron.mean_scale)
    layers = Separate(neuron, kernel_size=3)
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    g = torch.randn(2, 4, 6, 7, dtype=torch.float64)
    neuron(x).backward(g)
    layers(x).backward(g)
    assert all(p.grad.isfinite().all() for p in neuron.parameters())
    inner = (neuron.weight * neuron.weight.grad).flatten(1).sum(1)
    torch.testing.assert_close(neuron.gain * neuron.gain.grad, inner, rtol=1e-12, atol=0)
    torch.testing.assert_close(neuron.gain.grad, layers.agc.weight.grad, rtol=1e-10, atol=1e-12)
    assert neuron.gain.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(1, 4, 5, 5), "expected 3 channels, got 4"),
        (torch.randn(5, 5), "expected 4-D input, or 3-D without a batch, got 2-D"),
        (torch.randn(4, 5, 5), r"expected 3 channels, got 4 in the input of shape \(4, 5, 5\)"),
        (torch.ones(1, 3, 5, 5, dtype=torch.int32), "int32"),
        (
            torch.ones(1, 3, 5, 5, dtype=torch.float64),
            "float32 like the weights, got torch.float64",
        ),
    ],
)
def test_wrong_inputs_are_named(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AGCConv2d(3, 8, 3, padding=1, padding_mode="reflect")(x)


def test_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match=r"'tanh'.*relu, leaky_relu, silu, gelu, none"):
        AGCConv2d(3, 8, 3, activation="tanh")


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.ReLU, "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.LeakyReLU, "leaky_relu"),
        (nn.LeakyReLU(), "leaky_relu"),
        (nn.SiLU, "silu"),
        (nn.GELU(), "gelu"),
        (nn.Identity, "none"),
        (nn.Identity(), "none"),
        (None, "none"),
        ("gelu", "gelu"),
    ],
)
def test_activation_as_name_class_or_instance(activation: object, name: str) -> None:
    neuron = AGCConv2d(3, 8, 3, activation=activation)
    assert neuron.activation == name
    expected = AGCConv2d(3, 8, 3, activation=name)
    expected.load_state_dict(neuron.state_dict())
    x = torch.randn(1, 3, 6, 6)
    assert torch.equal(neuron(x), expected(x))


@pytest.mark.parametrize(
    "activation",
    [nn.LeakyReLU(0.2), nn.GELU("tanh"), nn.Tanh, nn.Tanh(), nn.PReLU(), torch.relu, 3],
)
def test_activation_that_cannot_be_fused(activation: object) -> None:
    with pytest.raises(ValueError, match=r'cannot fuse.*activation="none".*after'):
        AGCConv2d(3, 8, 3, activation=activation)


def test_bias_is_part_of_the_neuron() -> None:
    assert AGCConv2d(3, 8, 3, bias=True).bias is not None
    with pytest.raises(ValueError, match=r"AGCConv2d does not support bias=False.*requires_grad_"):
        AGCConv2d(3, 8, 3, bias=False)
    with pytest.raises(TypeError, match="positional"):
        AGCConv2d(3, 8, 3, 1, 0, 1, 1, False)  # Conv2d's eighth argument is bias


def with_batchnorm(neuron: nn.Module) -> nn.Module:
    """A neuron and a BatchNorm in evaluation mode, both with random parameters."""
    bn = nn.BatchNorm2d(neuron.out_channels)
    for parameter in (neuron.gain, neuron.bias, neuron.mean_scale, bn.weight, bn.bias):
        nn.init.normal_(parameter)
    nn.init.normal_(bn.running_mean)
    nn.init.uniform_(bn.running_var, 0.5, 2.0)
    return nn.Sequential(neuron, bn).eval()


def _mean_square(z: Tensor) -> Tensor:
    return z.square().mean((2, 3), keepdim=True)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("background", ["mean", "median"])
def test_padding_under_autocast_on_a_cpu(mode: str, background: str) -> None:
    """CPU autocast pads with "reflect" and "replicate" in fp32."""
    neuron = AGCConv2d(4, 4, 3, padding=1, padding_mode=mode, background=background)
    x = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = neuron(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), neuron(x), rtol=0.05, atol=0.05)
    y.sum().backward()


class TestBatchNormFusers:
    """torch's fusers raise or return the same function: none is wrong in silence."""

    def test_fuse_conv_bn_eval_is_right_without_activation(self) -> None:
        model = with_batchnorm(AGCConv2d(3, 8, 3, activation="none"))
        x = torch.randn(2, 3, 9, 9)
        fused = fuse_conv_bn_eval(*model)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "gelu"])
    def test_fuse_conv_bn_eval_refuses_an_activation(self, activation: str) -> None:
        model = with_batchnorm(AGCConv2d(3, 8, 3, activation=activation))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(NotImplementedError, match=f"AGCConv2d with activation='{activation}'"):
            fuse_conv_bn_eval(*model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])

    @pytest.mark.parametrize("background", ["median", WindowMean(3), TrimmedMean(0.2)], ids=str)
    def test_fuse_conv_bn_eval_is_right_with_other_backgrounds(self, background: Any) -> None:
        model = with_batchnorm(AGCConv2d(3, 8, 3, activation="none", background=background))
        nn.init.normal_(model[1].weight)
        x = torch.randn(2, 3, 9, 9)
        torch.testing.assert_close(fuse_conv_bn_eval(*model)(x), model(x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("background", [Quantile(0.3), _mean_square])
    def test_fuse_conv_bn_eval_refuses_backgrounds_that_do_not_scale(self, background: Any) -> None:
        """A negative scale turns the order of a map around."""
        model = with_batchnorm(AGCConv2d(3, 8, 3, activation="none", background=background))
        with pytest.raises(NotImplementedError, match="background does not scale"):
            fuse_conv_bn_eval(*model)

    def test_fuse_conv_bn_eval_refuses_a_pooling(self) -> None:
        model = with_batchnorm(AGCConvPool2d(3, 8, 3, activation="none"))
        with pytest.raises(NotImplementedError, match=r"AGCConvPool2d.*pooling"):
            fuse_conv_bn_eval(*model)

    @pytest.mark.parametrize("d", [1, 3])
    def test_fuse_conv_bn_eval_in_other_dimensions(self, d: int) -> None:
        neuron = DIMENSIONS[d][0](3, 8, 3).eval()
        bn = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[d](8).eval()
        with pytest.raises(NotImplementedError, match=f"AGCConv{d}d"):
            fuse_conv_bn_eval(neuron, bn)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    @pytest.mark.parametrize("activation", ["relu", "none"])
    def test_quantization_fuse_modules(self, activation: str) -> None:
        from torch.ao.quantization import fuse_modules

        model = with_batchnorm(AGCConv2d(3, 8, 3, activation=activation))
        with pytest.raises((AssertionError, NotImplementedError), match="AGCConv2d"):
            fuse_modules(model, ["0", "1"])

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
    @pytest.mark.parametrize("activation", ["relu", "none"])
    def test_fx_optimization_fuse(self, activation: str) -> None:
        from torch.fx.experimental.optimization import fuse

        model = with_batchnorm(AGCConv2d(3, 8, 3, activation=activation))
        x = torch.randn(2, 3, 9, 9)
        torch.testing.assert_close(fuse(model)(x), model(x), rtol=1e-4, atol=1e-5)

    def test_other_assignments_are_allowed(self) -> None:
        neuron = AGCConv2d(3, 8, 3)
        neuron.bias = nn.Parameter(torch.ones(8))
        neuron.weight = nn.Parameter(torch.zeros(8, 3, 3, 3))
        assert torch.equal(neuron(torch.randn(1, 3, 5, 5)), torch.ones(1, 8, 3, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients(dtype: torch.dtype) -> None:
    """Compare the neuron in half precision with itself in fp64, on positive inputs.

    Gradient maps are rounded before the convolution's backward. Centering makes their mean zero,
    and its rounding error adds up over positive inputs: about 1% in bf16.
    """
    neuron = AGCConv2d(16, 16, 3, padding=1, activation="none").to(dtype)
    with torch.no_grad():
        neuron.gain.normal_(1.0, 0.3)
    exact = copy.deepcopy(neuron).double()
    x = torch.rand(2, 16, 32, 32).to(dtype).requires_grad_()
    x_exact = x.detach().double().requires_grad_()
    g = torch.randn(2, 16, 32, 32).to(dtype)
    neuron(x).backward(g)
    exact(x_exact).backward(g.double())
    limit = 4 * torch.finfo(dtype).eps
    pairs = {"input": (x, x_exact)}
    pairs |= {n: (p, exact.get_parameter(n)) for n, p in neuron.named_parameters()}
    for name, (ours, theirs) in pairs.items():
        assert ours.grad.dtype == dtype
        error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < limit, (name, error.item())


def test_gain_gradient_is_summed_in_fp32() -> None:
    """A bf16 sum of <W, dV> over 32768 equal taps would stop at 256."""
    neuron = AGCConv2d(32768, 1, 1, activation="none").bfloat16()
    nn.init.constant_(neuron.weight, 1.0)
    nn.init.zeros_(neuron.mean_scale)
    x = torch.ones(1, 32768, 1, 2, dtype=torch.bfloat16)
    neuron(x).backward(torch.tensor([[[[1.0, 0.0]]]], dtype=torch.bfloat16))
    assert neuron.gain.grad.item() == 32768


@pytest.mark.parametrize("name", ["gain", "bias", "mean_scale"])
@pytest.mark.parametrize("neuron", [AGCConv2d, AGCConvPool2d])
def test_parameter_of_the_wrong_shape(neuron: type[AGCConv2d], name: str) -> None:
    layer = neuron(3, 4, 3, padding=1)
    setattr(layer, name, nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=rf"{name} has shape \(1,\)"):
        layer(torch.randn(1, 3, 6, 6))

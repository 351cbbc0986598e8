"""AGCConvTranspose computes the same as transposed convolution, AGC layer and activation."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.fusion import fuse_conv_bn_eval

from deepcontrol import (
    AGC1d,
    AGC2d,
    AGC3d,
    AGCConv2d,
    AGCConvTranspose1d,
    AGCConvTranspose2d,
    AGCConvTranspose3d,
    WindowMean,
    fold,
    he_init_,
    param_groups,
    set_noise_,
)
from deepcontrol.convert import calibrate
from deepcontrol.nn import SharedMeans, saved_bytes
from deepcontrol.ops import gain_conv_transpose, reference
from deepcontrol.ops.activation import ACTIVATIONS
from deepcontrol.ops.background import Background
from deepcontrol.ops.reference import FilterNorm
from tests.compiling import assert_compiles_once

DIMENSIONS = {
    1: (AGCConvTranspose1d, nn.ConvTranspose1d, AGC1d, (7,)),
    2: (AGCConvTranspose2d, nn.ConvTranspose2d, AGC2d, (5, 4)),
    3: (AGCConvTranspose3d, nn.ConvTranspose3d, AGC3d, (3, 3, 4)),
}
GEOMETRIES = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 2},
    {"kernel_size": 3, "padding": 1, "dilation": 2},
    {"kernel_size": 1},
    {"kernel_size": 2, "stride": 3, "output_padding": 2},
    {"kernel_size": 3, "stride": 1, "padding": 2, "groups": 2},
]


def randomize_(neuron: nn.Module) -> nn.Module:
    for parameter in (neuron.gain, neuron.bias, neuron.mean_scale):
        nn.init.normal_(parameter)
    return neuron


def separate(neuron: nn.Module, **geometry: object) -> nn.Sequential:
    """Transposed convolution without bias, AGC and activation, with a neuron's parameters."""
    _, conv, agc, _ = DIMENSIONS[neuron.weight.dim() - 2]
    layers = nn.Sequential(
        conv(neuron.in_channels, neuron.out_channels, bias=False, **geometry),
        agc(neuron.out_channels),
    ).to(neuron.weight)
    with torch.no_grad():
        layers[0].weight.copy_(neuron.weight)
        for name, own in (("weight", "gain"), ("bias", "bias"), ("mean_scale", "mean_scale")):
            getattr(layers[1], name).copy_(getattr(neuron, own))
    return layers


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_neuron_equals_separate_layers(d: int, geometry: dict, activation: str) -> None:
    layer, _, _, size = DIMENSIONS[d]
    neuron = randomize_(layer(4, 6, activation=activation, **geometry).double())
    layers = separate(neuron, **geometry)
    x = torch.randn(2, 4, *size, dtype=torch.float64, requires_grad=True)
    y, expected = neuron(x), ACTIVATIONS[activation].apply(layers(x))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(y)
    own = [x, neuron.weight, neuron.gain, neuron.bias, neuron.mean_scale]
    agc = layers[1]
    others = [x, layers[0].weight, agc.weight, agc.bias, agc.mean_scale]
    ours, theirs = (torch.autograd.grad(out, of, g) for out, of in ((y, own), (expected, others)))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("filter_norm", [None, FilterNorm(1.7), FilterNorm(1.7, True)], ids=str)
def test_derivatives_of_the_op(groups: int, filter_norm: FilterNorm | None) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    inputs = (random(2, 4, 3, 2), random(4, 3, 3, 2), random(3 * groups))
    geometry = ([2, 1], [1, 0], [1, 0], [1, 2], groups, filter_norm)
    torch.testing.assert_close(
        gain_conv_transpose(*inputs, *geometry), reference.gain_conv_transpose(*inputs, *geometry)
    )

    def convolve(x: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
        return gain_conv_transpose(x, weight, gain, *geometry)

    assert gradcheck(convolve, inputs)
    assert gradgradcheck(convolve, inputs)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_second_derivatives_of_the_layer(activation: str) -> None:
    neuron = randomize_(AGCConvTranspose2d(2, 3, 2, stride=2, activation=activation).double())
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(neuron, (x,))


@pytest.mark.parametrize("gain", [0.0, -1.5, 1e-30])
def test_gain_oracle(gain: float) -> None:
    """gamma * dgamma = <W, dW> over each output channel; at 0 gamma still has a gradient."""
    neuron = randomize_(AGCConvTranspose2d(4, 6, 3, stride=2, groups=2).double())
    nn.init.constant_(neuron.gain, gain)
    nn.init.uniform_(neuron.bias, 0.5, 1.0)
    y = neuron(torch.randn(2, 4, 5, 5, dtype=torch.float64))
    y.backward(torch.randn_like(y))
    products = reference.swap_channels(neuron.weight * neuron.weight.grad, 2).flatten(1).sum(1)
    torch.testing.assert_close(neuron.gain * neuron.gain.grad, products, rtol=1e-10, atol=0)
    assert neuron.gain.grad.abs().min() > 0


@pytest.mark.parametrize("groups", [1, 2])
def test_weight_norm_starts_as_nearly_the_same_function(groups: int) -> None:
    torch.manual_seed(0)
    neuron = AGCConvTranspose2d(64, 32, 4, 2, 1, groups=groups, weight_norm=True)
    filters = reference.swap_channels(neuron.weight, groups)
    norms = filters.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.mean().item(), neuron.filter_norm.norm, rtol=0.05, atol=0)
    x = torch.randn(2, 64, 8, 8)
    y = neuron(x)
    with torch.no_grad():
        neuron.weight.mul_(3.0)  # has no effect
    torch.testing.assert_close(neuron(x), y, rtol=1e-4, atol=1e-5)


def test_he_preserves_the_variance() -> None:
    torch.manual_seed(0)
    neuron = AGCConvTranspose2d(256, 128, 4, stride=2, padding=1, activation="none")
    assert neuron(torch.randn(4, 256, 16, 16)).var().item() == pytest.approx(1.0, rel=0.1)
    he_init_(neuron)
    assert neuron(torch.randn(4, 256, 16, 16)).var().item() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_saves_its_input_and_means(dtype: torch.dtype, groups: int) -> None:
    up = AGCConvTranspose2d(16, 8, 2, stride=2, groups=groups)
    model = nn.Sequential(up, nn.Conv2d(8, 4, 1)).to(dtype)
    x = torch.randn(2, 16, 6, 5, dtype=dtype)
    output = 2 * 8 * 12 * 10 * dtype.itemsize  # saved once, as the input of the next layer
    assert saved_bytes(model, x) == x.nbytes + output + 2 * 8 * 4
    plain = AGCConvTranspose2d(16, 8, 2, stride=2, activation="none").to(dtype)
    assert saved_bytes(plain, x) == x.nbytes + 2 * 8 * 4


def test_output_size_and_maps_without_a_batch() -> None:
    neuron = randomize_(AGCConvTranspose2d(3, 4, 3, stride=2, padding=1))
    wide = AGCConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=(1, 0))
    wide.load_state_dict(neuron.state_dict())
    x = torch.randn(2, 3, 5, 5)
    assert neuron(x).shape == (2, 4, 9, 9)
    for size in ((10, 9), torch.Size([2, 4, 10, 9])):
        assert torch.equal(neuron(x, output_size=size), wide(x))
    assert torch.equal(neuron(x[0], (10, 9)), neuron(x[:1], (10, 9))[0])
    with pytest.raises(ValueError, match="requested an output size"):
        neuron(x, output_size=(11, 9))


def test_autocast_and_memory_formats() -> None:
    neuron = randomize_(AGCConvTranspose2d(8, 4, 2, stride=2))
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = neuron(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), neuron(x), rtol=0.05, atol=0.05)
    y.backward(torch.randn_like(y))
    assert all(p.grad.dtype == torch.float32 for p in neuron.parameters())
    last = copy.deepcopy(neuron).to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        last(x.to(memory_format=torch.channels_last)), neuron(x), rtol=1e-4, atol=1e-5
    )


def test_is_a_transposed_convolution() -> None:
    neuron = AGCConvTranspose2d(16, 8, 3, 2, 1, 1, 2)
    assert isinstance(neuron, nn.ConvTranspose2d)
    assert (neuron.output_padding, neuron.groups) == ((1, 1), 2)
    assert [n for n, _ in neuron.named_parameters()] == ["weight", "bias", "gain", "mean_scale"]
    assert "output_padding=(1, 1)" in repr(neuron)
    assert "activation=relu" in repr(neuron)
    assert [len(group["params"]) for group in param_groups(neuron, 1e-4)] == [1, 3]


def test_state_dict_of_the_model_before_conversion() -> None:
    neuron, conv = AGCConvTranspose2d(4, 3, 2), nn.ConvTranspose2d(4, 3, 2)
    with pytest.warns(UserWarning, match="Load it before the conversion"):
        neuron.load_state_dict(conv.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "same"}, "takes a number as padding.*output_padding"),
        ({"padding": ((0, 1), (0, 1))}, "takes a number as padding"),
        ({"bias": False}, "AGCConvTranspose2d does not support bias=False"),
        ({"padding_mode": "reflect"}, "zeros"),
    ],
)
def test_wrong_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AGCConvTranspose2d(3, 8, 3, **options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(1, 4, 5, 5), "expected 3 channels, got 4"),
        (torch.randn(5, 5), "expected 4-D input, or 3-D without a batch, got 2-D"),
        (torch.ones(1, 3, 5, 5, dtype=torch.int32), "int32"),
        (torch.ones(1, 3, 5, 5, dtype=torch.float64), "float32 like the weights"),
    ],
)
def test_wrong_inputs_are_named(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AGCConvTranspose2d(3, 8, 3)(x)


@pytest.mark.parametrize("name", ["gain", "bias", "mean_scale"])
def test_parameter_of_the_wrong_shape(name: str) -> None:
    layer = AGCConvTranspose2d(3, 4, 2)
    setattr(layer, name, nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=rf"{name} has shape \(1,\)"):
        layer(torch.randn(1, 3, 6, 6))


def test_one_position_warns() -> None:
    with pytest.warns(UserWarning, match="AGCConvTranspose2d got maps of one position"):
        AGCConvTranspose2d(3, 4, 1)(torch.randn(1, 3, 1, 1))


def test_batchnorm_fusers() -> None:
    bn = nn.BatchNorm2d(4).eval()
    nn.init.normal_(bn.running_mean)
    nn.init.uniform_(bn.weight, 0.5, 2.0)
    neuron = randomize_(AGCConvTranspose2d(3, 4, 2, stride=2, activation="none")).eval()
    x = torch.randn(2, 3, 5, 5)
    fused = fuse_conv_bn_eval(neuron, bn, transpose=True)
    torch.testing.assert_close(fused(x), bn(neuron(x)), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="AGCConvTranspose2d with activation='relu'"):
        fuse_conv_bn_eval(AGCConvTranspose2d(3, 4, 2).eval(), bn, transpose=True)


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_fold_is_exact(d: int, geometry: dict, batch: int) -> None:
    layer, _, _, size = DIMENSIONS[d]
    neuron = randomize_(layer(4, 6, **geometry).double())
    x = 3 + torch.randn(batch, 4, *size, dtype=torch.float64)
    folded = fold(neuron)
    assert type(folded).__name__ == f"FoldedConvTranspose{d}d"
    torch.testing.assert_close(folded(x), neuron(x), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(folded(x[0]), neuron(x[0]), rtol=1e-11, atol=1e-11)


def test_fold_of_small_maps_with_a_wide_padding() -> None:
    """Taps that leave out positions at both borders, and more than the map has."""
    for size, padding, kernel in ((4, 3, 5), (3, 2, 4), (2, 2, 5), (1, 1, 3)):
        neuron = randomize_(AGCConvTranspose1d(2, 3, kernel, padding=padding).double())
        x = torch.randn(2, 2, size, dtype=torch.float64)
        torch.testing.assert_close(fold(neuron)(x), neuron(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ["relu", "none"])
def test_fold_and_calibrate_take_output_size(activation: str) -> None:
    neuron = randomize_(AGCConvTranspose2d(3, 4, 3, 2, 1, activation=activation).double())
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    y = neuron(x, output_size=(10, 9))
    torch.testing.assert_close(fold(neuron)(x, output_size=(10, 9)), y, rtol=1e-11, atol=1e-11)
    nn.init.zeros_(neuron.mean_scale)
    plain = fold(neuron)
    assert not any("Folded" in type(m).__name__ for m in plain.modules())
    torch.testing.assert_close(plain(x, output_size=(10, 9)), neuron(x, output_size=(10, 9)))
    nn.init.ones_(neuron.mean_scale)
    same = x[:1].expand(2, -1, -1, -1)  # one image: its own mean is the average
    torch.testing.assert_close(calibrate(neuron, [same])(same), neuron(same))


def test_tiles_share_the_mean_of_their_image() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        AGCConv2d(3, 4, 3, stride=2, padding=1), AGCConvTranspose2d(4, 2, 2, stride=2)
    ).double()
    image = torch.randn(1, 3, 64, 32, dtype=torch.float64)
    with torch.no_grad(), SharedMeans(model) as shared:
        measuring = True
        while measuring:
            upper = shared(image[:, :, :36], interior=((0, 32), (0, 32)))
            lower = shared(image[:, :, 28:], interior=((4, 36), (0, 32)))
            measuring = shared.end_pass()
        tiled = torch.cat([upper[:, :, :32], lower[:, :, 4:]], 2)
    torch.testing.assert_close(tiled, model(image), rtol=1e-10, atol=1e-10)


def test_per_sample_gradients() -> None:
    neuron = randomize_(AGCConvTranspose2d(3, 2, 2, stride=2).double())
    parameters = dict(neuron.named_parameters())
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64)

    def loss(given: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(neuron, given, (sample.unsqueeze(0),)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        alone = torch.autograd.grad(loss(parameters, sample), list(parameters.values()))
        for a, b in zip(found.values(), alone, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.slow
def test_exports_with_dynamic_sizes() -> None:
    neuron = randomize_(AGCConvTranspose2d(3, 4, 3, stride=2, padding=1))
    for model in (neuron.eval(), fold(neuron)):
        dims = {0: torch.export.Dim("n"), 2: torch.export.Dim("h", min=3)}
        program = torch.export.export(model, (torch.randn(2, 3, 6, 5),), dynamic_shapes=(dims,))
        x = torch.randn(3, 3, 9, 5)
        torch.testing.assert_close(program.module()(x), neuron(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiles_once_for_all_batches() -> None:
    model = nn.Sequential(AGCConvTranspose2d(4, 6, 2, stride=2), nn.Conv2d(6, 2, 3))
    assert_compiles_once(model, (4, 6, 6), "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_cuda_agrees_with_the_cpu_and_saves_bits(layout: torch.memory_format) -> None:
    neuron = randomize_(AGCConvTranspose2d(16, 8, 2, stride=2))
    peer = copy.deepcopy(neuron).cuda().to(memory_format=layout)
    x = torch.randn(2, 16, 32, 32)
    g = torch.randn(2, 8, 64, 64)
    there = x.cuda().to(memory_format=layout)
    y = neuron(x)
    torch.testing.assert_close(peer(there).cpu(), y, rtol=1e-2, atol=1e-2)
    y.backward(g)
    peer(there).backward(g.cuda())
    for a, b in zip(peer.parameters(), neuron.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=2e-2, atol=2e-2 * b.grad.abs().max())
    assert saved_bytes(peer, there) == there.nbytes + 2 * 8 * 4 + y.numel() // 8


@pytest.mark.parametrize("background", [WindowMean(3), "median", lambda z: z.amin((2, 3), True)])
@pytest.mark.parametrize("output_size", [None, (10, 10)])
def test_other_backgrounds(background: Background, output_size: tuple[int, int] | None) -> None:
    neuron = AGCConvTranspose2d(
        4, 6, 3, stride=2, padding=1, activation="leaky_relu", background=background
    )
    neuron = randomize_(neuron).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    plain = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, bias=False).double()
    plain.weight = neuron.weight
    norm = AGC2d(6, background=background).double()
    norm.weight, norm.bias, norm.mean_scale = neuron.gain, neuron.bias, neuron.mean_scale
    expected = nn.functional.leaky_relu(norm(plain(x, output_size)))
    torch.testing.assert_close(neuron(x, output_size), expected)


def test_noise_in_training_only() -> None:
    neuron = set_noise_(AGCConvTranspose2d(4, 6, 2, stride=2), 0.1)
    x = torch.randn(1, 4, 5, 5)
    assert not torch.equal(neuron(x), neuron(x))
    assert torch.equal(neuron.eval()(x), neuron(x))

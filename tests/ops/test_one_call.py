"""A neuron of a single sample as one convolution call, with a stand-in for cuDNN's on a CPU."""

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import conv2d
from torch.utils.flop_counter import FlopCounterMode

from deepcontrol import AGCConv2d, fold
from deepcontrol.nn import AGCConvPool2d
from deepcontrol.ops import one_call, reference, replay
from deepcontrol.ops.activation import unpack_relu_mask
from deepcontrol.ops.reference import FilterNorm

kernels = pytest.importorskip("deepcontrol.ops.triton.one_call")

# Channels, filters, size, kernel and stride. Channels of several blocks; maps of one row or column.
LAYERS = [
    (8, 16, (5, 7), 3, 1),
    (3, 8, (16, 32), 3, 1),
    (80, 4, (12, 40), 3, 1),
    (520, 2, (2, 3), 3, 1),
    (8, 8, (1, 6), 3, 1),
    (8, 8, (6, 1), 3, 1),
    (16, 8, (9, 4), 1, 1),
    (16, 8, (9, 5), 1, 2),
    (40, 3, (70, 90), 1, 1),
]


def layer(
    c: int, f: int, size: tuple[int, int], kernel: int, layout: torch.memory_format, device: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return x in bf16, and weight and gain, bias, mean_scale in fp32."""
    x = torch.randn(1, c, *size, device=device).bfloat16().to(memory_format=layout)
    weight = torch.randn(f, c, kernel, kernel, device=device).to(memory_format=layout)
    return x, weight, [*torch.randn(3, f, device=device)]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_mean_is_that_of_the_convolution(
    shape: tuple[int, int, tuple[int, int], int, int], layout: torch.memory_format, device: str
) -> None:
    c, f, size, kernel, stride = shape
    x, weight, (gain, beta, lam) = layer(c, f, size, kernel, layout, device)
    window = kernels.Window.of(x, (stride, stride))
    sums, mask = kernels.input_sums(x, window, kernel > 1)
    assert mask is None
    for norm in (None, FilterNorm(1.5), FilterNorm(1.5, centered=True)):
        scaled, mean, bias = kernels.scale_with_mean(
            weight, gain, beta, lam, x, window, sums, torch.bfloat16, norm
        )
        assert scaled.stride() == weight.stride()
        wanted = reference.scaled_filters(weight, gain, torch.bfloat16, norm)
        torch.testing.assert_close(scaled, wanted, rtol=2**-7, atol=1e-3)
        # With the rounded filters, as the convolution has them.
        v = conv2d(x.double(), scaled.double(), None, stride, kernel // 2)
        exact = v.mean((2, 3))
        torch.testing.assert_close(mean.double(), exact, rtol=1e-5, atol=1e-5)
        wanted = (beta - lam * exact[0]).bfloat16()
        torch.testing.assert_close(bias, wanted, rtol=2**-7, atol=1e-5)  # a unit in the last place
    folded = kernels.scale_with_mean(scaled, None, beta, lam, x, window, sums, torch.bfloat16)
    assert folded[0] is None
    torch.testing.assert_close(folded[1], mean)
    assert folded[2].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(8, 5, 7), (64, 16, 33), (72, 12, 40), (512, 3, 5)], ids=str)
def test_bits_of_the_input(shape: tuple[int, int, int], device: str) -> None:
    x = torch.randn(1, *shape, device=device).relu_().bfloat16()
    x = x.to(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = torch.nan  # kept by ReLU, and so is its gradient
    _, mask = kernels.input_sums(x, kernels.Window.of(x, (1, 1)), True, with_mask=True)
    assert mask.numel() == x.numel() // 8
    assert torch.equal(unpack_relu_mask(mask, x) != 0, ~(x <= 0))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Run folded layers as one call on a CPU, too.

    Returns:
        A list to which the bias of each call is appended, except in trials with NaN.
    """
    biases: list[Tensor] = []
    with_cudnn = one_call.conv_relu

    def conv_relu(x: Tensor, weight: Tensor, bias: Tensor, *geometry: object) -> Tensor:
        if not bias.isnan().all():
            biases.append(bias)
        if x.is_cuda:
            return with_cudnn(x, weight, bias, *geometry)  # type: ignore[arg-type]
        return conv2d(x, weight, bias, *geometry).relu_()  # type: ignore[call-overload]

    monkeypatch.setattr(one_call, "conv_relu", conv_relu)
    monkeypatch.setattr(one_call, "uses_kernels", lambda z: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(replay, "RECORDED_DEVICES", ["cpu", "cuda"])
    return biases


def folded_layer(
    device: str, make: Callable[..., nn.Module] = AGCConv2d, **options: object
) -> nn.Module:
    """Return a neuron in bf16 with random parameters, folded."""
    neuron = make(8, 16, 3, padding=1, **options)
    for parameter in (neuron.gain, neuron.bias, neuron.mean_scale):
        nn.init.normal_(parameter)
    return fold(neuron).to(device, torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]


def image(device: str, samples: int = 1, width: int = 10) -> Tensor:
    x = torch.randn(samples, 8, 6, width, device=device).bfloat16()
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{}, {"weight_norm": True}, {"weight_standardization": True}])
def test_folded_neuron(options: dict[str, bool], calls: list[Tensor], device: str) -> None:
    model = folded_layer(device, **options)
    exact = in_fp64(model)
    for _ in range(4):  # the launches are recorded, then repeated
        x = image(device)
        y = model(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y.double(), exact(x.double()), rtol=0.02, atol=0.02)
    assert len(calls) == 3  # ReLU is tried at the second call of a shape
    assert len({bias.data_ptr() for bias in calls}) == 3  # an own bias at each call


def in_fp64(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def test_a_nan_is_kept(calls: list[Tensor], device: str) -> None:
    model, x = folded_layer(device), image(device)
    for broken in (False, True, False, True):
        x[0, 0, 2, 3] = torch.nan if broken else 1.0
        assert model(x).isnan().all() == broken  # the mean of x is part of every bias


def test_relu_that_hides_nan_is_not_used(
    calls: list[Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hides_nan(x: Tensor, weight: Tensor, bias: Tensor, *geometry: object) -> Tensor:
        return conv2d(x, weight, bias, *geometry).nan_to_num_(0.0).relu_()  # type: ignore[call-overload]

    monkeypatch.setattr(one_call, "conv_relu", hides_nan)
    model, x = folded_layer(device), image(device)
    exact = in_fp64(model)(x.double())
    for _ in range(3):
        torch.testing.assert_close(model(x).double(), exact, rtol=0.02, atol=0.02)
    x[0, 0, 2, 3] = torch.nan
    assert model(x).isnan().all()


def test_relu_without_an_engine_is_not_used(
    calls: list[Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*operands: object) -> Tensor:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    monkeypatch.setattr(one_call, "conv_relu", no_engine)
    model, x = folded_layer(device), image(device)
    exact = in_fp64(model)(x.double())
    for _ in range(3):  # the second call of a shape tries cuDNN's ReLU
        torch.testing.assert_close(model(x).double(), exact, rtol=0.02, atol=0.02)


def test_relu_is_tried_for_each_alignment(
    calls: list[Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of a batch may differ in it, and torch then looks for another engine of cuDNN."""

    def hides_nan(x: Tensor, weight: Tensor, bias: Tensor, *geometry: object) -> Tensor:
        y = conv2d(x, weight, bias, *geometry).relu_()  # type: ignore[call-overload]
        return y if x.data_ptr() % 32 == 0 else y.nan_to_num_(0.0)

    monkeypatch.setattr(one_call, "conv_relu", hides_nan)
    model = folded_layer(device)
    batch = torch.randn(2, 8, 5, 9, device=device).bfloat16()
    batch = batch.to(memory_format=torch.channels_last)
    assert batch[1:].data_ptr() % 32 == 16
    for _ in range(3):
        model(batch[:1])
    batch[1, 0, 2, 3] = torch.nan
    for _ in range(3):
        assert model(batch[1:]).isnan().all()


@pytest.mark.parametrize("activation", ["leaky_relu", "silu", "none"])
def test_other_activations_have_the_computed_bias(
    activation: str, calls: list[Tensor], device: str
) -> None:
    model = folded_layer(device, activation=activation)
    x = image(device)
    wanted = in_fp64(model)(x.double())
    torch.testing.assert_close(model(x).double(), wanted, rtol=0.02, atol=0.02)
    assert not calls  # only ReLU is part of the call


def test_images_of_all_sizes_are_not_tried(calls: list[Tensor], device: str) -> None:
    """A trial takes a convolution and waits for the device."""
    model = folded_layer(device)
    trials = []
    with patch.object(one_call, "_keeps_nan", side_effect=trials.append):
        for width in range(20, 30):
            model(image(device, width=width))
    assert not trials
    assert not calls


def test_a_capture_leaves_the_trial_to_a_later_call(calls: list[Tensor], device: str) -> None:
    """A captured call cannot read the result of a trial."""
    model = folded_layer(device)
    with patch.object(one_call, "_is_captured", return_value=True):
        for _ in range(3):
            model(image(device))
    assert not calls
    model(image(device))
    assert len(calls) == 1


def test_tracers_and_counters_see_aten_ops(calls: list[Tensor], device: str) -> None:
    model, x = folded_layer(device), image(device)
    traced = make_fx(model, tracing_mode="real")(x)
    other = image(device)
    torch.testing.assert_close(traced(other), model(other), rtol=0.02, atol=0.02)
    for _ in range(3):
        with FlopCounterMode(display=False) as counter:
            model(x)
        assert counter.get_total_flops() >= 2 * 6 * 10 * 16 * 8 * 9


def test_pooling_follows_the_call(calls: list[Tensor], device: str) -> None:
    model = folded_layer(device, AGCConvPool2d)
    x = image(device)
    model(x)
    pooled, index = model(x)
    wanted, _ = in_fp64(model)(x.double())
    torch.testing.assert_close(pooled.double(), wanted, rtol=0.02, atol=0.02)
    assert index.dtype == torch.uint8
    assert len(calls) == 1


def test_cases_that_are_not_one_call(
    calls: list[Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = folded_layer(device), image(device)
    model(image(device, samples=2))
    model(x.clone().requires_grad_()).sum().backward()
    for parameter in (model.bias, model.mean_scale):
        parameter.requires_grad_()
        assert model(x).requires_grad
        parameter.requires_grad_(False)
    model(x.contiguous())
    model.float()(x.float())
    model.bfloat16()
    geometry = (model.stride, model.padding, model.dilation, model.groups)
    with torch.autocast(device, torch.float16):  # on CUDA torch has no mixed ops for bf16 then
        operands = (x, model.weight, model.bias, model.mean_scale)
        assert not one_call.folds_to_one_call(*operands, *geometry)
    torch.export.export(model, (x,), strict=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model(x)
    monkeypatch.undo()  # and the fixture's
    assert not calls


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "groups", "supported"),
    [
        (3, 1, 1, 1, 1, True),
        (1, 1, 0, 1, 1, True),
        (1, 2, 0, 1, 1, True),
        (3, 2, 1, 1, 1, False),
        (3, 1, 0, 1, 1, False),
        (3, 1, 2, 2, 1, False),
        (3, 1, 1, 1, 2, False),
        (1, 1, 1, 1, 1, False),
        (5, 1, 2, 1, 1, False),
    ],
)
def test_supported_convolutions(
    kernel: int, stride: int, padding: int, dilation: int, groups: int, supported: bool
) -> None:
    geometry = ((a, a) for a in (kernel, stride, padding, dilation))
    assert one_call.is_supported(*geometry, groups) == supported
    assert not one_call.is_supported((kernel,), (stride,), (padding,), (dilation,), groups)

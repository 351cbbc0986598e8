"""Bytes of the tensors that networks save for backward."""

import itertools
import sys

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.nn import AGCConvPool2d, saved_bytes
from deepcontrol.ops import replay
from deepcontrol.workbench.models import ResNet50

N, H, W = 4, 12, 10
WIDTHS = [3, 8, 16, 16, 8, 8]
CLASSES = 5


def chain(block) -> nn.Sequential:  # type: ignore[no-untyped-def]
    blocks = [block(a, b) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*blocks, nn.Conv2d(WIDTHS[-1], CLASSES, 1))


def neuron(a: int, b: int) -> nn.Module:
    return AGCConv2d(a, b, 3, padding=1)


def no_norm(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())


def batchnorm(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


def drop_in(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), AGC2d(b), nn.ReLU())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agc_convs_save_their_inputs_and_means(dtype: torch.dtype) -> None:
    x = torch.randn(N, WIDTHS[0], H, W, dtype=dtype)
    size = dtype.itemsize
    inputs = [N * c * H * W * size for c in WIDTHS[:-1]]
    means = [N * c * 4 for c in WIDTHS[1:]]
    classifier = N * WIDTHS[-1] * H * W * size  # its input is the output of the last AGCConv2d
    expected = sum(inputs) + sum(means) + classifier
    ours = saved_bytes(chain(neuron).to(dtype), x)
    others = {
        name: saved_bytes(chain(block).to(dtype), x)
        for name, block in {"BatchNorm": batchnorm, "no normalization": no_norm}.items()
    }
    assert ours == expected, (
        f"five AGCConv2d save {ours} bytes, expected {expected}; "
        f"BatchNorm saves {others['BatchNorm']}, no normalization {others['no normalization']}"
    )
    assert ours == others["no normalization"] + sum(means)
    assert ours < 0.6 * others["BatchNorm"]


def test_autocast_saves_bf16_copies() -> None:
    x = torch.randn(N, WIDTHS[0], H, W)
    model = chain(neuron)
    with torch.autocast("cpu", torch.bfloat16):
        saved = saved_bytes(model, x)
    maps = sum(N * c * H * W * 2 for c in WIDTHS)
    means = sum(N * c * 4 for c in WIDTHS[1:])
    # A bf16 copy of all filters: scaled by the gain in AGCConv2d, plain in the last convolution.
    filters = 2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d))
    assert saved == maps + means + filters


def test_filters_larger_than_the_input_are_not_saved_under_autocast() -> None:
    """At batch size 1 the weights of deep layers would take most of the memory."""
    layer = AGCConv2d(16, 8, 3, padding=1, activation="none")
    for side, saves_filters in ((8, False), (9, True)):  # 8 x 9 weights per channel
        x = torch.randn(1, 16, side, side)
        with torch.autocast("cpu", torch.bfloat16):
            saved = saved_bytes(layer, x)
        least = x.numel() * 2 + 8 * 4
        assert saved == least + saves_filters * layer.weight.numel() * 2


@pytest.mark.parametrize("unfused", [False, True])
def test_recomputed_filters_give_the_same_gradients(
    unfused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    # SiLU runs as two autograd functions.
    layer = AGCConv2d(6, 8, 3, padding=1, activation="silu" if unfused else "relu")
    x, g = torch.randn(1, 6, 5, 4), torch.randn(1, 8, 5, 4)
    found = []
    for saves in (False, True):
        # Plans are made once per shape.
        monkeypatch.setattr(replay, "_replays", {})
        for module in ("neuron", "gain_conv"):
            name = f"deepcontrol.ops.{module}"  # ops.gain_conv is the function
            monkeypatch.setattr(sys.modules[name], "saves_scaled", lambda *_, saves=saves: saves)
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(inputs)
        y.backward(g.to(y.dtype))
        found.append([inputs.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_resnet50_saves_less_than_batchnorm_at_batch_size_1() -> None:
    """The filters of its deep layers are larger than their maps."""
    x = torch.randn(1, 3, 128, 128)
    sizes = {}
    for norm in ("agc", "bn", "none"):
        with torch.autocast("cpu", torch.bfloat16):
            sizes[norm] = saved_bytes(ResNet50(10, norm), x)
    assert sizes["agc"] < 0.3 * sizes["bn"]
    assert sizes["agc"] < 0.4 * sizes["none"]


def test_smooth_activations_save_one_more_map() -> None:
    x = torch.randn(N, 3, H, W)
    sizes = {
        name: saved_bytes(AGCConv2d(3, 8, 3, padding=1, activation=name), x)
        for name in ("relu", "leaky_relu", "none", "silu", "gelu")
    }
    own_map = N * 8 * H * W * 4
    least = N * 3 * H * W * 4 + N * 8 * 4
    assert sizes == {
        "none": least,
        "relu": least + own_map,  # the output, which the next layer saves as its input anyway
        "leaky_relu": least + own_map,
        "silu": least + own_map,  # the convolution's output, which no other layer saves
        "gelu": least + own_map,
    }


def test_agc_layer_saves_its_input_like_batchnorm() -> None:
    x = torch.randn(N, WIDTHS[0], H, W)
    inputs = sum(N * c * H * W * 4 for c in WIDTHS)
    own = sum(N * c * H * W * 4 for c in WIDTHS[1:])
    means = sum(N * c * 4 for c in WIDTHS[1:])
    assert saved_bytes(chain(drop_in), x) == inputs + own + means


def test_meta_tensors_give_the_same_count() -> None:
    x = torch.randn(N, WIDTHS[0], H, W)
    with torch.device("meta"):
        empty = chain(neuron)
    assert saved_bytes(empty, x.to("meta")) == saved_bytes(chain(neuron), x)


@pytest.mark.parametrize("neuron", [AGCConv2d, AGCConvPool2d])
def test_backward_frees_saved_inputs(neuron: type[AGCConv2d]) -> None:
    """Otherwise the memory would grow during the backward of a deep network."""
    x = 2 * torch.randn(2, 3, 8, 8, requires_grad=True)
    saved_input = StorageWeakRef(x.untyped_storage())
    y = neuron(3, 4, 3, padding=1)(x)
    del x
    assert not saved_input.expired()
    loss = (y[0] if isinstance(y, tuple) else y).sum()
    loss.backward()
    assert saved_input.expired()  # although the graph is still alive
    assert loss.grad_fn is not None


@pytest.mark.parametrize("neuron", [AGCConv2d, AGCConvPool2d])
def test_frozen_filters_save_no_input(neuron: type[AGCConv2d]) -> None:
    layer, x = neuron(3, 4, 3, padding=1), torch.randn(2, 3, 8, 8)
    layer.weight.requires_grad_(False)
    layer.gain.requires_grad_(False)
    saved_input = StorageWeakRef(x.untyped_storage())
    y = layer(x)
    del x
    assert saved_input.expired()
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    assert layer.bias.grad is not None
    assert layer.mean_scale.grad is not None

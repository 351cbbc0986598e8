"""Means derived from the operands of a convolution, without reading its output."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGCConv2d
from deepcontrol.nn import AGCConvPool2d, unit_init_
from deepcontrol.ops import max_unpool2x2
from deepcontrol.ops.gain_conv import ConvOperands
from deepcontrol.workbench.models import SegNet

pytest.importorskip("triton")

from deepcontrol.ops import replay
from deepcontrol.ops.triton import agc, agc_pool, blocks
from deepcontrol.ops.triton.launch import Launch, launch
from deepcontrol.ops.triton.tiling import tile_maps

gain_conv = importlib.import_module("deepcontrol.ops.gain_conv")  # ops.gain_conv is a function

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def laid_out(a: Tensor, layout: str) -> Tensor:
    return a.contiguous(memory_format=FORMATS[layout])


def launched(result: Tensor, launches: list[Launch]) -> Tensor:
    for each in launches:
        launch(*each, result.device)
    return result


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Fill the memory of torch.empty with NaN, so that unwritten elements show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


SHAPES = [  # shape of x, number of filters
    ((2, 3, 5, 7), 4),
    ((1, 20, 6, 4), 10),  # more channels than a program takes, more filters than a block
    ((2, 4, 1, 9), 3),
    ((1, 2, 5, 1), 2),
    ((1, 4, 300, 2), 4),  # a border read in several steps
]


@pytest.mark.parametrize("layout", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "filters"), SHAPES, ids=str)
def test_sums_of_a_convolution(
    shape: tuple[int, ...], filters: int, dtype: torch.dtype, layout: str, device: str
) -> None:
    x = laid_out(torch.randn(shape, device=device) + 0.5, layout).to(dtype)
    weight = laid_out(torch.randn(filters, shape[1], 3, 3, device=device), layout).to(dtype)
    map_sums = launched(*blocks.sum_launches(x, tile_maps(x, False, None, 0), None))
    exact = torch.conv2d(x.double(), weight.double(), padding=1).sum((2, 3))
    swapped = (
        weight.transpose(2, 3).contiguous().transpose(2, 3)
    )  # the same values in another layout
    for block_f, taps in ((4, weight), (16, weight), (4, swapped)):
        partial, last = blocks.window_mean_launch(ConvOperands(x, taps, None), map_sums, block_f)
        found = launched(partial, [last]).sum(2).flatten(1)[:, :filters]
        assert (found - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("layout", list(FORMATS))
@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (1, 8, 24, 32), (2, 20, 25, 21)], ids=str)
def test_kernels_store_the_sums_of_their_output(
    shape: tuple[int, ...], layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gain_conv, "MIN_ELEMENTS", 0)
    v = laid_out(torch.randn(shape, device=device), layout).bfloat16()
    bias, lam = torch.randn(2, shape[1], device=device)
    with uninitialized_is_nan():
        y, *_, y_sums = agc.forward(v, bias, lam, "leaky_relu", consumer_ratio=1.0)
        pooled, *_, pooled_sums = agc_pool.forward(v, bias, lam, "leaky_relu", consumer_ratio=1.0)
    for maps, stored in ((y, y_sums), (pooled, pooled_sums)):
        assert stored is not None
        exact = maps.double().sum((2, 3))
        found = stored.sum(2).flatten(1)[:, : shape[1]]
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


class Stages(nn.Module):
    """An encoder stage and a decoder stage, as in SegNet."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(AGCConv2d(1, 4, 3, padding=1), AGCConvPool2d(4, 6, 3, padding=1))
        self.up = nn.Sequential(AGCConv2d(6, 6, 3, padding=1), AGCConv2d(6, 3, 3, padding=1))

        for neuron in (*self.down, self.up[0]):
            neuron.consumer_ratio = 1.0

    def forward(self, x: Tensor) -> Tensor:
        pooled, index = self.down(x)
        return self.up(max_unpool2x2(pooled, index, x.shape[2:]))


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    g = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin()
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], g)]


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Run the kernels in the interpreter and derive means wherever possible, also in fp32.

    Returns:
        A list to which each derived mean is appended.
    """
    for name in ("agc", "gain_conv", "pool"):
        module = importlib.import_module(f"deepcontrol.ops.{name}")
        monkeypatch.setattr(module, "uses_kernels", lambda z, traced=False: True)
    monkeypatch.setattr(gain_conv, "MIN_ELEMENTS", 0)
    for name in ("gain_conv", "neuron"):
        module = importlib.import_module(f"deepcontrol.ops.{name}")
        monkeypatch.setattr(module, "HALF_TYPES", (torch.float32,))
    replay._replays.clear()  # plans of calls before, with the other settings
    means: list[Tensor] = []

    window_mean_launch = blocks.window_mean_launch

    def counted(*args: Any) -> Any:
        partial_sums, last = window_mean_launch(*args)
        means.append(partial_sums)
        return partial_sums, last

    monkeypatch.setattr(blocks, "window_mean_launch", counted)
    return means


# An even size, and an odd one, where the pooling leaves out a row and a column.
@pytest.mark.parametrize("size", [(24, 32), (25, 43)], ids=str)
@pytest.mark.parametrize("layout", list(FORMATS))
def test_neurons_in_a_row(
    size: tuple[int, int], layout: str, request: pytest.FixtureRequest
) -> None:
    model = Stages().to(memory_format=FORMATS[layout])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = laid_out(torch.randn(2, 1, *size), layout).requires_grad_()
    expected = trained(model, x)
    means = request.getfixturevalue("derived")
    found = trained(model, x)
    assert len(means) == 4
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_small_maps_take_a_single_pass(derived: list[Tensor]) -> None:
    """One program reads a small map only once, so deriving its mean gains nothing."""
    model = Stages()
    model(torch.randn(1, 1, 8, 8))
    assert len(derived) == 1  # the fused pooling has no single pass


def double(module: nn.Module, inputs: object, output: Any) -> Any:
    if isinstance(output, tuple):
        return 2 * output[0], output[1]
    return 2 * output


def double_in_place(module: nn.Module, inputs: object, output: Any) -> None:
    (output[0] if isinstance(output, tuple) else output).detach().mul_(2)


@pytest.mark.parametrize("change", [double, double_in_place])
@pytest.mark.parametrize("changed", [("down", 0), ("down", 1), ("up", 0)], ids=str)
def test_stored_sums_are_dropped_if_a_map_changes(
    change: Callable[..., Any], changed: tuple[str, int], request: pytest.FixtureRequest
) -> None:
    """If a hook changes a map, the mean is still that of the convolution's output."""
    model, x = Stages(), torch.randn(1, 1, 24, 32)
    getattr(model, changed[0])[changed[1]].register_forward_hook(change)
    with torch.no_grad():
        expected = model(x)
        means = request.getfixturevalue("derived")
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert len(means) == 3


def test_stored_sums_are_freed(derived: list[Tensor]) -> None:
    model, x = Stages(), torch.randn(1, 1, 24, 32)
    y = model(x)
    assert len(derived) == 4
    del y
    assert not len(gain_conv._stored)


def test_in_inference_mode(derived: list[Tensor]) -> None:
    model, x = Stages(), torch.randn(1, 1, 24, 32)
    expected = model(x)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_only_for_half_types(dtype: torch.dtype) -> None:
    x, v = torch.empty(1, 1, 4, 4, dtype=dtype), torch.empty(1, 4, 1 << 12, 1 << 12, dtype=dtype)
    filters = torch.empty(4, 1, 3, 3, dtype=dtype)
    assert not gain_conv.derives_mean(v, ConvOperands(x, filters, None))
    half = ConvOperands(x.half(), filters.half(), None)
    assert gain_conv.derives_mean(v.half(), half)
    assert not gain_conv.derives_mean(v.half()[:, :3], half)  # x has too many channels for that


@pytest.mark.gpu
def test_segnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients with derived means are as close to fp32 as those with read means."""
    model = SegNet(19, width=0.5).cuda().to(memory_format=torch.channels_last)
    x = laid_out(torch.randn(4, 3, 256, 512, device="cuda"), "channels_last")
    unit_init_(model, x)
    calls = []

    window_mean_launch = blocks.window_mean_launch

    def counted(*args: Any) -> Any:
        calls.append(args)
        return window_mean_launch(*args)

    monkeypatch.setattr(blocks, "window_mean_launch", counted)

    def trained(worth: int, half: bool) -> list[Tensor]:
        monkeypatch.setattr(gain_conv, "MIN_ELEMENTS", worth)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            y = model(x)
        loss = y.float().square().mean()
        return [y, *torch.autograd.grad(loss, list(model.parameters()))]

    exact, read = trained(1 << 60, half=False), trained(1 << 60, half=True)
    assert not calls
    known = trained(1 << 19, half=True)
    assert len(calls) > 10

    def errors(found: list[Tensor]) -> Tensor:
        """Return the relative error of each gradient; deep in the network some are all rounding."""
        pairs = zip(found, exact, strict=True)
        return torch.stack([(a.double() - b.double()).norm() / b.double().norm() for a, b in pairs])

    ratios = (errors(known) + 0.01) / (errors(read) + 0.01)
    assert ratios.median() < 1.1
    assert ratios.max() < 2

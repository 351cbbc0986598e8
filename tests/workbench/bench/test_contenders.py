"""The networks under comparison, and the check of AGC's loss and gradients."""

import copy
import os

import pytest
import torch
from torch import nn

from deepcontrol.nn import AGCConv2d, AGCConv3d, saved_bytes
from deepcontrol.workbench.bench.cases import CONTENDERS
from deepcontrol.workbench.bench.contenders import (
    OneLiner,
    build,
    kernels_off,
    precision,
    randomize_controls_,
    stock_pooling_,
    to_plain_pytorch_,
)
from deepcontrol.workbench.bench.results import CONTENDER_NAMES
from deepcontrol.workbench.models import SegNet, UNet3d
from deepcontrol.workbench.models.segmentation import BytePool, ByteUnpool

NETWORKS = {
    2: (lambda: SegNet(5, width=0.125), (2, 3, 37, 50)),
    3: (lambda: UNet3d(1, 3, width=0.125), (2, 1, 32, 32, 32)),
}


def test_stock_pooling_gives_the_same_output() -> None:
    ours = SegNet(5, width=0.125, norm="none")
    stock = stock_pooling_(copy.deepcopy(ours))
    kinds = {type(m) for m in stock.modules()}
    assert {nn.MaxPool2d, nn.MaxUnpool2d} <= kinds
    assert not {BytePool, ByteUnpool} & kinds
    x = torch.randn(2, 3, 37, 50)  # odd sizes, where unpooling needs output_size
    torch.testing.assert_close(stock(x), ours(x), rtol=0, atol=0)


@pytest.mark.parametrize("dims", NETWORKS)
def test_one_liner_equals_agc(dims: int) -> None:
    make, shape = NETWORKS[dims]
    ours = make()
    randomize_controls_(ours)
    line = to_plain_pytorch_(copy.deepcopy(ours)).double()
    ours.double()
    assert not any(isinstance(m, (AGCConv2d, AGCConv3d)) for m in line.modules())
    x = torch.randn(shape, dtype=torch.float64)
    expected, y = ours(x), line(x)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    expected.backward(g)
    y.backward(g)
    neurons = [m for m in ours.modules() if isinstance(m, (AGCConv2d, AGCConv3d))]
    lines = [m for m in line.modules() if isinstance(m, OneLiner)]
    assert len(lines) == len(neurons) > 0
    for neuron, written in zip(neurons, lines, strict=True):
        torch.testing.assert_close(written.conv.weight.grad, neuron.weight.grad)
        pairs = ((written.w, neuron.gain), (written.l, neuron.mean_scale), (written.b, neuron.bias))
        for a, b in pairs:
            torch.testing.assert_close(a.grad.flatten(), b.grad)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_peers_of_segnet_are_stock_pytorch(contender: str) -> None:
    model = build("segnet", contender, width=0.125)
    ours = any(isinstance(m, (BytePool, ByteUnpool)) for m in model.modules())
    assert ours == (contender in ("agc", "bn-byte-pool"))
    assert any(isinstance(m, AGCConv2d) for m in model.modules()) == (contender == "agc")
    assert contender in CONTENDER_NAMES


def test_unknown_network_is_refused() -> None:
    with pytest.raises(ValueError, match="no network is called 'vgg'"):
        build("vgg", "agc")


def test_segnet_saves_less_than_stock() -> None:
    """AGC saves less than half of BatchNorm's bytes for backward, for one bf16 image.

    It also saves less than no normalization, which keeps pooled maps and int64 indices.
    """
    saved = {}
    for contender in ("agc", "bn", "none"):
        with torch.device("meta"):
            model = build("segnet", contender).to(torch.bfloat16)
            x = torch.empty(1, 3, 256, 512, dtype=torch.bfloat16)
        model.to(memory_format=torch.channels_last)
        saved[contender] = saved_bytes(model, x.to(memory_format=torch.channels_last))
    assert saved["agc"] < 0.43 * saved["bn"]
    assert saved["agc"] < 0.69 * saved["none"]


def test_precision_is_restored() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    with precision("fp32"):
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) == before


def test_kernels_off_restores_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DEEPCONTROL_KERNELS"
    monkeypatch.delenv(name, raising=False)
    with kernels_off():
        assert os.environ[name] == "off"
    assert name not in os.environ
    monkeypatch.setenv(name, "on")
    with kernels_off():
        assert os.environ[name] == "off"
    assert os.environ[name] == "on"

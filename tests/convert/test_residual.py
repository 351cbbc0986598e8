"""Residual additions: which layers end a branch, with torch.fx and with an example."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from deepcontrol import AGC2d, branch_gain, to_agc
from deepcontrol.convert import start
from deepcontrol.convert.dataflow import Dataflow, trace_dataflow
from deepcontrol.convert.residual import Additions, find_additions
from deepcontrol.nn.init import CENTERING_GAIN
from tests.convert.networks import Residual, SqueezeExcite, UNet, row

IMAGE = (1, 8, 12, 12)


def conv(channels: int = 8, out: int = 8, **options: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1, bias=False, **options)


class Block(nn.Module):
    """The layers that the blocks below use in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = conv(), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return out


class Basic(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.branch(x) + x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        out += x
        return functional.relu_(out)


class Method(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x.add(self.branch(x)))


class Function(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(torch.add(self.branch(x), x))


class Downsample(Block):
    """A bottleneck as in resnet-d: pooling, convolution and norm in the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv3, self.bn3 = conv(stride=2), nn.BatchNorm2d(8)
        self.shortcut = nn.Sequential(
            nn.AvgPool2d(2), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn3(self.conv3(self.relu(self.branch(x))))
        return self.relu(out + self.shortcut(x))


class PaddedShortcut(Block):
    """The first ResNets on CIFAR: a strided slice, padded with zeros."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.pad(x[:, :4, ::1, ::1], (0, 0, 0, 0, 2, 2))
        return self.relu(self.branch(x) + y)


class PreActivation(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.relu(self.bn2(self.conv1(self.relu(self.bn1(x))))))
        return x + out


class Gated(Block):
    """Squeeze-and-excitation, layer scale, dropout and a random drop of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        gate = self.excite(self.relu(self.squeeze(out.mean((2, 3), keepdim=True)))).sigmoid()
        out = self.drop(self.scale * (out * gate))
        if self.training:
            keep = out.new_empty((out.shape[0], 1, 1, 1)).bernoulli_(0.8)
            out = out.div(0.8) * keep
        return functional.dropout(out, 0.1, self.training) + x


class ActivatedBranch(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(self.branch(x), 0.1) + x


class Ghost(Block):
    """The branch ends in a concatenation, whose second part is computed from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv2, self.bn2 = conv(out=4), nn.BatchNorm2d(4)
        self.cheap = nn.Sequential(conv(4, 4, groups=4), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        return torch.cat([out, self.cheap(out)], 1) + x


class Parallel(Block):
    """One shortcut and two branches in a chain of additions."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(conv(), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.branch(x) + self.other(x))


class Lateral(Block):
    """A feature pyramid: the coarse map is enlarged and added to a convolution of the fine map."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.lateral = row(8, 8, stride=2), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.branch(self.down(x))
        return functional.interpolate(coarse, size=x.shape[-2:]) + self.lateral(x)


class LinkNet(Block):
    """A decoder that adds its enlarged map to a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = row(8, 8, stride=2), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.stem = row(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.relu(self.branch(self.up(self.down(x)))) + x


class TwoPaths(Block):
    """RepVGG: parallel convolutions and a norm of the input, none of them a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.bn0 = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)) + self.bn2(self.conv2(x)) + self.bn0(x))


class Split(Block):
    """Res2Net: half of the channels are added to the other half after a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.norm = conv(4, 4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.chunk(self.relu(self.bn1(self.conv1(x))), 2, 1)
        mixed = self.relu(self.norm(self.small(first))) + second
        return torch.cat([first, mixed], 1)


class UsedTwice(Block):
    """The branch is an output of its own too, so its last layer stays."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.branch(x)
        return self.relu(out + x), out


class Offsets(Block):
    """Additions of numbers, shapes and parameters are no sums of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[-2] + x.shape[-1]
        return (self.branch(x) + self.position + 1.0) / rows


ONE = 1.0  # branch_gain of one block
HALF = 1 / math.sqrt(2)
CASES: list[tuple[type[nn.Module], int, dict[str, float]]] = [
    (Basic, 1, {"bn2": ONE}),
    (InPlace, 1, {"bn2": ONE}),
    (Method, 1, {"bn2": ONE}),
    (Function, 1, {"bn2": ONE}),
    (Downsample, 1, {"bn3": ONE}),
    (PaddedShortcut, 1, {"bn2": ONE}),
    (PreActivation, 1, {"conv2": ONE}),
    (Gated, 1, {"bn2": ONE}),
    (ActivatedBranch, 1, {"bn2": ONE}),
    (Ghost, 1, {"bn2": ONE}),
    (Parallel, 1, {"bn2": HALF, "other.1": HALF}),
    (Lateral, 0, {"bn2": HALF, "lateral": HALF}),
    (LinkNet, 0, {"bn2": HALF}),
    (TwoPaths, 0, dict.fromkeys(("bn0", "bn1", "bn2"), 1 / math.sqrt(3))),
    (Split, 0, {"norm": HALF}),
    (UsedTwice, 1, {}),
    (Offsets, 0, {}),
]


def assert_gain(gain: Tensor, factor: float) -> None:
    """Check that all gains are `factor` times that of a neuron outside of sums."""
    torch.testing.assert_close(gain, torch.full_like(gain, factor * CENTERING_GAIN))


def by_name(model: nn.Module, found: Additions) -> dict[str, float]:
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: end.gain for module, end in found.gains.items()}


@pytest.mark.parametrize(("make", "blocks", "gains"), CASES)
@pytest.mark.parametrize("source", ["torch.fx", "example"])
def test_last_layers(
    make: Callable[[], nn.Module], blocks: int, gains: dict[str, float], source: str
) -> None:
    model = make()
    if source == "torch.fx":
        found = find_additions(model, trace_dataflow(model, []))
    else:
        found = find_additions(model, Dataflow(), torch.randn(IMAGE))
    assert found.missing is None
    assert found.blocks == blocks
    assert by_name(model, found) == pytest.approx(gains)


def test_networks_without_additions() -> None:
    for make in (UNet, SqueezeExcite):
        assert find_additions(make(), trace_dataflow(make(), [])).gains == {}


def test_gain_falls_with_the_number_of_blocks() -> None:
    model = nn.Sequential(*(Basic() for _ in range(4)), PreActivation())
    model, report = to_agc(model, report=True)
    for block in model[:4]:
        # The block's ReLU is called twice and not fused, so the gain has He's factor for it.
        assert_gain(block.conv1.gain, math.sqrt(2))
        torch.testing.assert_close(
            block.conv2.gain, torch.full((8,), CENTERING_GAIN * branch_gain(5))
        )
    assert report.blocks == 5
    assert report.scaled_layers == (("4.conv2", branch_gain(5)),)
    table = str(report)
    assert table.count("last of a residual branch: gamma 0.54") == 4
    assert "filters scaled at the end of summed branches: 4.conv2 by 0.45" in table
    assert "5 residual additions" in table


def test_filters_at_the_end_of_a_branch_are_scaled() -> None:
    def filters(model: nn.Module) -> Tensor:
        to_agc(model, generator=torch.Generator().manual_seed(0))
        last = model.get_submodule("0.conv2")
        assert isinstance(last, nn.Conv2d)
        return last.weight.detach()

    blocks = [PreActivation() for _ in range(4)]
    plain = filters(nn.Sequential(PreActivation()))
    torch.testing.assert_close(filters(nn.Sequential(*blocks)), branch_gain(4) * plain)


def test_nested_sums_multiply() -> None:
    class Nested(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.relu(self.bn1(self.conv1(x)) + self.bn2(self.conv2(x)))

    model, report = to_agc(nn.Sequential(*(Nested() for _ in range(4))), report=True)
    assert report.blocks == 4
    for block in model:
        for layer in (block.conv1, block.conv2):
            torch.testing.assert_close(
                layer.gain, torch.full((8,), CENTERING_GAIN * HALF * branch_gain(4))
            )


def test_many_scaled_layers_are_summarized() -> None:
    _, report = to_agc(nn.Sequential(*(PreActivation() for _ in range(6))), report=True)
    assert len(report.scaled_layers) == 6
    assert "2.conv2 by 0.41, and 3 more (Report.scaled_layers)" in str(report)


def test_summed_maps_are_in_the_table() -> None:
    model, report = to_agc(TwoPaths(), report=True)
    assert str(report).count("one of 3 summed maps: gamma 0.70") == 3
    assert isinstance(model.bn0, AGC2d)
    assert_gain(model.bn0.weight, 1 / math.sqrt(3))


def test_agc_layers_of_the_model_itself_are_scaled() -> None:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bn2 = AGC2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.branch(x) + x)

    model, report = to_agc(nn.Sequential(Own(), Own()), report=True)
    torch.testing.assert_close(model[1].bn2.weight, torch.full((8,), branch_gain(2)))
    assert [name for name, _ in report.scaled_layers] == ["0.bn2", "1.bn2"]


class Untraceable(nn.Module):
    """Branches on values, so torch.fx cannot trace it; its blocks are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UntraceableBlock() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x) if float(x.sum()) > -1e9 else x
        return {"features": x}


class UntraceableBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.branch(x) + x) if float(x.mean()) < 1e9 else x


def test_untraceable_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "TOLERANCE", math.inf)  # gains as they are without the example
    model, report = to_agc(Untraceable(), example=torch.randn(IMAGE), report=True)
    assert report.blocks == 4
    assert report.missing is None
    for block in model.blocks:  # the norms stay apart, because untraced code may call them
        assert_gain(block.bn2.weight, branch_gain(4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    model, report = to_agc(Untraceable(), report=True)
    assert report.blocks == 0
    assert "residual branches were not all found" in str(report)
    assert "pass example=" in str(report).splitlines()[-2]


def test_parts_of_an_untraceable_model() -> None:
    class Parts(Untraceable):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Basic() for _ in range(4))

    model, report = to_agc(Parts(), report=True)
    assert report.blocks == 4
    assert report.missing is not None
    assert_gain(model.blocks[0].bn2.weight, branch_gain(4))


class LeavesTorch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() / 2)


def test_example_passes_through_modules_that_compute_outside_of_torch() -> None:
    class Model(Block):
        def __init__(self) -> None:
            super().__init__()
            self.outside = LeavesTorch()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.outside(self.branch(x))

    model = Model()
    found = find_additions(model, trace_dataflow(model, []), torch.randn(IMAGE))
    assert by_name(model, found) == {"bn2": 1.0}


def deep(blocks: int) -> nn.Sequential:
    layers = [Basic() for _ in range(blocks)]
    return nn.Sequential(row(3, 8), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def test_logits_of_a_deep_network_are_bounded() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    model = to_agc(deep(50)).eval()
    small = model(images).std()
    assert 1e-2 < small < 10
    for block in model[1:51]:
        nn.init.ones_(block.conv2.gain)
    assert model(images).std() > 1e3 * small


def test_zero_gamma_is_not_needed() -> None:
    model = Residual()
    for block in model.blocks:
        nn.init.zeros_(block.bn2.weight)
    to_agc(model)
    for block in model.blocks:
        assert_gain(block.conv2.gain, HALF)
    # Without an example these branches are not found, and the zeros stay.
    hidden = Untraceable()
    nn.init.zeros_(hidden.blocks[0].bn2.weight)
    to_agc(hidden)
    assert not hidden.blocks[0].bn2.weight.any()

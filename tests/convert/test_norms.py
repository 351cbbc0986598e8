"""Conversion of InstanceNorm and GroupNorm."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from deepcontrol import AGC2d, AGCConv2d, AGCConv3d, fold, to_agc
from deepcontrol.nn.memory import saved_bytes


class PlainBlock(nn.Module):
    """Convolution, InstanceNorm and LeakyReLU, registered twice as in nnU-Net."""

    def __init__(self, channels: int, out: int, stride: int = 1, slope: float = 0.01) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, out, 3, stride, 1, bias=True)
        self.norm = nn.InstanceNorm3d(out, affine=True)
        self.nonlin = nn.LeakyReLU(slope, inplace=True)
        self.all_modules = nn.Sequential(self.conv, self.norm, self.nonlin)

    def forward(self, x: Tensor) -> Tensor:
        return self.all_modules(x)


class PlainUNet(nn.Module):
    """A U-Net over volumes with the blocks of nnU-Net."""

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            [PlainBlock(1, 8, slope=slope), PlainBlock(8, 16, stride=2, slope=slope)]
        )
        self.up = nn.ConvTranspose3d(16, 8, 2, stride=2)
        self.decoder = PlainBlock(16, 8, slope=slope)
        self.classify = nn.Conv3d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.encoder[0](x)
        below = self.up(self.encoder[1](skip))
        return self.classify(self.decoder(torch.cat([below, skip], 1)))


class GroupBlock(nn.Module):
    def __init__(self, channels: int, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(), norm()
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(out + x)


class GroupResNet(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.GroupNorm(4, 8)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(), nn.ReLU())
        self.blocks = nn.Sequential(GroupBlock(8, norm), GroupBlock(8, norm))
        self.classify = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.classify(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def trains(model: nn.Module, x: Tensor) -> bool:
    """Return whether every parameter gets a finite gradient."""
    y = model(x)
    (y * torch.randn_like(y)).sum().backward()
    return all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_instance_norm_and_leaky_relu_become_one_neuron() -> None:
    volume = torch.randn(1, 1, 8, 8, 8)
    before = saved_bytes(PlainUNet(), volume)
    model, report = to_agc(PlainUNet(), norms=("instance",), example=volume, report=True)
    assert [(c.was, c.kind) for c in report] == [("InstanceNorm3d", "fused")] * 3
    assert report.unverified is None
    assert all("fused with its convolution and LeakyReLU" in c.why for c in report)
    neuron = model.encoder[0].conv
    assert isinstance(neuron, AGCConv3d)
    assert neuron.activation == "leaky_relu"
    assert not any(isinstance(m, nn.InstanceNorm3d) for m in model.modules())
    assert trains(model, volume)
    assert saved_bytes(model, volume) < 0.7 * before
    torch.testing.assert_close(fold(model)(volume), model.eval()(volume), rtol=1e-4, atol=1e-5)


def test_other_slopes_stay_behind_the_neuron() -> None:
    volume = torch.randn(1, 1, 8, 8, 8)
    model, report = to_agc(PlainUNet(0.2), norms="instance", example=volume, report=True)
    assert report.count("fused") == 3
    block = model.decoder
    assert block.conv.activation == "none"
    assert block.nonlin.negative_slope == 0.2
    assert trains(model, volume)


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
def test_group_norm_resnet(with_example: bool) -> None:
    x = torch.randn(2, 3, 12, 12)
    model, report = to_agc(
        GroupResNet(), norms=("batch", "group"), example=x if with_example else None, report=True
    )
    assert report.count("fused") == 5
    assert report.blocks == 2
    assert {c.was for c in report} == {"GroupNorm"}
    gain = model.blocks[0].conv2.gain  # the last of a residual branch starts small
    assert torch.allclose(gain, torch.full((8,), 1.21 / 2**0.5), atol=0.01)
    assert isinstance(model.stem[0], AGCConv2d)
    assert model.stem[0].activation == "relu"
    assert trains(model, x)


def test_other_kinds_stay() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
    )
    _, report = to_agc(model, report=True)
    assert [c.name for c in report] == ["1"]
    assert isinstance(model[3], nn.GroupNorm)
    norm = model[3]
    _, report = to_agc(model, norms="group", where=lambda name, m: m is not norm, report=True)
    assert model[3] is norm
    assert report.count("skipped") == 1


def test_starts_from_trained_norms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"init='bn'.*'group' norms.*norms=\('batch',\)"):
        to_agc(GroupResNet(), norms=("batch", "group"), init="bn")


@pytest.mark.parametrize(
    ("norms", "message"),
    [
        ("batch", r"no BatchNorm in GroupResNet: .* is a GroupNorm; .* norms=\('group',\)"),
        (("batch", "instance"), "no BatchNorm or InstanceNorm"),
        (("layer",), "unknown norm 'layer': choose from batch, instance, group"),
    ],
)
def test_missing_kinds_raise(norms: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_agc(GroupResNet(), norms=norms)


def test_errors_leave_the_norms() -> None:
    model = GroupResNet()
    model.stem[0].weight.requires_grad_(False)
    layers = list(model.modules())
    with pytest.raises(ValueError, match="frozen"):
        to_agc(model, norms="group")
    assert list(model.modules()) == layers


def test_instance_norm_without_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.PReLU()).double()
    _, report = to_agc(model, norms="instance", report=True)
    assert report.count("fused") == 1
    assert model[0].gain.dtype == torch.float64
    assert model[0].gain.requires_grad
    wrong = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(1))
    with pytest.raises(ValueError, match=r"'1' .*num_features=1.* 8 channels"):
        to_agc(wrong, norms="instance")
    assert isinstance(wrong[1], nn.InstanceNorm2d)


class SharedNorm(nn.Module):
    """One InstanceNorm without parameters for maps of 8 and of 16 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(8)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv2(self.norm(self.conv1(x))))


@pytest.mark.filterwarnings("ignore:input's size at dim=1 does not match")
def test_norms_of_several_widths_raise() -> None:
    model = nn.Sequential(SharedNorm(), nn.Conv2d(16, 8, 1), nn.InstanceNorm2d(8))
    norm, x = model[0].norm, torch.randn(1, 3, 9, 9)
    with pytest.raises(ValueError, match=r"8 channels gets maps \(1, 16, 5, 5\).*exclude"):
        to_agc(model, norms="instance", example=x)
    assert model[0].norm is norm
    _, report = to_agc(model, norms="instance", example=x, where="2", report=True)
    assert [c.kind for c in report] == ["skipped", "fused"]


class GroupNormAct(nn.GroupNorm):
    """As in timm: the activation is part of the norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(2, channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class Squared(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def test_subclasses() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), GroupNormAct(8), nn.Conv2d(8, 8, 3), Squared(2, 8))
    norm = model[3]
    with pytest.warns(UserWarning, match="3 .*Squared.* is skipped"):
        _, report = to_agc(model, norms="group", example=torch.randn(1, 3, 8, 8), report=True)
    assert model[0].activation == "relu"
    assert isinstance(model[1], nn.Identity)
    assert model[3] is norm
    assert [(c.was, c.kind) for c in report] == [("GroupNormAct", "fused"), ("Squared", "skipped")]


class ReadsGroups(nn.Module):
    """Calls group_norm with the parameters of its norm: no AGC layer can stand there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return functional.group_norm(self.conv(x), norm.num_groups, norm.weight, norm.bias)


def test_norms_that_are_only_read_stay() -> None:
    model = nn.Sequential(ReadsGroups(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
    x = torch.randn(1, 3, 8, 8)
    norm = model[0].norm
    with pytest.warns(UserWarning, match=r"0\.norm"):
        _, report = to_agc(model, norms="group", example=x, report=True)
    assert model[0].norm is norm
    assert isinstance(model[1], AGCConv2d)
    assert report.unverified is None
    assert trains(model, x)


def test_trained_gains_warn() -> None:
    model = GroupResNet()
    nn.init.normal_(model.stem[1].weight)
    with pytest.warns(UserWarning, match=r"1 norms \(GroupNorm\) have trained gains"):
        to_agc(model, norms="group")


def test_group_norm_before_the_convolution_is_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3))
    to_agc(model, norms="group", example=torch.randn(1, 3, 8, 8))
    assert isinstance(model[2], AGC2d)


def test_meta_device() -> None:
    with torch.device("meta"):
        model = GroupResNet()
    to_agc(model, norms="group", example=torch.randn(1, 3, 12, 12, device="meta"))
    assert isinstance(model.stem[0], AGCConv2d)
    assert model.stem[0].gain.is_meta

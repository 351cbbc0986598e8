"""Initializations of to_agc: from scratch, and from trained BatchNorms and new data."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC1d, AGC2d, AGCConv2d, AGCConvTranspose2d, reestimate_statistics, to_agc
from deepcontrol.convert import start
from deepcontrol.nn.init import CENTERING_GAIN
from tests.convert.networks import INPUTS, Residual, SharedHead, SqueezeExcite, row, trained


class Mixed(nn.Module):
    """Layers that fuse, with biases, and layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = row(3, 6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.up_norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)
        self.fc_norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_norm(self.up(self.stem(x))).relu()
        return self.fc_norm(self.fc(x.mean((2, 3))))


def trained_pair(factor: float) -> tuple[nn.Module, nn.Module]:
    """Two models in fp64 with the same function; the filters of the second are scaled."""
    torch.manual_seed(0)
    model = trained(Mixed()).double().eval()
    scaled = copy.deepcopy(model)
    pairs = ((scaled.stem[0], scaled.stem[1]), (scaled.up, scaled.up_norm))
    with torch.no_grad():
        for layer, norm in (*pairs, (scaled.fc, scaled.fc_norm)):
            layer.weight *= factor
            layer.bias *= factor
            norm.running_mean *= factor
            norm.running_var *= factor**2
            norm.eps *= factor**2
    return model, scaled


@pytest.mark.parametrize("factor", [0.01, 1.0, 10.0])
def test_init_bn_is_exact_whatever_the_scale_of_the_filters(factor: float) -> None:
    model, scaled = trained_pair(factor)
    filters = [layer.weight for layer in (scaled.stem[0], scaled.up, scaled.fc)]
    x = torch.randn(3, 3, 7, 9, dtype=torch.float64)
    expected = model(x)
    to_agc(scaled, init="bn")
    assert (scaled(x) - expected).abs().max() < 1e-10
    assert [layer.weight for layer in (scaled.stem[0], scaled.up, scaled.fc)] == filters
    assert isinstance(scaled.stem[0], AGCConv2d)
    norms = scaled.stem[0].weight.detach().flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(2.0)))


def outputs_after_a_step(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    (y - 1).square().mean().backward()
    optimizer.step()
    return model(x).detach()


@pytest.mark.parametrize("init", ["bn", "centered"])
def test_training_does_not_depend_on_the_scale_of_the_filters(init: str) -> None:
    x = torch.randn(3, 3, 7, 9, dtype=torch.float64)
    start = to_agc(trained_pair(1.0)[0], init=init)(x)
    stepped = [outputs_after_a_step(to_agc(m, init=init), x) for m in trained_pair(10.0)]
    assert (stepped[0] - stepped[1]).abs().max() < 1e-10
    assert (stepped[0] - start).abs().max() > 1e-2  # the step changes the outputs


def test_shared_filters_are_not_scaled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(row(8, 8), nn.Conv2d(8, 8, 3, padding=1))
    model[1].weight = model[0][0].weight
    trained(model).double().eval()
    x = torch.randn(2, 8, 7, 7, dtype=torch.float64)
    expected, filters = model(x), model[1].weight.detach().clone()
    to_agc(model, init="bn")
    assert torch.equal(model[1].weight, filters)
    assert (model(x) - expected).abs().max() < 1e-10

    model = trained(SharedHead()).double().eval()  # one convolution feeds two norms
    x = torch.randn(INPUTS[SharedHead], dtype=torch.float64)
    expected = model(x)
    assert (to_agc(model, init="bn")(x) - expected).abs().max() < 1e-10


def test_init_centered() -> None:
    """With the sample's own mean as running mean, BatchNorm computes the same."""
    torch.manual_seed(0)
    model = trained(row(3, 6)).double().eval()
    x = torch.randn(1, 3, 7, 9, dtype=torch.float64)
    centered = to_agc(copy.deepcopy(model), init="centered")
    assert centered[0].mean_scale.eq(1).all()
    model[1].running_mean.copy_(model[0](x).detach().mean((0, 2, 3)))
    assert (centered(x) - model(x)).abs().max() < 1e-10


def test_init_centered_keeps_lambda_0_where_nothing_would_be_left() -> None:
    example = torch.randn(1, 3, 9, 9)
    model, report = to_agc(trained(SqueezeExcite()), init="centered", example=example, report=True)
    assert not model.squeeze[1].mean_scale.any()
    assert "lambda 0: maps of one position" in str(report)

    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1))
    trained(pooled).eval()
    expected = pooled(example)
    pooled, report = to_agc(pooled, init="centered", report=True)
    assert "lambda 0: global average pooling follows" in str(report)
    torch.testing.assert_close(pooled(example), expected)


def batches() -> Iterator[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    for label in range(3):
        yield 2 * torch.randn(4, 3, 12, 12, generator=generator) + 3, label


def test_statistics_are_estimated_again() -> None:
    """As torch.optim.swa_utils.update_bn does, apart from layers that differ in training mode."""
    torch.manual_seed(0)
    model = trained(Residual())
    model.blocks[0].eval()
    model.bn.momentum = 0.3
    expected = copy.deepcopy(model)
    torch.optim.swa_utils.update_bn(list(batches()), expected.train())
    before = copy.deepcopy(model)
    assert reestimate_statistics(model, batches()) is model
    for (name, a), b in zip(
        expected.state_dict().items(), model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, msg=name)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert model.bn.momentum == 0.3
    for a, b in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)


def test_init_bn_with_data() -> None:
    model = trained(Residual()).eval()
    expected = reestimate_statistics(copy.deepcopy(model), batches())
    x = next(batches())[0]
    assert (expected(x) - model(x)).abs().max() > 0.1
    torch.testing.assert_close(
        to_agc(model, init="bn", data=batches())(x), expected(x), rtol=1e-4, atol=1e-4
    )


def test_statistics_that_the_data_does_not_reach_stay() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.stateless = nn.BatchNorm2d(3, track_running_stats=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.stateless(self.used(x))
            return y

    model = Skips()
    nn.init.constant_(model.idle.running_mean, 7.0)
    reestimate_statistics(model, [{"x": next(batches())[0]}])
    assert model.idle.running_mean.eq(7).all()
    assert model.used.running_mean.gt(2).all()


def test_errors_leave_the_statistics() -> None:
    model = trained(row(3, 8))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="`data` has no batches"):
        reestimate_statistics(model, [])
    with pytest.raises(RuntimeError, match="channels"):
        reestimate_statistics(model, [torch.randn(4, 3, 9, 9), torch.randn(4, 5, 9, 9)])
    for name, a in model.state_dict().items():
        assert torch.equal(a, before[name]), name
    assert model[1].training
    assert model[1].momentum == 0.1
    with pytest.raises(ValueError, match=r"init='scratch' discards them: use init='bn'"):
        to_agc(model, data=batches())


class Gated(nn.Module):
    """Twelve layers, each with a gate that halves its map, and no residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(row(3 if i == 0 else 32, 32) for i in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * torch.sigmoid(x.mean((2, 3), keepdim=True))
        return x


def test_layers_are_scaled_on_the_example() -> None:
    images = torch.randn(4, 3, 16, 16)
    without, with_example = to_agc(Gated()), Gated()
    _, report = to_agc(with_example, example=images[:2], report=True)
    assert without(images).std() < 0.02
    assert 0.2 < with_example(images).std() < 2
    assert 0 < len(report.corrected) < 12  # those within a factor of 2 are left alone
    plural = "s" * (len(report.corrected) > 1)
    assert f"{len(report.corrected)} layer{plural} rescaled to fit the example" in str(report)
    assert all("layers." in name for name in report.corrected)
    black = to_agc(Gated(), example=torch.zeros(1, 3, 16, 16))  # no deviation to scale by
    assert all(p.isfinite().all() for p in black.parameters())


@pytest.mark.filterwarnings("ignore:.*trained statistics")
def test_init_scratch_initializes_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "TOLERANCE", math.inf)  # gains as they are without an example

    def convert(seed: int) -> nn.Module:
        model = trained(Mixed())
        generator = torch.Generator().manual_seed(seed)
        return to_agc(model, example=torch.randn(1, 3, 7, 9), generator=generator)

    model, again, other = convert(0), convert(0), convert(1)
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(model.fc.weight, other.fc.weight)
    starts = (
        (model.stem[0], CENTERING_GAIN),
        (model.up, math.sqrt(2) * CENTERING_GAIN),  # He's factor for the ReLU behind it
        (model.fc_norm, 1.0),  # on one position lambda is 0
    )
    for layer, expected in starts:
        assert isinstance(layer, (AGCConv2d, AGCConvTranspose2d, AGC1d))
        gain = layer.weight if isinstance(layer, AGC1d) else layer.gain
        torch.testing.assert_close(gain, torch.full_like(gain, expected))
        assert not layer.bias.any()
    assert not model.fc_norm.mean_scale.any()  # maps of one position
    assert not model.fc.bias.any()

    gate = to_agc(SqueezeExcite(), example=torch.randn(1, 3, 9, 9)).squeeze[1]
    assert isinstance(gate, AGCConv2d)  # at lambda 0, so the convolution's bias would remain
    assert not gate.bias.any()


def test_init_paper_leaves_the_filters() -> None:
    model = Mixed()
    filters = copy.deepcopy([model.stem[0].weight, model.up.weight, model.fc.weight])
    to_agc(model, init="paper")
    for a, b in zip(filters, [model.stem[0].weight, model.up.weight, model.fc.weight], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("init", "lost"), [("scratch", "overwrites all filters and discards"), ("paper", "discards")]
)
def test_discarding_trained_statistics_warns_once(init: str, lost: str) -> None:
    model = nn.Sequential(row(3, 8), row(8, 8), row(8, 8))
    model[:2](torch.randn(2, 3, 9, 9))  # the third BatchNorm has no statistics
    with pytest.warns(UserWarning, match=f"2 BatchNorms .*{lost} .*use init='bn'") as caught:
        to_agc(copy.deepcopy(model), init=init)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    to_agc(copy.deepcopy(model), init="bn")  # pytest turns warnings into errors
    to_agc(copy.deepcopy(model), init="centered")


class UnfusableConv(nn.Conv2d):
    """A convolution with a forward of its own, which keeps its norm apart."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(-100, 100)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.clamp(-0.9, 0.9), bias)


class Deep(nn.Module):
    """Sixteen residual blocks."""

    def __init__(self, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.first = nn.ModuleList(row(8, 8) for _ in range(16))
        self.conv = nn.ModuleList(conv(8, 8, 3, padding=1, bias=False) for _ in range(16))
        self.norm = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for first, conv, norm in zip(self.first, self.conv, self.norm, strict=True):
            x = torch.relu(x + norm(conv(first(x))))
        return x


@pytest.mark.parametrize("conv", [nn.Conv2d, UnfusableConv])
def test_the_example_leaves_right_branches_alone(conv: type[nn.Conv2d]) -> None:
    model, report = to_agc(Deep(conv), example=torch.randn(4, 8, 16, 16), report=True)
    assert len(report.corrected) < 4
    ends = [m for name, m in model.named_modules() if name.split(".")[0] in ("conv", "norm")]
    kind = AGCConv2d if conv is nn.Conv2d else AGC2d
    deviations = []
    for layer in (m for m in ends if isinstance(m, kind)):
        layer.register_forward_hook(lambda _, args, y: deviations.append(y.std().item()))
    model(torch.randn(4, 8, 16, 16))
    assert len(deviations) == 16
    assert all(0.08 < d < 0.6 for d in deviations)  # about 1/4, the branch gain of 16 blocks


def test_scratch_refuses_frozen_filters() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)).requires_grad_(False)
    model = nn.Sequential(backbone, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    before = {name: a.clone() for name, a in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"'0.0'.*which is frozen.*init='paper'"):
        to_agc(model)
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    to_agc(model, init="paper")
    assert torch.equal(backbone[0].weight, before["0.0.weight"])


def test_statistics_without_a_counter_are_trained() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    model[1].num_batches_tracked.zero_()  # as loaded from an old checkpoint
    with pytest.warns(UserWarning, match="1 BatchNorms have trained statistics"):
        to_agc(model)


def test_shared_filters_are_scaled_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))
            for i in range(3, 8, 2):
                self.convs[i].weight = self.convs[1].weight

        def forward(self, x: Tensor) -> Tensor:
            for i, norm in enumerate(self.norms):
                x = x + self.convs[2 * i + 1](torch.relu(self.convs[2 * i](norm(x))))
            return x

    model, report = to_agc(Tied(), report=True)
    assert len(report.scaled_layers) == 1
    he = (2 / 72) ** 0.5
    assert model.convs[1].weight.std().item() == pytest.approx(0.5 * he, rel=0.15)


def test_scratch_with_where_leaves_other_layers_alone() -> None:
    model = trained(nn.Sequential(row(3, 8), row(8, 8), nn.Flatten(), nn.Linear(8 * 81, 2)))
    before = {name: a.clone() for name, a in model.state_dict().items()}
    with pytest.warns(UserWarning, match="1 BatchNorms have trained statistics"):
        to_agc(model, where="0.1")
    after = model.state_dict()
    assert isinstance(model[0][0], AGCConv2d)
    assert not torch.equal(after["0.0.weight"], before["0.0.weight"])
    for name in before:
        if not name.startswith("0."):
            assert torch.equal(after[name], before[name]), name


def test_scratch_leaves_frozen_constants() -> None:
    """Fixed filters that no norm follows are part of the model: a blur, the bins of a detector."""
    blur = nn.Conv2d(8, 8, 3, groups=8, bias=False).requires_grad_(False)
    nn.init.constant_(blur.weight, 1 / 9)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), blur, nn.Flatten())
    before = model[0].weight.clone()
    to_agc(model)
    assert torch.equal(blur.weight, torch.full_like(blur.weight, 1 / 9))
    assert not torch.equal(model[0].weight, before)


def test_rounding_errors_of_constant_features_are_not_scaled() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 4),
    )
    x = torch.randn(4, 3, 16, 16)
    with pytest.warns(UserWarning, match="global average pooling"):
        _, report = to_agc(model, example=x, lam=1.0, report=True)
    assert report.corrected == ()
    assert model(x).abs().max() < 1e-5

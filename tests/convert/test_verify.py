"""The conversion verifies itself: the report, ties, frozen models, and runs that cannot compare."""

import copy

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d, to_agc
from deepcontrol.convert.verify import Trial
from tests.convert.networks import Residual, Untraceable, row, trained

IMAGE = torch.randn(1, 3, 8, 8)


def test_report_says_that_it_was_verified() -> None:
    model = trained(Residual())
    _, report = to_agc(model, init="bn", example=torch.randn(2, 3, 20, 24), report=True)
    assert report.unverified is None
    assert "verified on the example in evaluation and training mode" in str(report)
    assert report.difference is not None
    assert 0 < report.difference < 1e-4


def test_report_says_what_is_missing_without_an_example() -> None:
    _, report = to_agc(Untraceable(), report=True)
    assert "not verified: no example" in str(report)
    assert "3 BatchNorms stay unfused for that" in str(report)
    assert report.difference is None


class Wrong(nn.Module):
    """Blocks of which torch.fx takes another path than the program."""

    def __init__(self) -> None:
        super().__init__()
        self.good = row(3, 8)
        self.blocks = nn.ModuleList(row(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.good(x)
        for conv, bn, act in self.blocks:
            z = conv(x)
            x = act(bn(z)) + (z if type(z) is Tensor else 0)
        return x


def test_only_wrong_fusions_are_backed_out() -> None:
    model = trained(Wrong()).eval()
    expected = model(IMAGE)
    model, report = to_agc(model, init="bn", example=IMAGE, report=True)
    assert isinstance(model.good[0], AGCConv2d)
    assert [type(block[1]) for block in model.blocks] == [AGC2d] * 3
    assert all("backed out: in evaluation mode" in c.why for c in report.changes[1:])
    assert "backed out" not in report.changes[0].why
    torch.testing.assert_close(model(IMAGE), expected, rtol=1e-4, atol=1e-4)


class Noisy(nn.Module):
    """Computes something else in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.runs = row(3, 8), [0]

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.seed()
        return self.layers(x + torch.randn(x.shape, generator=generator))


def test_models_that_differ_by_themselves_are_not_verified() -> None:
    _, report = to_agc(Noisy(), example=IMAGE, report=True)
    assert report.unverified == "two runs of the model on the example differ by themselves"
    assert report.count("fused") == 1


def test_batchnorms_that_are_bound_together_raise() -> None:
    class Any(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])
            self.other = nn.Sequential(nn.BatchNorm2d(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, self.other):
                x = layer(x).sigmoid()
            some = any(isinstance(m, nn.BatchNorm2d) for m in self.modules())
            return x * 2 if some else x

    model = Any()
    layers = list(model.modules())
    with pytest.raises(ValueError, match="not all of them together: select some with `where`"):
        to_agc(model, example=IMAGE)
    assert list(model.modules()) == layers


def test_examples_that_the_model_refuses_raise() -> None:
    with pytest.raises(RuntimeError, match="expected input"):
        to_agc(row(3, 8), example=torch.randn(1, 4, 8, 8))


def test_models_that_refuse_random_parameters_are_not_verified() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = row(3, 8), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            if bool(self.scale != 1):
                raise ValueError("the scale must be 1")
            return self.layers(x) * self.scale

    _, report = to_agc(Strict(), example=IMAGE, report=True)
    assert "raises ValueError: the scale must be 1" in str(report)
    assert report.count("fused") + report.count("replaced") == 1


def test_training_mode_that_raises_is_named() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = row(3, 8)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("targets are missing")
            return self.layers(x)

    model, report = to_agc(Detector(), example=IMAGE, report=True)
    assert report.unverified is not None
    assert "raises ValueError: targets are missing" in report.unverified
    assert isinstance(model.layers[0], AGCConv2d)


def test_tied_gammas_stay_tied() -> None:
    model = trained(nn.Sequential(row(3, 8), row(8, 8)))
    model[1][1].weight = model[0][1].weight
    as_bn = to_agc(copy.deepcopy(model), init="bn", example=IMAGE)
    assert as_bn[0][0].gain is as_bn[1][0].gain
    names = [name for name, _ in as_bn.named_parameters()]
    assert "1.0.gain" not in names
    assert "0.0.gain" in names


def test_gammas_that_cannot_stay_tied_warn() -> None:
    model = trained(nn.Sequential(nn.Tanh(), nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3)))
    model[3].weight = model[1].weight
    with pytest.warns(UserWarning, match=r"3\.weight: shared with another BatchNorm before"):
        _, report = to_agc(model, init="bn", report=True)
    assert report.untied == ("3.weight",)


def test_frozen_networks_stay_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False))
    to_agc(model.requires_grad_(False), init="bn", example=IMAGE)
    assert not any(p.requires_grad for p in model.parameters())


def test_overflow_of_scaled_filters_warns() -> None:
    """Filters divided by a tiny deviation do not fit into half precision."""
    model = trained(row(3, 8)).eval()
    nn.init.constant_(model[1].running_var, 1e-12)
    model[1].eps = 1e-30
    model[0].weight.data.mul_(1e-3)
    model.to(torch.float16)
    model[1].to(torch.float32)
    with pytest.warns(UserWarning, match="the outputs on the example differ by"):
        to_agc(model, init="bn", example=IMAGE.half())


def test_conversion_leaves_the_random_state() -> None:
    model = nn.Sequential(row(3, 8), nn.Dropout(0.5))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    to_agc(model, init="paper", example=IMAGE)
    assert torch.equal(torch.rand(3), expected)


def test_single_values_are_not_compared_as_rounding() -> None:
    """With one value per channel, the statistics of the example would leave only rounding."""
    norm = nn.BatchNorm2d(16, affine=False)
    model = nn.Sequential(nn.Conv2d(3, 16, 9), norm)
    trial = Trial(model, {norm}, torch.randn(1, 3, 9, 9))
    runs, _ = trial.references[None]
    assert runs["evaluation"].outputs[0].abs().max() > 1e-2

"""Features that AGC at lambda 1 makes constant: found on the example, and avoided with lam."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import to_agc
from deepcontrol.convert import Report
from deepcontrol.nn.init import CENTERING_GAIN
from tests.convert.networks import Signal, SqueezeExcite, row


class Pooled(nn.Module):
    """Convolution, BatchNorm, and a way to pool."""

    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = row(3, 8)
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool = pool
        self.classify = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.pool(self.bn(self.conv(self.first(x)))).flatten(1))


LAMS = (0.0, 0.3, 0.7, 1.0)
HAZARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive pooling": nn.AdaptiveAvgPool2d(1),
    "average pooling": nn.AvgPool2d(8),
    "dropout and pooling": nn.Sequential(nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1)),
    "mean of a flat map": lambda x: x.flatten(2).mean(2),
    "chained means": lambda x: x.mean(3).mean(2),
    "mean": lambda x: x.mean((2, 3)),
    "sum": lambda x: x.sum((-1, -2)),
    "einsum": lambda x: torch.einsum("nchw->nc", x),
    "pooling in two steps": lambda x: nn.functional.avg_pool2d(x, 2).mean((2, 3)),
}
HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "activation": lambda x: x.relu().mean((2, 3)),
    "maximum": lambda x: x.amax((2, 3)),
    "parts": lambda x: nn.functional.avg_pool2d(x, 4)[:, :, 0, 0],
    "attention": lambda x: (x * x.flatten(2).softmax(2).view_as(x)).sum((2, 3)),
}


def convert(model: nn.Module, **options: object) -> tuple[nn.Module, Report, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, report = to_agc(model, example=torch.randn(1, 3, 8, 8), report=True, **options)
    return model, report, [str(w.message) for w in caught]


def changes(model: nn.Module) -> bool:
    """Return whether the output depends on the input."""
    a, b = model.eval()(torch.randn(2, 3, 8, 8))
    return bool((a - b).abs().max() > 1e-5)


@pytest.mark.parametrize("init", ["scratch", "paper"])
@pytest.mark.parametrize("name", HAZARDS)
def test_constant_features_are_found(name: str, init: str) -> None:
    model, report, messages = convert(Pooled(HAZARDS[name]), init=init, lam=1.0)
    assert report.constant == ("bn",)
    assert not changes(model)
    (message,) = messages
    assert "bn is followed by global average pooling" in message
    assert "constant features until lambda changes: bn" in str(report)


@pytest.mark.parametrize("name", HAZARDS)
def test_standardized_filters_avoid_them(name: str) -> None:
    """By default they start at lambda 0.5, which leaves half of the mean."""
    model, report, messages = convert(Pooled(HAZARDS[name]))
    assert not messages
    assert report.constant == ()
    assert changes(model)


@pytest.mark.parametrize("name", HARMLESS)
def test_other_features_are_not(name: str) -> None:
    model, report, messages = convert(Pooled(HARMLESS[name]))
    assert not messages
    assert report.constant == ()
    assert changes(model)


def test_one_warning_for_all_layers() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(5)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                y = block(x)
                x = x + (y * y.mean((2, 3), keepdim=True).sigmoid()).relu()
            return x

    _, report, messages = convert(Gated(), lam=1.0)
    assert len(report.constant) == 5
    (message,) = messages
    assert "blocks.0.1 and 4 more (Report.constant) are followed" in message
    assert "blocks.0.1, blocks.1.1, blocks.2.1, and 2 more (Report.constant)" in str(report)


def test_lam_does_what_the_warning_advises() -> None:
    advised = {"bn": 0.0}
    model, report, messages = convert(Pooled(nn.AdaptiveAvgPool2d(1)), lam=advised.get)
    assert not messages
    assert report.constant == ()
    assert changes(model)
    assert not model.conv.mean_scale.any()
    assert model.first[0].mean_scale.eq(0.5).all()


def test_lam_as_a_number() -> None:
    model, _, messages = convert(SqueezeExcite(), lam=0.5)
    assert not messages
    assert model.stem[0].mean_scale.eq(0.5).all()
    assert not model.squeeze[1].mean_scale.any()  # maps of one position


def test_gain_makes_up_for_the_share_of_the_mean_that_is_removed() -> None:
    layers = [to_agc(nn.Sequential(nn.BatchNorm2d(3)), lam=lam)[0] for lam in LAMS]
    gains = [layer.weight[0].item() for layer in layers]
    assert gains[0] == 1
    assert gains == sorted(gains)
    assert gains[-1] == pytest.approx(CENTERING_GAIN, rel=1e-5)
    # Of a ReLU's output with mean square 1, the mean is 1 / sqrt(pi).
    left = [1 - (2 * lam - lam**2) / math.pi for lam in LAMS]
    assert [g**2 * v for g, v in zip(gains, left, strict=True)] == pytest.approx(
        [1.0] * 4, rel=1e-5
    )


def test_lam_in_between_keeps_the_mean_of_batchnorm() -> None:
    """With init="centered", lambda 0 is BatchNorm's function and lambda 1 removes its mean."""
    model = nn.Sequential(nn.BatchNorm2d(3)).eval()
    nn.init.normal_(model[0].running_mean)
    x = torch.randn(2, 3, 4, 4)
    expected = model(x)
    half = to_agc(nn.Sequential(copy_of(model[0])), init="centered", lam=0.5)
    none = to_agc(nn.Sequential(copy_of(model[0])), init="centered", lam=0.0)
    torch.testing.assert_close(none(x), expected)
    mean = x.mean((2, 3), keepdim=True)
    running = model[0].running_mean.view(1, 3, 1, 1)
    torch.testing.assert_close(half(x), expected - 0.5 * (mean - running), rtol=1e-4, atol=1e-4)


def copy_of(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    other = nn.BatchNorm2d(norm.num_features).eval()
    other.load_state_dict(norm.state_dict())
    return other


def test_lam_of_a_function_is_preferred_to_the_map_size() -> None:
    model = to_agc(Signal(), lam=lambda name: 0.25 if name == "6" else None)
    assert model[6].mean_scale.eq(0.25).all()
    assert model[0].mean_scale.eq(0.5).all()


def test_lam_does_not_go_with_bn() -> None:
    with pytest.raises(ValueError, match=r"init='bn' keeps the function .* needs lambda 0"):
        to_agc(row(3, 8), init="bn", lam=0.5)


def test_centered_starts_pooled_layers_at_zero() -> None:
    model, report, messages = convert(Pooled(HAZARDS["chained means"]), init="centered")
    assert not messages
    assert not model.conv.mean_scale.any()
    assert "lambda 0: global average pooling follows" in str(report)

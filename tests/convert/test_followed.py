"""Code that uses a convolution's output in a way that is easily overlooked."""

import math
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, fold, to_agc
from tests.convert.networks import row


class Sliced(nn.Module):
    """Steps into its Sequential; the slice is a module that it does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.block = row(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block[0](x)
        return y + self.block[1:](y)


class Loop(nn.Module):
    """Cannot be followed, and keeps what each layer of its part gives."""

    def __init__(self) -> None:
        super().__init__()
        self.block = row(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = [x * float(x.mean() > 1e9)]
        for layer in self.block:
            x = layer(x)
            seen.append(x)
        return sum(seen, torch.zeros(()))


class Wrapper(nn.Module):
    """Cannot be followed, and calls the layers of its part by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., : math.ceil(x.shape[2] / 2)]
        y = self.inner.conv(x)
        return y - self.inner.norm(y)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class Both(Pair):
    """What evaluation returns, training does not."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        y: Tensor = self.norm(z)
        return y if self.training else y + z


class Optional(Pair):
    """What it returns depends on whether an argument is given."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        z = self.conv(x)
        y: Tensor = self.norm(z)
        return y + z if target is None else y - target


def patched() -> nn.Module:
    """Another forward than its class has."""
    model = Pair()
    model.forward = types.MethodType(Both.forward, model)  # type: ignore[method-assign]
    return model


MODELS: list[Callable[[], nn.Module]] = [Sliced, Loop, Wrapper, Both, Optional, patched]


def some_statistics(model: nn.Module) -> nn.Module:
    """As if it were trained."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.weight)
    return model


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_example", [True, False])
def test_outputs_stay_the_same(
    make: Callable[[], nn.Module], training: bool, with_example: bool
) -> None:
    torch.manual_seed(0)
    model = some_statistics(make()).eval()
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    to_agc(model.train(training), init="bn", example=x if with_example else None)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    torch.testing.assert_close(model.eval()(x), before)


@pytest.mark.parametrize("make", [Sliced, Loop, Wrapper, Both, Optional])
def test_folding_keeps_the_function(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = to_agc(make()).eval()
    assert any(isinstance(m, AGC2d) for m in model.modules())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(fold(model)(x), model(x))


def test_the_report_says_what_would_help() -> None:
    _, report = to_agc(Loop(), report=True)
    assert "neither followed nor seen with an example" in str(report)


class ByKeyword(Pair):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(input=self.conv(input=x))
        return y


def test_layers_may_be_called_by_keyword() -> None:
    _, report = to_agc(ByKeyword(), example=torch.randn(1, 3, 8, 8), report=True)
    assert report.count("fused") == 1


def test_fixed_filters_are_left_alone() -> None:
    model = Pair()
    weight = model.conv.weight.detach()
    del model.conv.weight
    model.conv.register_buffer("weight", weight)
    _, report = to_agc(model, report=True)
    assert "the convolution's filters are no parameter" in str(report)
    assert isinstance(model.norm, AGC2d)

"""Dataflow tracing: hidden consumers of a convolution must not change the function."""

import math
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, fold, to_agc
from deepcontrol.convert.dataflow import trace_dataflow
from tests.convert.networks import Untraceable, agc_layers, row


class Sliced(nn.Module):
    """Calls a slice of its Sequential, which is a new module."""

    def __init__(self) -> None:
        super().__init__()
        self.block = row(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block[0](x)
        return y + self.block[1:](y)


class Loop(nn.Module):
    """Cannot be traced, and adds up the outputs of all layers of its Sequential."""

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
    """Cannot be traced, and calls the layers of its child separately."""

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
    """Uses the convolution's output a second time in eval mode only."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        y: Tensor = self.norm(z)
        return y if self.training else y + z


class Optional(Pair):
    """Uses the convolution's output a second time if an argument is omitted."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        z = self.conv(x)
        y: Tensor = self.norm(z)
        return y + z if target is None else y - target


def patched() -> nn.Module:
    """A forward that is set on the instance, not on the class."""
    model = Pair()
    model.forward = types.MethodType(Both.forward, model)  # type: ignore[method-assign]
    return model


MODELS: list[Callable[[], nn.Module]] = [Sliced, Loop, Wrapper, Both, Optional, patched]


def random_statistics(model: nn.Module) -> nn.Module:
    """Give the BatchNorms random statistics, as if the model were trained."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.weight)
    return model


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_example", [True, False])
def test_conversion_preserves_the_outputs(
    make: Callable[[], nn.Module], training: bool, with_example: bool
) -> None:
    torch.manual_seed(0)
    model = random_statistics(make()).eval()
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    to_agc(model.train(training), init="bn", example=x if with_example else None)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    torch.testing.assert_close(model.eval()(x), before)


@pytest.mark.parametrize("make", [Sliced, Loop, Wrapper, Both, Optional])
def test_folding_preserves_the_outputs(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = to_agc(make()).eval()
    assert any(isinstance(m, AGC2d) for m in model.modules())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(fold(model)(x), model(x))


def test_report_recommends_an_example() -> None:
    _, report = to_agc(Loop(), report=True)
    assert "could not trace what calls the convolution; pass example=" in str(report)


class ByKeyword(Pair):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(input=self.conv(input=x))
        return y


def test_layers_called_by_keyword_are_fused() -> None:
    _, report = to_agc(ByKeyword(), example=torch.randn(1, 3, 8, 8), report=True)
    assert report.count("fused") == 1


def test_a_pooling_called_by_keyword_is_found() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.adaptive_avg_pool1d(input=self.norm(x), output_size=1)

    model = Pooled()
    assert trace_dataflow(model, [model.norm]).feeds_global_pool(model.norm)


def test_filters_in_a_buffer_are_not_fused() -> None:
    model = Pair()
    weight = model.conv.weight.detach()
    del model.conv.weight
    model.conv.register_buffer("weight", weight)
    _, report = to_agc(model, report=True)
    assert "the convolution's weight is not a parameter" in str(report)
    assert isinstance(model.norm, AGC2d)


def test_both_sides_of_a_branch_are_traced() -> None:
    """A second consumer on one side of an `if` prevents the fusion."""

    class Branch(nn.Module):
        def __init__(self, deep: bool) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.deep = deep

        def forward(self, x: Tensor) -> Tensor:
            z = self.conv(x)
            if x.shape[-1] > 100:
                if self.deep and x.shape[-2] > 100:
                    return self.bn(z) + z
                return self.bn(z).relu()
            return self.bn(z)

    assert agc_layers(to_agc(Branch(deep=False))) == {"conv": "AGCConv2d none"}
    assert agc_layers(to_agc(Branch(deep=True))) == {"bn": "AGC2d"}


def test_tracing_a_data_dependent_loop_ends() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            while x.abs().max() > 1:
                x = self.bn(self.conv(x)) / 2
            return x

    assert agc_layers(to_agc(Loop())) == {"bn": "AGC2d"}


def test_tracing_leaves_no_proxy_in_the_model() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = row(3, 8)
            self.cache: dict[str, object] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.cache["last"] = y = self.layers(x)
            return y

    model = to_agc(Caching())
    assert model.cache == {}
    assert agc_layers(model) == {"layers.0": "AGCConv2d relu"}


class ReadsTheFilter(nn.Module):
    """Reads the filter of its convolution by name, in addition to calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + self.conv.weight.sum()


def test_convolution_with_a_filter_read_by_name_is_not_fused() -> None:
    assert list(agc_layers(to_agc(ReadsTheFilter()))) == ["bn"]


class Auxiliary(nn.Module):
    """Has a head that runs in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = row(3, 8), row(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return y + self.head(y) if self.training else y


def test_example_confirms_untraced_calls() -> None:
    model = to_agc(Untraceable(), example=torch.randn(1, 3, 8, 8))
    assert agc_layers(model) == {
        "blocks.0.0": "AGCConv2d relu",
        "blocks.1.0": "AGCConv2d relu",
        "decide.1": "AGCConv2d relu",
        "bn": "AGC2d",  # untraced code may call the convolution separately
    }


class Reaching(nn.Module):
    """Cannot be traced, and calls the convolution of its child separately."""

    def __init__(self) -> None:
        super().__init__()
        self.part = row(3, 8)
        self.conv = self.part[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.conv(x) if x.sum() > -1e9 else self.part(x)


def test_training_only_and_separately_called_layers() -> None:
    assert list(agc_layers(to_agc(Auxiliary().eval()))) == ["stem.0", "head.0"]
    # The convolution of Reaching has another consumer, so it is not fused.
    assert list(agc_layers(to_agc(Reaching()))) == ["part.1"]


class AsksForLengths(nn.Module):
    """Code that a Proxy without values refuses: ranks, and iteration over parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = row(3, 8), row(4, 6)
        self.gate = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))
        self.last = nn.Conv2d(6, 6, 1)
        self.last_norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if mask is not None:
            x = x * mask
        x = self.second(sum(x.split(4, dim=1)))
        pooled = x.mean([2, 3], keepdim=True)
        keep = torch.ones([x.shape[0]] + [1] * (len(x.shape) - 1))
        x = keep * x * self.gate(pooled)
        return self.last_norm(self.last(x)) if self.training else self.last_norm(self.last(x)) + x


def test_an_example_answers_for_lengths() -> None:
    x = torch.randn(1, 3, 9, 9)
    fused = {"first.0", "second.0", "gate.0", "last"}
    without = agc_layers(to_agc(AsksForLengths()))
    assert not fused & set(without)
    model = AsksForLengths().eval()
    before = {name: a.clone() for name, a in model.state_dict().items()}
    state, calls = torch.get_rng_state(), (nn.Module.__call__, nn.Module.__getattr__)
    flow = trace_dataflow(model, [model.last_norm], x)
    assert flow.sole_producer(model.last_norm) is model.last
    assert torch.equal(torch.get_rng_state(), state)
    assert (nn.Module.__call__, nn.Module.__getattr__) == calls
    for name, a in model.state_dict().items():
        assert torch.equal(a, before[name])
    converted, report = to_agc(model, example=x, report=True)
    assert set(agc_layers(converted)) == fused
    assert report.unverified is None
    assert report.count("fused") == 4


class BranchesOnValues(AsksForLengths):
    """The example takes one branch; in the other one the convolution has another consumer."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.second(sum(self.first(x).split(4, dim=1)))
        y = self.last(x)
        if x.sum() > -1:
            return self.last_norm(y)
        return y


def test_both_branches_count_although_the_example_takes_one() -> None:
    model, report = to_agc(BranchesOnValues(), example=torch.randn(1, 3, 9, 9), report=True)
    assert agc_layers(model)["last_norm"] == "AGC2d"
    assert "other consumers" in str(report)

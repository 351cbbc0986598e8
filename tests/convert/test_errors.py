"""Error messages of to_agc, fold and calibrate; the model is unchanged after an error."""

import pytest
import torch
from torch import nn

from deepcontrol import AGCConv2d, calibrate, fold, to_agc
from tests.convert.networks import row


def without_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False))


def frozen() -> nn.Module:
    return row(3, 8).requires_grad_(False)


class FrozenBatchNorm2d(nn.Module):
    """A class with the name of torchvision's."""


@pytest.mark.parametrize(
    ("model", "init", "message"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 8, 3)),
            "paper",
            "no BatchNorm in Sequential: there is nothing",
        ),
        (nn.Sequential(FrozenBatchNorm2d()), "paper", "'0' is a frozen BatchNorm"),
        (frozen(), "scratch", r"'1' \(BatchNorm2d\) is frozen .*of init='scratch'"),
        (frozen(), "paper", r"'1' \(BatchNorm2d\) is frozen \(requires_grad=False\).*init='bn'"),
        (without_statistics(), "bn", r"'1' \(BatchNorm2d\) has no running statistics"),
        (without_statistics(), "centered", r"statistics .*which init='centered' needs"),
        (nn.Sequential(nn.LazyBatchNorm2d()), "paper", r"'0' \(LazyBatchNorm2d\) is not init"),
        (
            nn.Sequential(nn.LazyConv2d(8, 3), nn.BatchNorm2d(8)),
            "bn",
            r"'0' \(LazyConv2d\) is not initialized yet: run the model once",
        ),
        (row(3, 8), "zero", "unknown init 'zero': choose one of scratch, paper, bn"),
    ],
    ids=[
        *("none", "frozen class", "frozen", "frozen, paper", "no statistics"),
        *("no statistics, centered", "lazy", "lazy conv", "init"),
    ],
)
def test_unconvertible_models_raise(model: nn.Module, init: str, message: str) -> None:
    layers = list(model.modules())
    with pytest.raises(ValueError, match=message):
        to_agc(model, init=init)
    assert list(model.modules()) == layers


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_raise() -> None:
    scripted = torch.jit.script(row(3, 8))
    with pytest.raises(ValueError, match=r"the model is scripted.*convert the model before it"):
        to_agc(scripted)
    with pytest.raises(ValueError, match=r"'0.* is scripted"):
        to_agc(nn.Sequential(scripted))
    with pytest.raises(ValueError, match="scripted"):
        fold(scripted)


def test_distributed_data_parallel_raises() -> None:
    """DistributedDataParallel registers parameters when it wraps a model."""
    wrapper = nn.parallel.DistributedDataParallel
    with pytest.raises(ValueError, match="before DistributedDataParallel"):
        to_agc(wrapper.__new__(wrapper))


def test_init_bn_keeps_frozen_parameters_frozen() -> None:
    model = to_agc(frozen(), init="bn")
    assert not any(p.requires_grad for p in model.parameters())


def test_error_on_a_later_layer_leaves_the_model_unchanged() -> None:
    model = nn.Sequential(row(3, 8), frozen())
    layers = list(model.modules())
    with pytest.raises(ValueError, match=r"'1\.1'"):
        to_agc(model)
    assert list(model.modules()) == layers


def test_fold_without_agc_layers_raises() -> None:
    with pytest.raises(ValueError, match="no AGC layer in Sequential: convert it with"):
        fold(row(3, 8))


def test_calibrate_without_data_raises() -> None:
    with pytest.raises(ValueError, match="no data"):
        calibrate(AGCConv2d(3, 8, 3), [])

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Conv2d(3, 8, 3), AGCConv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    with pytest.raises(ValueError, match="never reached 'idle' or any other"):
        calibrate(Skips(), [torch.randn(1, 3, 9, 9)])


def test_folded_layers_reject_wrong_inputs() -> None:
    with pytest.raises(ValueError, match=r"expected 3 channels, got 4 .*\(1, 4, 9, 9\)"):
        fold(AGCConv2d(3, 8, 3))(torch.randn(1, 4, 9, 9))


def test_a_class_is_not_a_model() -> None:
    with pytest.raises(TypeError, match=r"expected a model .*Conv2d.*: create it first"):
        to_agc(nn.Conv2d)  # type: ignore[call-overload]

"""Networks by name, and the fully connected network."""

import pytest
import torch
from torch import nn

from deepcontrol import AGCLinear
from deepcontrol.workbench.models import MLP, MODELS, CifarResNet, build, task_of
from deepcontrol.workbench.models.classifiers import MLP_NORMS


@pytest.mark.parametrize("name", MODELS)
def test_every_name(name: str) -> None:
    with torch.device("meta"):
        size = (32,) * (3 if name == "unet3d" else 2)
        output = build(name, 5, "agc")(torch.empty(2, 3, *size))
    if task_of(name) == "classification":
        assert output.shape == (2, 5)
    else:
        assert getattr(output, "classes", output).shape == (2, 5, *size)


def test_names_choose_depth_and_shortcuts() -> None:
    with torch.device("meta"):
        for name, blocks in (("resnet110", 54), ("plain110", 54), ("plain56", 27)):
            model = build(name, 10, "bn")
            assert isinstance(model, CifarResNet)
            assert len(model.stages) == blocks
            assert hasattr(model.stages[0], "branch") == name.startswith("resnet")


def test_width_channels_and_size() -> None:
    with torch.device("meta"):
        x = torch.empty(2, 1, 28, 20)
        mlp = build("mlp", 5, "ln", width=0.25, in_channels=1, size=(28, 20))
        assert mlp(x).shape == (2, 5)
        assert [m.out_features for m in mlp.modules() if isinstance(m, nn.Linear)] == [128] * 3 + [
            5
        ]
        narrow = build("resnet20", 5, "gn", width=0.5, in_channels=1)
        assert narrow(x).shape == (2, 5)
        assert narrow.classify.in_features == 32


def test_unsupported_values_raise() -> None:
    with pytest.raises(
        ValueError, match=r"unknown network 'vgg'.*segnet, classnet, unet, unet3d, resnet20"
    ):
        build("vgg", 10, "bn")
    with pytest.raises(ValueError, match="unknown network 'vgg'"):
        task_of("vgg")
    for name in ("segnet", "classnet", "resnet50"):
        with pytest.raises(ValueError, match=f"{name} needs images with 3 channels, got 1"):
            build(name, 10, "bn", in_channels=1)
    with pytest.raises(ValueError, match=r"expected --width 1, got 0\.5"):
        build("resnet50", 10, "bn", width=0.5)


@pytest.mark.parametrize("norm", MLP_NORMS)
def test_mlp_trains(norm: str) -> None:
    torch.manual_seed(0)
    model = MLP(4, norm, 48, (32, 32))  # type: ignore[arg-type]
    assert any(isinstance(m, AGCLinear) for m in model.modules()) == (norm == "agc")
    x, labels = torch.randn(16, 3, 4, 4), torch.arange(16) % 4
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 < losses[0]


def test_mlp_refuses_norms_of_maps_and_other_sizes() -> None:
    with pytest.raises(ValueError, match=r"'gn' is not defined.*agc, bn, ln, none"):
        MLP(norm="gn")
    with pytest.raises(ValueError, match=r"784 values each, got \(2, 3, 28, 28\)"):
        MLP()(torch.randn(2, 3, 28, 28))

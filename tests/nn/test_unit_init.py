"""unit_init_: every neuron activates maps of variance 1, however deep it lies."""

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d, he_init_, unit_init_
from deepcontrol.nn.unit_init import OUTPUTS
from deepcontrol.workbench.models import ClassNet, SegNet

DEPTH = 26  # SegNet's


def deep() -> nn.Sequential:
    return nn.Sequential(
        *(AGCConv2d(3 if i == 0 else 32, 32, 3, padding=1) for i in range(DEPTH)),
        nn.Conv2d(32, 5, 1),
    )


def activated(model: nn.Module, x: Tensor) -> list[float]:
    """The deviation of what each neuron activates."""
    found: list[float] = []

    def look(layer: AGCConv2d, inputs: tuple[Tensor], _: object) -> None:
        z = layer._convolved(inputs[0])
        centered = z - layer.mean_scale[:, None, None] * z.mean((2, 3), keepdim=True)
        found.append(centered.std().item())

    hooks = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, AGCConv2d)]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def test_a_deep_network_keeps_its_signal() -> None:
    torch.manual_seed(0)
    images = 3 * torch.randn(2, 3, 32, 32) + 1
    model = he_init_(deep())
    assert activated(model, images)[-1] < 0.1  # what this is for
    ends = model[-1].weight.detach().std()
    assert unit_init_(model, images, outputs=[model[-1]]) is model
    assert activated(model, images) == pytest.approx([1.0] * DEPTH, rel=1e-3)
    assert model[-1].weight.std().item() == pytest.approx(OUTPUTS * ends.item(), rel=0.2)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("network", [SegNet, ClassNet])
def test_the_papers_networks(network: type[nn.Module]) -> None:
    images = torch.randn(2, 3, 256, 256)
    model = unit_init_(network(classes=5, width=0.125), images)
    deviations = activated(model, images)
    assert len(deviations) > 20
    assert deviations == pytest.approx([1.0] * len(deviations), rel=1e-3)


def test_layers_in_batchnorms_place_and_modules_used_twice() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), AGC2d(8), nn.ReLU())
    model = nn.Sequential(block, block, AGC2d(8, affine=False))
    images = 5 * torch.randn(2, 8, 16, 16)
    unit_init_(model, images)
    assert model[0][:2](images).std().item() == pytest.approx(1.0, rel=1e-3)


def test_a_weight_that_is_computed() -> None:
    neuron = nn.utils.parametrizations.weight_norm(AGCConv2d(3, 8, 3, activation="none"))
    images = 5 * torch.randn(2, 3, 16, 16)
    unit_init_(neuron, images)
    assert neuron(images).std().item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*one position")
def test_nothing_is_blown_up_where_nothing_is_left() -> None:
    """On single positions AGC leaves rounding errors, which are no signal."""
    neuron = AGCConv2d(8, 8, 1)
    before = he_init_(neuron, torch.Generator().manual_seed(0)).weight.detach().clone()
    unit_init_(neuron, torch.randn(4, 8, 1, 1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(neuron.weight, before)

"""He fan-in, identity and unit-variance initialization of whole models."""

import math

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import (
    AGC2d,
    AGCConv2d,
    AGCLinear,
    branch_gain,
    he_init_,
    identity_init_,
    unit_init_,
)
from deepcontrol.nn.init import OUTPUT_SCALE
from deepcontrol.workbench.models import ClassNet, SegNet

DEPTH = 26  # number of convolutions in SegNet


def network() -> nn.Sequential:
    return nn.Sequential(
        AGCConv2d(3, 64, 3, padding=1),
        AGCConv2d(64, 64, 3, padding=1),
        nn.MaxPool2d(2),
        AGCConv2d(64, 64, 3, padding=1),
        AGCConv2d(64, 64, 3, padding=1),
        AGCConv2d(64, 128, 3, padding=1),
        AGCConv2d(128, 128, 3, padding=1, stride=2),
        AGCConv2d(128, 128, 3, padding=1),
        AGCConv2d(128, 128, 3, padding=1, groups=4),
        nn.Conv2d(128, 128, 1),
        AGC2d(128),
        AGCLinear(128, 10, activation="none"),
    )


def overwrite(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)


def test_he_init_has_he_fan_in_variance() -> None:
    model = network()
    overwrite(model)
    assert he_init_(model) is model
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            fan_in = math.prod(parameter.shape[1:])
            gain = 1 if name.startswith("11.") else 2
            assert parameter.std().item() == pytest.approx(math.sqrt(gain / fan_in), rel=0.1), name
        else:
            start = 0.0 if name.endswith("bias") else 1.0
            assert torch.equal(parameter, torch.full_like(parameter, start)), name


def test_he_init_preserves_the_second_moment_at_lambda_0() -> None:
    """Through ten ReLU layers the second moment stays of order 1."""
    model = nn.Sequential(*(AGCConv2d(64, 64, 3, padding=1) for _ in range(10)))
    he_init_(model)
    for layer in model:
        nn.init.zeros_(layer.mean_scale)
    ratio = model(torch.randn(1, 64, 32, 32)).square().mean().item()
    assert 0.1 < ratio < 10


def test_he_init_preserves_the_variance_through_a_transposed_convolution() -> None:
    layer = nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, groups=2)
    he_init_(layer)
    y = layer(torch.relu(torch.randn(2, 64, 32, 32)))
    assert y.var().item() == pytest.approx(1.0, rel=0.15)


def test_identity_init_skips_the_first_layer_after_a_pooling() -> None:
    model = network()
    overwrite(model)
    assert identity_init_(model) is model

    def is_identity(layer: nn.Conv2d) -> bool:
        expected = nn.init.dirac_(torch.empty_like(layer.weight), layer.groups)
        return torch.equal(layer.weight, expected)

    found = [
        i for i, layer in enumerate(model) if isinstance(layer, nn.Conv2d) and is_identity(layer)
    ]
    # 0 is the first layer, 3 follows the pooling, 5 widens, 6 is strided, 7 follows 6.
    assert found == [1, 4, 8, 9]


def test_identity_layers_return_their_input() -> None:
    model = identity_init_(nn.Sequential(*(AGCConv2d(8, 8, 3, padding=1) for _ in range(4))))
    for layer in model:
        nn.init.zeros_(layer.mean_scale)
    x = torch.rand(1, 8, 6, 6)
    first = model[0](x)
    assert torch.equal(model(x), first)


def test_he_init_resets_agc_layers_and_skips_embeddings() -> None:
    layer = AGC2d(3)
    overwrite(layer)
    he_init_(layer)
    assert torch.equal(layer.mean_scale, torch.ones(3))
    table = nn.Embedding(4, 5)
    before = table.weight.clone()
    he_init_(nn.Sequential(table))
    assert torch.equal(table.weight, before)


def test_he_init_sets_parametrized_weights() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(64, 64, 3))
    he_init_(layer)
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 576), rel=0.05)


def test_generator_determines_the_filters() -> None:
    weights = []
    for seed in (1, 1, 2):
        model = network()
        he_init_(model, torch.Generator().manual_seed(seed))
        weights.append(model[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def deep() -> nn.Sequential:
    return nn.Sequential(
        *(AGCConv2d(3 if i == 0 else 32, 32, 3, padding=1) for i in range(DEPTH)),
        nn.Conv2d(32, 5, 1),
    )


def pre_activation_stds(model: nn.Module, x: Tensor) -> list[float]:
    """Standard deviation of the pre-activation of each AGCConv2d, in call order."""
    found: list[float] = []

    def record(layer: AGCConv2d, inputs: tuple[Tensor], _: object) -> None:
        filters = layer.gain[:, None, None, None] * layer.weight
        z = nn.functional.conv2d(inputs[0], filters, None, layer.stride, layer.padding)
        centered = z - layer.mean_scale[:, None, None] * z.mean((2, 3), keepdim=True)
        found.append(centered.std().item())

    hooks = [m.register_forward_hook(record) for m in model.modules() if isinstance(m, AGCConv2d)]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def test_unit_init_gives_unit_pre_activations_at_any_depth() -> None:
    torch.manual_seed(0)
    images = 3 * torch.randn(2, 3, 32, 32) + 1
    model = he_init_(deep())
    assert pre_activation_stds(model, images)[-1] < 0.1  # He fan-in loses the signal
    output_std = model[-1].weight.detach().std()
    assert unit_init_(model, images, outputs=[model[-1]]) is model
    assert pre_activation_stds(model, images) == pytest.approx([1.0] * DEPTH, rel=1e-3)
    assert model[-1].weight.std().item() == pytest.approx(OUTPUT_SCALE * output_std.item(), rel=0.2)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("network", [SegNet, ClassNet])
def test_unit_init_of_the_papers_networks(network: type[nn.Module]) -> None:
    images = torch.randn(2, 3, 256, 256)
    model = unit_init_(network(classes=5, width=0.125), images)
    stds = pre_activation_stds(model, images)
    assert len(stds) > 20
    assert stds == pytest.approx([1.0] * len(stds), rel=1e-3)


def test_unit_init_scales_agc_layers_and_shared_modules_once() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), AGC2d(8), nn.ReLU())
    model = nn.Sequential(block, block, AGC2d(8, affine=False))
    images = 5 * torch.randn(2, 8, 16, 16)
    unit_init_(model, images)
    assert model[0][:2](images).std().item() == pytest.approx(1.0, rel=1e-3)


def test_unit_init_sets_parametrized_weights() -> None:
    neuron = nn.utils.parametrizations.weight_norm(AGCConv2d(3, 8, 3, activation="none"))
    images = 5 * torch.randn(2, 3, 16, 16)
    unit_init_(neuron, images)
    assert neuron(images).std().item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*one position")
def test_unit_init_does_not_amplify_rounding_errors() -> None:
    """On 1x1 maps AGC leaves only rounding errors, which must not be scaled to variance 1."""
    neuron = AGCConv2d(8, 8, 1)
    before = he_init_(neuron, torch.Generator().manual_seed(0)).weight.detach().clone()
    unit_init_(neuron, torch.randn(4, 8, 1, 1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(neuron.weight, before)


def test_branch_gain_bounds_the_variance_over_depth() -> None:
    """Blocks x + gain * f(x) with f(x) of the variance of x."""
    for blocks in (1, 8, 54, 1000):
        variance = (1 + branch_gain(blocks) ** 2) ** blocks
        assert 2 <= variance < math.e
    assert branch_gain(0) == 1
    with pytest.raises(ValueError, match="0 or more, got -1"):
        branch_gain(-1)

"""He fan-in and the identity variant over whole models."""

import math

import pytest
import torch
from torch import nn

from deepcontrol import AGC2d, AGCConv2d, AGCLinear, he_init_, identity_init_


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


def spoil(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)


def test_he_fan_in() -> None:
    model = network()
    spoil(model)
    assert he_init_(model) is model
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            fan_in = math.prod(parameter.shape[1:])
            gain = 1 if name.startswith("11.") else 2
            assert parameter.std().item() == pytest.approx(math.sqrt(gain / fan_in), rel=0.1), name
        else:
            start = 0.0 if name.endswith("bias") else 1.0
            assert torch.equal(parameter, torch.full_like(parameter, start)), name


def test_he_keeps_the_signal_without_subtraction() -> None:
    """What He fan-in is for: ten ReLU layers, and the second moment stays of order 1."""
    model = nn.Sequential(*(AGCConv2d(64, 64, 3, padding=1) for _ in range(10)))
    he_init_(model)
    for layer in model:
        nn.init.zeros_(layer.mean_scale)
    ratio = model(torch.randn(1, 64, 32, 32)).square().mean().item()
    assert 0.1 < ratio < 10


def test_transposed_convolution_keeps_the_signal_too() -> None:
    layer = nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, groups=2)
    he_init_(layer)
    y = layer(torch.relu(torch.randn(2, 64, 32, 32)))
    assert y.var().item() == pytest.approx(1.0, rel=0.15)


def test_identity_in_all_layers_but_the_first_after_a_pooling() -> None:
    model = network()
    spoil(model)
    assert identity_init_(model) is model

    def is_identity(layer: nn.Conv2d) -> bool:
        expected = nn.init.dirac_(torch.empty_like(layer.weight), layer.groups)
        return torch.equal(layer.weight, expected)

    found = [
        i for i, layer in enumerate(model) if isinstance(layer, nn.Conv2d) and is_identity(layer)
    ]
    # 0 is first, 3 follows the pooling, 5 widens, 6 is strided itself and 7 follows it.
    assert found == [1, 4, 8, 9]


def test_identity_passes_maps_through() -> None:
    model = identity_init_(nn.Sequential(*(AGCConv2d(8, 8, 3, padding=1) for _ in range(4))))
    for layer in model:
        nn.init.zeros_(layer.mean_scale)
    x = torch.rand(1, 8, 6, 6)
    first = model[0](x)
    assert torch.equal(model(x), first)


def test_every_layer_but_embeddings_starts_over() -> None:
    layer = AGC2d(3)
    spoil(layer)
    he_init_(layer)
    assert torch.equal(layer.mean_scale, torch.ones(3))
    table = nn.Embedding(4, 5)
    before = table.weight.clone()
    he_init_(nn.Sequential(table))
    assert torch.equal(table.weight, before)


def test_a_weight_that_is_computed_is_set_too() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(64, 64, 3))
    he_init_(layer)
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 576), rel=0.05)


def test_a_generator_decides() -> None:
    weights = []
    for seed in (1, 1, 2):
        model = network()
        he_init_(model, torch.Generator().manual_seed(seed))
        weights.append(model[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])

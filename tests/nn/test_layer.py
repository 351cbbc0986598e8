"""Shared behavior of the AGC layers: one torch.fx node per layer, a warning on 1x1 maps."""

import warnings

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune

from deepcontrol import (
    AGC1d,
    AGC2d,
    AGC3d,
    AGCConv1d,
    AGCConv2d,
    AGCConv3d,
    AGCConvTranspose2d,
    AGCLinear,
    fold,
)
from deepcontrol.convert import calibrate
from deepcontrol.nn import AGCConvPool2d

LAYERS_AND_SHAPES = [
    (AGC1d(4), (2, 4, 9)),
    (AGC2d(4), (2, 4, 9, 7)),
    (AGC3d(4), (2, 4, 3, 9, 7)),
    (AGCConv1d(4, 5, 3), (2, 4, 9)),
    (AGCConv2d(4, 5, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 7)),
    (AGCConv2d(4, 5, 3, stride=2, activation="silu"), (4, 9, 7)),  # without a batch
    (AGCConv3d(4, 5, 3, groups=1), (1, 4, 3, 9, 7)),
    (AGCConvTranspose2d(4, 5, 2, stride=2), (2, 4, 9, 7)),
    (AGCLinear(4, 5), (2, 4)),
]


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize(("layer", "shape"), LAYERS_AND_SHAPES, ids=lambda a: type(a).__name__)
def test_fx_records_one_node_per_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    traced = fx.symbolic_trace(nn.Sequential(layer, nn.Tanh()))
    assert targets(traced) == ["0", "1"]
    x = torch.randn(*shape)
    torch.testing.assert_close(traced(x), layer(x).tanh(), rtol=0, atol=0)


class Network(nn.Module):
    """Layers at several depths, one of them called twice and by keyword, and a pooling layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(AGCConv2d(3, 6, 3, padding=1), AGC2d(6))
        self.twice = AGCConv2d(6, 6, 3, padding=1)
        self.pool = AGCConvPool2d(6, 6, 3, padding=1)
        self.head = AGCLinear(6, 2, activation="none")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.twice(input=self.twice(x))
        pooled, _ = self.pool(x)
        return self.head(pooled.mean((2, 3)))


def test_traced_model_has_the_same_outputs_and_gradients() -> None:
    model, x = Network().double(), torch.randn(2, 3, 8, 10, dtype=torch.double)
    traced = fx.symbolic_trace(model)
    assert targets(traced) == ["first.0", "first.1", "twice", "twice", "pool", "head"]
    g = torch.randn(2, 2, dtype=torch.double)
    expected = torch.autograd.grad(model(x), [*model.parameters()], g)
    found = torch.autograd.grad(traced(x), [*traced.parameters()], g)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert targets(fx.symbolic_trace(traced)) == targets(traced)  # retracing


def test_nodes_carry_their_module_path() -> None:
    """torchvision's feature extraction names its features by nn_module_stack."""
    for node in fx.symbolic_trace(Network()).graph.nodes:
        if node.op == "call_module":
            (*_, (path, _)) = node.meta["nn_module_stack"].values()
            assert path == node.target


@torch.no_grad()
def test_folded_and_calibrated_models_are_traceable() -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 10)
    for copy in (fold(model), calibrate(model, [x])):
        traced = fx.symbolic_trace(copy)
        torch.testing.assert_close(traced(x), copy(x), rtol=0, atol=0)


class Doubled(AGCConv2d):
    """A user's subclass with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(nn.functional.pad(input, (1, 1, 1, 1)))


def test_hooks_and_subclass_forwards_run_once() -> None:
    """They run inside the node and are not traced into the graph as well."""
    layer = Doubled(4, 4, 3)
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    layer.register_forward_hook(lambda module, inputs, output: output * 3)
    model, x = nn.Sequential(layer), torch.randn(2, 4, 6, 6)
    traced = fx.symbolic_trace(model)
    assert targets(traced) == ["0"]
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)


def test_tracing_leaves_pruned_filters_as_tensors() -> None:
    layer, x = AGCConv2d(4, 4, 3), torch.randn(2, 4, 6, 6)
    prune.l1_unstructured(layer, "weight", amount=0.5)
    model = nn.Sequential(layer)
    traced = fx.symbolic_trace(model)
    assert isinstance(layer.weight, Tensor)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)


ON_SINGLE_POSITIONS = {
    "AGC2d": (lambda: AGC2d(4), (2, 4, 1, 1)),
    "AGC2d without affine": (lambda: AGC2d(4, affine=False), (2, 4, 1, 1)),
    "AGC1d": (lambda: AGC1d(4), (2, 4)),
    "AGCConv2d": (lambda: AGCConv2d(4, 4, 3), (2, 4, 3, 3)),
    "AGCLinear": (lambda: AGCLinear(4, 1), (2, 4)),
}


@pytest.mark.parametrize("name", ON_SINGLE_POSITIONS)
def test_single_position_maps_warn_once_with_a_remedy(name: str) -> None:
    make, shape = ON_SINGLE_POSITIONS[name]
    layer = make()
    with pytest.warns(UserWarning, match=f"{name.split()[0]} got maps of one position.*mean_scale"):
        y = layer(torch.randn(shape))
    assert not y.any()
    layer(torch.randn(shape))  # pytest turns a second warning into an error


@pytest.mark.parametrize("name", ON_SINGLE_POSITIONS)
def test_no_warning_in_eval_mode_or_at_lambda_0_or_on_larger_maps(name: str) -> None:
    make, shape = ON_SINGLE_POSITIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().eval()(torch.randn(shape))
        layer = make()
        if layer.mean_scale is not None:
            nn.init.zeros_(layer.mean_scale)
            layer(torch.randn(shape))
    if name == "AGCConv2d":
        make()(torch.randn(2, 4, 5, 5))


@pytest.mark.parametrize(
    ("plain", "converted"),
    [(nn.Conv2d(3, 4, 3, bias=False), AGCConv2d(3, 4, 3)), (nn.Linear(3, 4), AGCLinear(3, 4))],
)
def test_state_dict_of_the_model_before_its_conversion_is_explained(
    plain: nn.Module, converted: nn.Module
) -> None:
    state = nn.Sequential(plain).state_dict()
    model = nn.Sequential(converted)
    with pytest.warns(UserWarning, match=r"as a model has before to_agc.*init=\"bn\""):
        model.load_state_dict(state, strict=False)
    assert torch.equal(model[0].weight, plain.weight)
    with (
        pytest.warns(UserWarning, match="Load it before the conversion"),
        pytest.raises(RuntimeError, match=r"Missing key.*0\.gain"),
    ):
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())  # its own: no warning, which would be an error

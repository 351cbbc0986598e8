"""weight_norm and weight_standardization: the function, its gradients, what reads the filters."""

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from deepcontrol import (
    AGCConv1d,
    AGCConv2d,
    AGCConv3d,
    AGCLinear,
    calibrate,
    fold,
    he_init_,
    identity_init_,
    unit_init_,
)
from deepcontrol.nn import AGCConvPool2d, SharedMeans, saved_bytes
from deepcontrol.ops import max_pool2x2, reference
from deepcontrol.ops.activation import ACTIVATIONS
from deepcontrol.workbench.train.evaluate import unpooled

NORMALIZED, STANDARDIZED = {"weight_norm": True}, {"weight_standardization": True}
BOTH = pytest.mark.parametrize(
    "option", [NORMALIZED, STANDARDIZED], ids=["normalized", "standardized"]
)
NEURONS = {1: (AGCConv1d, (9,)), 2: (AGCConv2d, (7, 6)), 3: (AGCConv3d, (4, 5, 4))}


def randomize(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def plain(neuron: nn.Module) -> nn.Module:
    """Return a neuron with plain filters: the normalized ones of the given neuron."""
    other = copy.deepcopy(neuron)
    other.weight_norm = other.weight_standardization = False
    norm = 1.0 if neuron.activation == "none" else math.sqrt(2)
    with torch.no_grad():
        if getattr(neuron, "weight_standardization", False):
            other.weight.sub_(
                other.weight.flatten(1)
                .mean(1)
                .reshape(other.gain.shape + (1,) * (other.weight.dim() - 1))
            )
        size = torch.linalg.vector_norm(other.weight.flatten(1), dim=1)
        other.weight.mul_((norm / size).reshape(-1, *(1,) * (neuron.weight.dim() - 1)))
    return other


def gradients(neuron: nn.Module, x: Tensor, g: Tensor | None = None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = neuron(x)
    y = y[0] if isinstance(y, tuple) else y
    if g is None:
        g = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
    return [y, *torch.autograd.grad(y, [x, *neuron.parameters()], g)]


@BOTH
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("d", NEURONS)
def test_equals_a_plain_neuron_with_normalized_filters(
    d: int, groups: int, activation: str, option: dict[str, bool]
) -> None:
    kind, size = NEURONS[d]
    neuron = kind(4, 6, 3, padding=1, groups=groups, activation=activation, **option)
    neuron = randomize(neuron).double()
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    torch.testing.assert_close(neuron(x), plain(neuron)(x), rtol=1e-12, atol=1e-12)


@BOTH
@pytest.mark.parametrize("activation", ["relu", "silu", "none"])
@pytest.mark.parametrize("kind", [AGCConv2d, AGCConvPool2d])
def test_scale_of_the_filters_has_no_effect(
    kind: type[AGCConv2d], activation: str, option: dict[str, bool]
) -> None:
    """Scaling W changes no output, and the gradient of W is orthogonal to W."""
    neuron = randomize(kind(3, 5, 3, activation=activation, **option)).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    y, dx, dweight, *rest = gradients(neuron, x)
    inner = (neuron.weight * dweight).flatten(1).sum(1)
    size = (neuron.weight.flatten(1).norm(dim=1) * dweight.flatten(1).norm(dim=1)).detach()
    assert size.min() > 0
    assert (inner.abs() / size).max() < 1e-14
    with torch.no_grad():
        neuron.weight.mul_(10)
    y10, dx10, dweight10, *rest10 = gradients(neuron, x)
    pairs = zip((y, dx, dweight, *rest), (y10, dx10, 10 * dweight10, *rest10), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ["relu", "none"])
def test_starts_as_nearly_the_same_function(activation: str) -> None:
    neuron = he_init_(AGCConv2d(64, 32, 3, padding=1, activation=activation, weight_norm=True))
    other = copy.deepcopy(neuron)
    other.weight_norm = False
    x = torch.randn(1, 64, 12, 12)
    torch.testing.assert_close(neuron(x), other(x), rtol=0.1, atol=0.3)
    assert neuron(x).std().item() == pytest.approx(other(x).std().item(), rel=0.02)


@BOTH
@pytest.mark.parametrize("kind", [AGCConv2d, AGCConvPool2d])
def test_paths_agree(
    kind: type[AGCConv2d], monkeypatch: pytest.MonkeyPatch, option: dict[str, bool]
) -> None:
    """The fused neuron, the ops one by one, torch.func, and the path with a shared mean."""
    neuron = randomize(kind(3, 4, 3, padding=1, **option)).double()
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    expected = gradients(neuron, x)
    parameters = dict(neuron.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        y = torch.func.functional_call(neuron, parameters, x)
        y = y[0] if isinstance(y, tuple) else y
        return (y * torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum()

    functional = torch.func.grad(loss)(parameters)
    with torch.no_grad(), SharedMeans(neuron) as shared:
        whole = ((0, 6), (0, 8))
        shared(x, interior=whole)
        shared.end_pass()
        y = shared(x, interior=whole)
    torch.testing.assert_close(y[0] if isinstance(y, tuple) else y, expected[0])
    monkeypatch.setattr("deepcontrol.nn.conv.runs_fused", lambda activation: False)
    unfused = gradients(neuron, x)
    for a, b in zip(unfused, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    for name, b in zip(parameters, expected[2:], strict=True):
        torch.testing.assert_close(functional[name], b, rtol=1e-11, atol=1e-11)


@BOTH
@pytest.mark.parametrize("kind", [AGCConv2d, AGCConvPool2d])
def test_second_derivatives_of_the_fused_neuron(
    kind: type[AGCConv2d], option: dict[str, bool]
) -> None:
    neuron = randomize(kind(2, 3, 2, activation="leaky_relu", **option)).double()
    names = [n for n, _ in neuron.named_parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        for name, value in zip(names, parameters, strict=True):  # functional_call is another path
            delattr(neuron, name) if name in neuron._parameters else None
            setattr(neuron, name, value)
        y = neuron(x)
        return y[0] if isinstance(y, tuple) else y

    x = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, *(p.detach().clone().requires_grad_() for p in neuron.parameters()))
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@BOTH
def test_vmap_over_an_ensemble(option: dict[str, bool]) -> None:
    models = [randomize(AGCConv2d(3, 4, 3, **option)).double() for _ in range(3)]
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    parameters, _ = torch.func.stack_module_state(models)
    together = torch.func.vmap(lambda p: torch.func.functional_call(models[0], p, x))(parameters)
    for a, model in zip(together, models, strict=True):
        torch.testing.assert_close(a, model(x))


@BOTH
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic: bool, device: str, option: dict[str, bool]) -> None:
    torch.compiler.reset()
    model = nn.Sequential(
        AGCConv2d(3, 8, 3, padding=1, **option),
        AGCConv2d(8, 6, 3, stride=2, groups=2, activation="none", **option),
    )
    model = randomize(model).double().to(device)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, device=device)
    g = torch.randn_like(model(x))
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for a, b in zip(gradients(compiled, x, g), gradients(model, x, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@BOTH
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_on_a_gpu(dtype: torch.dtype, compiled: bool, option: dict[str, bool]) -> None:
    torch.compiler.reset()
    neuron = randomize(AGCConv2d(32, 64, 3, padding=1, **option)).cuda()
    x = torch.randn(2, 32, 24, 24, device="cuda")
    g = torch.randn(2, 64, 24, 24, device="cuda")
    exact = copy.deepcopy(neuron).double()
    with torch.no_grad():  # where rounding decides whether a ReLU opens, no gradient is compared
        v = reference.gain_conv(
            x.double(), exact.weight, exact.gain, exact.stride, exact.padding, exact.dilation,
            exact.groups, exact.filter_norm,
        )  # fmt: skip
        g *= reference.center_bias_act(v, exact.bias, exact.mean_scale, "none").abs() > 0.05
    model = torch.compile(neuron, fullgraph=True) if compiled else neuron
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = gradients(model, x, g.to(dtype))
    for a, b in zip(found, gradients(exact, x.double(), g.double()), strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < (0.02 if dtype == torch.bfloat16 else 2e-3), error.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["relu", "silu", "none"])
@pytest.mark.parametrize("kind", [AGCConv2d, AGCConvPool2d])
def test_saves_no_more_for_backward(
    kind: type[AGCConv2d], activation: str, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 3, 8, 8)
    sizes = []
    for option in ({}, NORMALIZED, STANDARDIZED):
        neuron = kind(3, 5, 3, padding=1, activation=activation, **option)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            sizes.append(saved_bytes(neuron, x))
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_filter_of_zeros_learns() -> None:
    neuron = AGCConv2d(2, 3, 3, padding=1, activation="none", weight_norm=True)
    with torch.no_grad():
        neuron.weight[1] = 0
    optimizer = torch.optim.SGD(neuron.parameters(), lr=0.1)
    x = torch.randn(1, 2, 6, 6)
    y = neuron(x)
    assert not y[:, 1].any()
    y.backward(torch.randn_like(y))
    assert all(p.grad.isfinite().all() for p in neuron.parameters())
    assert 0 < neuron.weight.grad[1].norm() < 100
    optimizer.step()
    assert neuron(x)[:, 1].any()


class TestReadersOfTheFilters:
    @BOTH
    @pytest.mark.parametrize("samples", [1, 3])
    @pytest.mark.parametrize("d", NEURONS)
    def test_fold(self, d: int, samples: int, option: dict[str, bool]) -> None:
        kind, size = NEURONS[d]
        model = nn.Sequential(
            kind(3, 4, 3, padding=1, **option),
            kind(4, 4, 3, groups=2, stride=2, padding=1, activation="none", **option),
        )
        model = randomize(model).double()
        x = torch.randn(samples, 3, *size, dtype=torch.float64)
        torch.testing.assert_close(fold(model)(x), model(x), rtol=1e-12, atol=1e-12)

    @BOTH
    def test_calibrate(self, option: dict[str, bool]) -> None:
        neuron = randomize(AGCConv2d(3, 4, 3, **option)).double()
        x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(calibrate(neuron, [x])(x), neuron(x))

    @BOTH
    def test_fold_of_a_pooling_neuron(self, option: dict[str, bool]) -> None:
        neuron = randomize(AGCConvPool2d(3, 4, 3, **option)).double()
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        for a, b in zip(fold(neuron)(x), neuron(x), strict=True):
            torch.testing.assert_close(a, b)

    @BOTH
    def test_layer_stats(self, option: dict[str, bool]) -> None:
        neuron = randomize(AGCConvPool2d(3, 4, 3, **option))
        x = torch.randn(2, 3, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(max_pool2x2(unpooled(neuron, x))[0], neuron(x)[0])

    def test_batchnorm_fuser_raises(self) -> None:
        neuron = AGCConv2d(3, 4, 3, activation="none", weight_norm=True).eval()
        with pytest.raises(NotImplementedError, match=r"AGCConv2d.*weight_norm removes the scale"):
            fuse_conv_bn_eval(neuron, nn.BatchNorm2d(4).eval())


class TestInitialization:
    def test_unit_init_scales_the_gain(self) -> None:
        model = nn.Sequential(
            AGCConv2d(3, 8, 3, padding=1, weight_norm=True),
            AGCConv2d(8, 8, 3, padding=1, activation="none", weight_norm=True),
        )
        images = 5 * torch.randn(2, 3, 16, 16)
        he = he_init_(copy.deepcopy(model), torch.Generator().manual_seed(0))
        unit_init_(model, images, generator=torch.Generator().manual_seed(0))
        assert model(images).std().item() == pytest.approx(1.0, rel=1e-3)
        for layer, before in zip(model, he, strict=True):
            assert torch.equal(layer.weight, before.weight)
            assert not torch.equal(layer.gain, before.gain)

    def test_unit_init_of_an_output_layer(self) -> None:
        layer = AGCLinear(6, 4, activation="none", weight_norm=True)
        unit_init_(layer, torch.randn(3, 6), outputs=[layer])
        torch.testing.assert_close(layer.gain, torch.full((4,), 0.1))

    @pytest.mark.parametrize("activation", ["relu", "none"])
    def test_identity_init(self, activation: str) -> None:
        model = nn.Sequential(
            AGCConv2d(3, 8, 3, padding=1, weight_norm=True),
            AGCConv2d(8, 8, 3, padding=1, groups=2, activation=activation, weight_norm=True),
        )
        layer = identity_init_(model)[1]
        nn.init.zeros_(layer.mean_scale)
        x = torch.rand(1, 8, 6, 6)
        torch.testing.assert_close(layer(x), x)
        assert torch.equal(model[0].gain, torch.ones(8))

    def test_identity_init_leaves_standardized_layers_alone(self) -> None:
        """Centered identity filters are not the identity."""
        model = nn.Sequential(*(AGCConv2d(8, 8, 3, padding=1, **STANDARDIZED) for _ in range(2)))
        layer = identity_init_(model)[1]
        assert (layer.weight != 0).all()


class TestLinear:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_equals_a_plain_layer_with_normalized_rows(self, activation: str) -> None:
        layer = randomize(AGCLinear(6, 4, activation=activation, weight_norm=True)).double()
        x = torch.randn(3, 6, dtype=torch.float64)
        torch.testing.assert_close(layer(x), plain(layer)(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fold(layer)(x), layer(x), rtol=1e-12, atol=1e-12)

    def test_gradient_is_orthogonal_to_the_rows(self) -> None:
        layer = randomize(AGCLinear(6, 4, weight_norm=True)).double()
        dweight = gradients(layer, torch.randn(3, 6, dtype=torch.float64))[2]
        assert (layer.weight * dweight).sum(1).abs().max() < 1e-13
        assert dweight.abs().max() > 1e-3


@pytest.mark.parametrize("make", [AGCConv2d, AGCConvPool2d, AGCLinear])
def test_copies_and_representation(make: type[nn.Module]) -> None:
    arguments = (3, 4) if make is AGCLinear else (3, 4, 3)
    layer = randomize(make(*arguments, weight_norm=True))
    assert "activation=relu, weight_norm=True" in repr(layer)
    assert "weight_norm" not in repr(make(*arguments))
    x = torch.randn(2, 3) if make is AGCLinear else torch.randn(2, 3, 8, 8)
    loaded = make(*arguments, weight_norm=True)
    assert set(layer.state_dict()) == {"weight", "bias", "gain", "mean_scale"}
    loaded.load_state_dict(layer.state_dict())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    unpickled = torch.load(file, weights_only=False)
    expected = layer(x)
    for other in (
        copy.copy(layer),
        copy.deepcopy(layer),
        unpickled,
        loaded,
    ):
        found = other(x)
        if isinstance(found, tuple):
            assert torch.equal(found[0], expected[0])
        else:
            assert torch.equal(found, expected)


class TestStandardized:
    def test_mean_of_the_filters_has_no_effect(self) -> None:
        neuron = randomize(AGCConv2d(3, 5, 3, **STANDARDIZED)).double()
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        y, _, dweight, *_ = gradients(neuron, x)
        assert dweight.flatten(1).mean(1).abs().max() < 1e-14
        with torch.no_grad():
            neuron.weight.add_(torch.randn(5, 1, 1, 1))
        torch.testing.assert_close(neuron(x), y, rtol=1e-12, atol=1e-12)

    def test_lambda_starts_at_one_half(self) -> None:
        neuron = AGCConv2d(3, 5, 3, **STANDARDIZED)
        assert (neuron.mean_scale == 0.5).all()
        nn.init.zeros_(neuron.mean_scale)
        neuron.reset_parameters()
        assert (neuron.mean_scale == 0.5).all()
        nn.init.zeros_(neuron.mean_scale)
        assert (he_init_(neuron).mean_scale == 0.5).all()

    def test_depthwise_filters_are_not_centered(self) -> None:
        neuron = randomize(AGCConv2d(4, 4, 3, groups=4, **STANDARDIZED))
        normalized = copy.deepcopy(neuron)
        normalized.weight_norm, normalized.weight_standardization = True, False
        x = torch.randn(1, 4, 8, 8)
        assert torch.equal(neuron(x), normalized(x))
        single = AGCConv2d(4, 4, 1, groups=4, activation="none", **STANDARDIZED)
        assert single(x).std() > 0

    def test_options_changed_between_calls(self) -> None:
        neuron = randomize(AGCConv2d(3, 5, 3))
        x = torch.randn(1, 3, 8, 8)
        before = neuron(x)
        neuron.weight_standardization = True
        assert not torch.allclose(neuron(x), before)

    def test_is_in_the_repr(self) -> None:
        assert repr(AGCConv2d(3, 5, 3, **STANDARDIZED)).endswith("weight_standardization=True)")

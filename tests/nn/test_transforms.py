"""The layers under PyTorch's transforms: compile, export, vmap, autocast, pickle and others."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d, AGCLinear


class Network(nn.Module):
    """A small network with every kind of layer and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            AGCConv2d(3, 8, 3, padding=1),
            AGCConv2d(8, 8, 3, padding=1, stride=2, activation="leaky_relu"),
            AGCConv2d(8, 8, 3, padding=1, groups=2, activation="silu"),
            AGCConv2d(8, 8, 1, activation="gelu"),
            nn.Conv2d(8, 6, 1, bias=False),
            AGC2d(6),
            nn.ReLU(),
        )
        self.head = AGCLinear(6, 4, activation="none")
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def gradients(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], g)]


def assert_same(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-12) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.randn(3, 3, 10, 12, dtype=torch.float64, device=device)


@pytest.fixture
def model(device: str) -> nn.Module:
    return Network().double().to(device)


@pytest.fixture
def g(device: str) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, device=device)


# torch.compile uses deprecated parts of torch; other warnings are still errors.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(
    model: nn.Module, x: Tensor, g: Tensor, dynamic: bool
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    assert_same(gradients(compiled, x, g), gradients(model, x, g))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_contains_plain_ops_only(model: nn.Module, x: Tensor) -> None:
    dims = {0: torch.export.Dim("n", min=2), 2: torch.export.Dim("h", min=4)}
    exported = torch.export.export(model, (x,), dynamic_shapes=(dims,))
    assert "deepcontrol" not in exported.graph_module.code
    other = torch.randn(5, 3, 16, 12, dtype=x.dtype, device=x.device)
    assert_same([exported.module()(other)], [model(other)])


def test_vmap_of_grad_gives_per_sample_gradients(model: nn.Module, x: Tensor) -> None:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        y = torch.func.functional_call(model, parameters, sample.unsqueeze(0))
        return y.square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        y = model(sample.unsqueeze(0))
        expected = torch.autograd.grad(y.square().sum(), list(model.parameters()))
        assert_same([per_sample[name][i] for name in parameters], list(expected))


def test_vmap_over_an_ensemble(x: Tensor) -> None:
    models = [Network().double().to(x.device) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)

    def call(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(models[0], parameters, x)

    together = torch.func.vmap(call)(parameters)
    assert_same(list(together), [m(x) for m in models])


def test_batched_upstream_gradients(model: nn.Module, x: Tensor) -> None:
    """torch.autograd.grad(is_grads_batched=True) computes a Jacobian in one backward."""
    x = x.requires_grad_()
    g = torch.randn(5, 3, 4, dtype=x.dtype, device=x.device)
    (together,) = torch.autograd.grad(model(x), x, g, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(model(x), x, a)[0] for a in g]
    assert_same(list(together), one_by_one)


def test_deepcopy_and_pickle(model: nn.Module, x: Tensor, g: Tensor) -> None:
    expected = gradients(model, x, g)
    assert_same(gradients(copy.deepcopy(model), x, g), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_same(gradients(torch.load(file, weights_only=False), x, g), expected)


def test_meta_device(model: nn.Module, x: Tensor) -> None:
    with torch.device("meta"):
        empty = Network().double()
    y = empty(x.to("meta"))
    assert y.is_meta
    assert y.shape == (3, 4)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in empty.parameters())
    filled = empty.to_empty(device=x.device)
    for module in filled.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert filled(x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_agc2d_keeps_its_input_dtype_and_agcconv2d_casts(
    dtype: torch.dtype, device: str
) -> None:
    layer, neuron = AGC2d(8).to(device), AGCConv2d(3, 8, 3, padding=1).to(device)
    x = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
    with torch.autocast(device, dtype):
        assert layer(torch.randn(2, 8, 4, 4, device=device)).dtype == torch.float32
        v = nn.functional.conv2d(x, neuron.weight)
        assert layer(v).dtype == v.dtype == dtype
        y = neuron(x)
        assert y.dtype == dtype
        assert neuron(x.double()).dtype == torch.float64  # autocast does not cast fp64
    y.backward(torch.randn_like(y))
    assert {p.grad.dtype for p in neuron.parameters()} == {torch.float32}
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), neuron(x), rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_trace_contains_plain_ops_only(model: nn.Module, x: Tensor) -> None:
    traced = torch.jit.trace(model, x)
    assert "deepcontrol::" not in str(traced.inlined_graph)
    assert_same([traced(x)], [model(x)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch itself
def test_forward_mode_differentiation(model: nn.Module, x: Tensor) -> None:
    tangent, g = torch.randn_like(x), torch.randn(3, 4, dtype=x.dtype, device=x.device)
    with torch.autograd.forward_ad.dual_level():
        dual = model(torch.autograd.forward_ad.make_dual(x, tangent))
        derivative = torch.autograd.forward_ad.unpack_dual(dual).tangent
    x = x.requires_grad_()
    (dx,) = torch.autograd.grad(model(x), x, g)
    torch.testing.assert_close((derivative * g).sum(), (dx * tangent).sum())
